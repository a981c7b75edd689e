"""Twelve miniature tokenizers, trained here with the settings that the families' own tokenizers have.

``build(name, folder)`` writes the files that a public model of the family ships.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.longctx.conversion.tiny_tokenizer import corpus, train_tokenizer

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = O200K.replace(_SUFFIX, "").replace(r"\p{N}{1,3}", r"\p{N}")
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _bytes_bpe(
    splits: list[Any],
    specials: list[str],
    *,
    vocab_size: int = 600,
    normalizer: Any = None,
    begin: str | None = None,
    ignore_merges: bool = False,
    specials_first: bool = False,
    plain: tuple[str, ...] = (),
) -> Tokenizer:
    """A byte-level BPE behind the splits of a family; special tokens after the vocabulary, or before it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    first = []
    if specials_first:
        first = specials
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=first,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    byte_level = processors.ByteLevel(trim_offsets=False)
    tokenizer.post_processor = byte_level
    if begin is not None:
        template = processors.TemplateProcessing(
            single=f"{begin} $A",
            pair=f"{begin} $A {begin}:1 $B:1",
            special_tokens=[(begin, tokenizer.token_to_id(begin))],
        )
        tokenizer.post_processor = processors.Sequence([byte_level, template])
    return tokenizer


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _byte_level(**options: Any) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, **{"use_regex": False, **options})


def _write(folder: Path, tokenizer: Tokenizer | None, **config: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _spm(path: Path, **options: Any) -> Path:
    """A SentencePiece model with the library's own defaults but for ``options``."""
    common = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": True,
        "pad_id": -1,
        "bos_piece": "<s>",
        "eos_piece": "</s>",
        "pad_piece": "<pad>",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    return train_tokenizer(
        path, texts=[line for text in corpus() for line in text.split("\n") if line], **common | options
    )


def llama2(folder: Path) -> None:
    """SentencePiece BPE with a space in front, digits apart, bytes; tokenizer.model alone."""
    _spm(folder / "tokenizer.model", allow_whitespace_only_pieces=True)
    _write(
        folder, None, tokenizer_class="LlamaTokenizer", add_bos_token=True, add_eos_token=False, legacy=False,
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False,
    )  # fmt: skip


def mistral(folder: Path) -> None:
    """The same kind of model, shipped as tokenizer.json too: Prepend and Replace, no pre-tokenizer."""
    path = _spm(folder / "tokenizer.model", split_digits=True, vocab_size=640)
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    pieces = model.id_to_piece(list(range(model.vocab_size())))
    learned = [i for i in range(3, len(pieces)) if not model.is_byte(i)]
    known = {pieces[i] for i in learned}
    merges = [
        (pieces[i][:at], pieces[i][at:])
        for i in sorted(learned, key=model.get_score, reverse=True)
        for at in range(1, len(pieces[i]))
        if pieces[i][:at] in known and pieces[i][at:] in known
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    _write(
        folder, tokenizer, tokenizer_class="LlamaTokenizer", add_bos_token=True, add_eos_token=False, legacy=True,
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False,
    )  # fmt: skip


def llama3(folder: Path) -> None:
    """Byte-level BPE behind cl100k's expression; words that are pieces are taken whole."""
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokenizer = _bytes_bpe(
        [_split(CL100K), _byte_level()], specials, begin="<|begin_of_text|>", ignore_merges=True
    )  # fmt: skip
    _write(
        folder, tokenizer, tokenizer_class="PreTrainedTokenizerFast", bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>", clean_up_tokenization_spaces=True,
    )  # fmt: skip


def tekken(folder: Path) -> None:
    """Mistral's later kind: special tokens have the first ids."""
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    tokenizer = _bytes_bpe(
        [_split(TEKKEN), _byte_level()], specials, begin="<s>", ignore_merges=True, specials_first=True
    )
    _write(
        folder, tokenizer, tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>", clean_up_tokenization_spaces=False,
    )  # fmt: skip


def qwen3(folder: Path) -> None:
    """NFC, single digits, no begin token; some added tokens are no special ones."""
    tokenizer = _bytes_bpe(
        [_split(QWEN), _byte_level()],
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        normalizer=normalizers.NFC(),
        plain=("<tool_call>", "<think>"),
    )
    _write(
        folder, tokenizer, tokenizer_class="Qwen2Tokenizer", bos_token=None, eos_token="<|endoftext|>",
        pad_token="<|endoftext|>", unk_token=None, add_bos_token=False, add_prefix_space=False,
        clean_up_tokenization_spaces=False, chat_template="{{ messages }}",
    )  # fmt: skip


def gpt2(folder: Path) -> None:
    """Byte-level BPE with GPT-2's own expression; one token is begin and end, and nothing is put in front."""
    tokenizer = _bytes_bpe([_byte_level(use_regex=True)], ["<|endoftext|>"])
    _write(
        folder, tokenizer, tokenizer_class="GPT2Tokenizer", bos_token="<|endoftext|>", eos_token="<|endoftext|>",
        unk_token="<|endoftext|>", add_prefix_space=False, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def olmoe(folder: Path) -> None:
    """GPT-NeoX's kind: NFC, and runs of spaces as added tokens."""
    runs = tuple(" " * length for length in range(24, 1, -1))
    tokenizer = _bytes_bpe(
        [_byte_level(use_regex=True)], ["<|endoftext|>", "<|padding|>"], normalizer=normalizers.NFC(), plain=runs
    )
    _write(
        folder, tokenizer, tokenizer_class="GPTNeoXTokenizer", bos_token=None, eos_token="<|endoftext|>",
        pad_token="<|padding|>", unk_token="<|endoftext|>", add_bos_token=False, add_eos_token=False,
        add_prefix_space=False, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def deepseek(folder: Path) -> None:
    """Three splits one after the other: digits, Chinese and kana, the rest."""
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    splits = [_split(r"\p{N}{1,3}"), _split("[一-龥぀-ゟ゠-ヿ]+"), _split(DEEPSEEK), _byte_level()]
    tokenizer = _bytes_bpe(splits, [begin, end, "<｜▁pad▁｜>"], begin=begin, plain=("<｜User｜>",))
    _write(
        folder, tokenizer, tokenizer_class="LlamaTokenizerFast", add_bos_token=True, add_eos_token=False,
        bos_token=begin, eos_token=end, pad_token="<｜▁pad▁｜>", legacy=True, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def gpt_oss(folder: Path) -> None:
    """Byte-level BPE behind o200k's expression; no begin token is put in front."""
    specials = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>"]
    tokenizer = _bytes_bpe([_split(O200K), _byte_level()], specials, ignore_merges=False)
    _write(
        folder, tokenizer, tokenizer_class="PreTrainedTokenizerFast", bos_token="<|startoftext|>",
        eos_token="<|return|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False,
    )  # fmt: skip


def gemma(folder: Path) -> None:
    """SentencePiece BPE without a space in front; runs of spaces and of newlines are user-defined symbols."""
    runs = ["\n" * n for n in range(2, 6)] + ["\u2581" * n for n in range(2, 9)]
    symbols = ["<mask>", "<start_of_turn>", "<end_of_turn>", *runs]
    _spm(
        folder / "tokenizer.model", add_dummy_prefix=False, pad_id=0, eos_id=1, bos_id=2, unk_id=3, bos_piece="<bos>",
        eos_piece="<eos>", user_defined_symbols=symbols, vocab_size=700, split_digits=True,
    )  # fmt: skip
    _write(
        folder, None, tokenizer_class="GemmaTokenizer", add_bos_token=True, add_eos_token=False, bos_token="<bos>",
        eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", clean_up_tokenization_spaces=False,
    )  # fmt: skip
    # The public models ship both forms; the tokenizer.json is what transformers makes of the other.
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(folder), local_files_only=True).save_pretrained(str(folder))


def t5(folder: Path) -> None:
    """SentencePiece Unigram that normalises, as tokenizer.json; it ends a text and begins none."""
    path = _spm(
        folder / "spiece", model_type="unigram", byte_fallback=False, normalization_rule_name="nmt_nfkc",
        remove_extra_whitespaces=True, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, vocab_size=400, split_digits=False,
        hard_vocab_limit=False, allow_whitespace_only_pieces=False,
    )  # fmt: skip
    proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    path.unlink()
    tokenizer = Tokenizer(models.Unigram([(p.piece, p.score) for p in proto.pieces], unk_id=2))
    tokenizer.normalizer = normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)
    metaspace = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always", split=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    tokenizer.decoder = decoders.Metaspace(replacement="\u2581", prepend_scheme="always", split=True)
    sentinels = [f"<extra_id_{i}>" for i in range(4)]
    specials = ["<pad>", "</s>", "<unk>", *sentinels]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    _write(
        folder, tokenizer, tokenizer_class="PreTrainedTokenizerFast", eos_token="</s>", pad_token="<pad>",
        unk_token="<unk>", clean_up_tokenization_spaces=False,
    )  # fmt: skip


def own(folder: Path) -> None:
    """A model of ``longctx tokenizer train``."""
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(folder / "tokenizer.model")


FAMILIES: dict[str, Callable[[Path], None]] = {
    write.__name__: write
    for write in (llama2, llama3, mistral, tekken, qwen3, gpt2, deepseek, olmoe, gpt_oss, gemma, t5, own)
}


def build(name: str, folder: Path) -> Path:
    """Write the files of a family into ``folder`` and return it."""
    FAMILIES[name](folder)
    return folder
