"""TRL's side of ``benchmarks.tuning``, run by the Python in which TRL is installed: builds the model, and trains it.

    python trl_side.py make FOLDER SHAPE
    python trl_side.py train SETTINGS

Both take JSON. It imports nothing from this project.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, as in Qwen's models, with TRL's marks around tokens in the loss."""


def make(folder: Path, shape: dict[str, Any]) -> None:
    """Write a model with random weights, a tokenizer of this Python's own source, and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [path.read_text(errors="ignore") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]]
    trainer = trainers.BpeTrainer(
        vocab_size=shape["vocab_size"],
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**shape, eos_token_id=2, bos_token_id=None, pad_token_id=0))
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


def train(settings: dict[str, Any]) -> None:
    """Train, and print the steps' losses as JSON."""
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import set_verbosity_error
    from trl import SFTConfig, SFTTrainer

    set_verbosity_error()
    torch.set_num_threads(settings["threads"])

    class InOrder(SFTTrainer):
        """Takes the conversations in their order."""

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    lines = Path(settings["conversations"]).read_text().splitlines()
    arguments = SFTConfig(
        output_dir=settings["output"],
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["batch"],
        gradient_accumulation_steps=settings["accumulation"],
        packing=settings["packing"],
        max_length=settings["max_length"],
        assistant_only_loss=True,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        optim="adamw_torch",
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
    )
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32, attn_implementation="sdpa")
    trainer = InOrder(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
    )
    trainer.train()
    found = [entry for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps({"losses": [entry["loss"] for entry in found]}))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        train(json.loads(sys.argv[2]))
