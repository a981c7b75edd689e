"""What a chat model is asked by a task, and how its reply begins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from longctx.chat.chat_prompts import with_chat_prompts
from longctx.evaluation import Haystack, Setting
from longctx.evaluation.ruler import prompt_templates
from longctx.evaluation.task_table import TASKS
from tests.longctx.chat.templates import PLAIN, STOP, chat_tokenizer

BEGINS = {
    "niah": r"Answer: The secret codes? of [\w, -]+ (is|are)",
    "passkey": r"The pass key is",
    "kv_retrieval": r'The value of the key "[0-9a-f-]{36}" is',
    "phonebook": r"The telephone number of [\w .]+ is",
    "graphwalks": r"Answer:",
    "numbered_requests": r"Assistant:",
    "ruler_niah": r"The special magic \w+ for [\w, -]+ mentioned in the provided text (is|are)",
    "ruler_fwe": r"Answer: According to the coded text above.* are:",
}
"""By the beginning of a task's name how a reply begins."""
MUTE = {"copy", "associative_recall"}
TEXTS = {
    "ruler_vt": prompt_templates.VARIABLE_TRACKING,
    "ruler_cwe": prompt_templates.COMMON_WORDS,
    "ruler_qa_1": prompt_templates.QUESTION_ANSWERING,
    "ruler_qa_2": prompt_templates.QUESTION_ANSWERING,
}
"""Their samples are of a file, or too long for a tokenizer of bytes."""
LURES = "Answer: this is none. The pass key is here. The special magic is gone. Assistant: The value of the key is x. "


@pytest.mark.few(6)
@pytest.mark.parametrize("name", sorted(TASKS.keys() - MUTE - TEXTS.keys()))
def test_a_reply_begins_where_the_answer_does(tmp_path: Path, name: str):
    """Whatever the haystack says before it, and by any number of tasks at once."""
    plain = chat_tokenizer(tmp_path, PLAIN)
    tokenizer = with_chat_prompts(plain, {task.cue for task in TASKS.values() if task.name not in MUTE})
    setting = Setting(tokenizer=tokenizer, haystack=Haystack(LURES * 400, source="lures"))
    length = 6000
    sample = next(TASKS[name].samples(setting, length, 1))
    ids = tokenizer.encode_prompt(sample.prompt)
    text = "".join(plain.piece(token) if plain.is_control[token] else plain.decode([token]) for token in ids)
    asked, mark, begun = text.rpartition(f"{STOP}\n<|im_start|>assistant\n")
    assert mark
    pattern = max((begin for begin in BEGINS if name.startswith(begin)), key=len)
    assert re.fullmatch(BEGINS[pattern], begun)
    assert asked.startswith("<|im_start|>user\n")
    assert re.sub(r"\s", "", f"{asked.removeprefix('<|im_start|>user')}{begun}") == re.sub(r"\s", "", sample.prompt)
    assert abs(len(ids) - sample.prompt_tokens) <= 2
    assert len(ids) + sample.answer_tokens <= length


@pytest.mark.parametrize("name", TEXTS)
def test_rulers_other_tasks_have_their_cue(name: str):
    _, _, behind = TEXTS[name].text.rpartition("Question: ")
    assert behind.count(TASKS[name].cue) == 1
