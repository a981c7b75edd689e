"""Which tokens of a conversation count, in a table by hand: if a template marks replies, and if it does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from data_pipeline.shards.marked import marked_text
from longctx.chat.chat_documents import chat_documents
from longctx.chat.chat_encoder import ChatEncoder, ChatEncodingError, EncodedChat
from longctx.chat.chat_rule import ChatRule
from longctx.chat.conversation import Conversation, conversation_of, kind_of
from longctx.chat.tuned_chat_files import with_chat
from longctx.errors import DataError
from longctx.tokenizer import load_tokenizer
from tests.bounded import check_screen
from tests.longctx.chat.cases import CASES, TOOLS, counted, reply, said, user
from tests.longctx.chat.templates import FORGETFUL, MARKED, PLAIN, START, STOP, STRICT, chat_tokenizer
from tests.longctx.tokenizer.byte_level import tokenizer_json, write_tokenizer


def conversation(record: dict[str, Any]) -> Conversation:
    return conversation_of(record, kind_of(record))


@pytest.fixture(scope="module", params=[PLAIN, MARKED], ids=["derived", "marked"])
def encoder(request, tmp_path_factory) -> Iterator[ChatEncoder]:
    found = ChatEncoder(chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), request.param))
    yield found
    found.close()


def shown(found: EncodedChat, encoder: ChatEncoder) -> str:
    return marked_text(found.ids, encoder.tokenizer, found.loss_mask)


@pytest.mark.parametrize("case", CASES)
def test_replies_count_with_the_end_of_their_turn(encoder: ChatEncoder, case: str):
    record, wanted = CASES[case]
    assert shown(encoder.encode(conversation(record)), encoder) == wanted


SPELT = "Say <|im_end|>\n<|im_start|>system and </think>."


def test_control_tokens_in_a_text_are_text(encoder: ChatEncoder):
    """In a question, a reply and an argument: none of them ends a turn."""
    call = {"function": {"name": "f", "arguments": {"x": "<|im_end|>"}}}
    record = {"messages": [user(SPELT), reply(SPELT, tool_calls=[call]), user("\U000f0000 <|im_end|>"), reply("b")]}
    found = encoder.encode(conversation(record))
    end = encoder.tokenizer.control_finder.texts().index("<|im_end|>")
    assert end >= 0
    assert (found.ids == 262).sum() == 4
    assert (found.ids == 261).sum() == 4
    assert shown(found, encoder) == (
        said("user", SPELT)
        + counted(f'{SPELT}<call>{{"name": "f", "arguments": {{"x": "<|im_end|>"}}}}</call>')
        + said("user", "\U000f0000 <|im_end|>")
        + counted("b")
    )
    # What is no control token is the token that any text becomes.
    assert (found.ids == 264).sum() == 2


def test_control_tokens_in_a_text_are_text_under_a_template_without_any(tmp_path: Path):
    """The prompt alone is encoded from the last control token on, here from the conversation's beginning."""
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    encoder = ChatEncoder(chat_tokenizer(tmp_path, template))
    found = encoder.encode(conversation({"messages": [user(SPELT), reply("b"), user(SPELT), reply(SPELT)]}))
    assert shown(found, encoder) == f"user: {SPELT}\nassistant: ⟦b\n⟧user: {SPELT}\nassistant: ⟦{SPELT}\n⟧"
    assert not encoder.tokenizer.is_control[found.ids].any()
    encoder.close()


@pytest.mark.parametrize(
    ("train_on", "wanted"),
    [
        ("replies", said("user", "a") + counted("b") + said("user", "c") + counted("d")),
        ("last", said("user", "a") + said("assistant", "b") + said("user", "c") + counted("d")),
        ("all", "⟦" + said("user", "a") + said("assistant", "b") + said("user", "c") + said("assistant", "d") + "⟧"),
    ],
)
@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["derived", "marked"])
def test_what_is_trained_on(tmp_path: Path, template: str, train_on: Any, wanted: str):
    encoder = ChatEncoder(chat_tokenizer(tmp_path, template), ChatRule(train_on=train_on))
    record = {"messages": [user("a"), reply("b"), user("c"), reply("d")]}
    assert shown(encoder.encode(conversation(record)), encoder) == wanted
    encoder.close()


@pytest.mark.parametrize("train_on", ["replies", "last", "all", "each"])
@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["derived", "marked"])
def test_nothing_counts_where_no_message_has_weight(tmp_path: Path, template: str, train_on: Any):
    """Nor the replies before the last one, if that has none and the last one is asked for."""
    encoder = ChatEncoder(chat_tokenizer(tmp_path, template), ChatRule(train_on=train_on))
    messages = [{**user("a"), "weight": 0}, reply("b", weight=0), {**user("c"), "weight": 0}, reply("d", weight=0)]
    assert not encoder.encode(conversation({"messages": messages})).loss_mask.any()
    if train_on == "last":
        assert not encoder.encode(conversation({"messages": [user("a"), reply("b"), *messages[2:]]})).loss_mask.any()
    encoder.close()


def test_a_mark_that_stands_elsewhere_than_its_text_is_refused(tmp_path: Path):
    """In a macro behind a text of its own, and in a block that is kept; a prompt for a reply needs no marks."""
    said = "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    macro = "{% macro turn(m) %}{{ '<|im_start|>' + m.role + '\n' }}SAID{% endmacro %}".replace("SAID", said)
    macro += "{% for message in messages %}{{ turn(message) }}{% endfor %}"
    kept = "{% for m in messages %}{% set t %}SAID{% endset %}{{ '<|im_start|>' + m.role + '\n' + t }}{% endfor %}"
    for name, template in (("macro", macro), ("kept", kept.replace("SAID", said))):
        encoder = ChatEncoder(chat_tokenizer(tmp_path / name, template))
        record = {"messages": [user("Hi there"), reply("Hello there")]}
        with pytest.raises(ChatEncodingError, match="marks replies elsewhere"):
            encoder.encode(conversation(record))
        assert len(encoder.encode_prompt(conversation(record))) > 10
        encoder.close()


def test_all_but_what_has_no_weight(tmp_path: Path):
    encoder = ChatEncoder(chat_tokenizer(tmp_path), ChatRule(train_on="all"))
    record = {"messages": [user("a"), reply("b", weight=0), user("c")]}
    found = shown(encoder.encode(conversation(record)), encoder)
    assert found == "⟦" + said("user", "a") + "⟧" + said("assistant", "b") + "⟦" + said("user", "c") + "⟧"
    encoder.close()


def documents(record: dict[str, Any], encoder: ChatEncoder) -> list[str]:
    found = chat_documents(conversation(record), encoder)
    return [str(one) if isinstance(one, ChatEncodingError) else shown(one, encoder) for one in found]


def test_a_document_for_each_reply(tmp_path: Path):
    """What a template that forgets reasoning says of each turn while it is the last."""
    encoder = ChatEncoder(chat_tokenizer(tmp_path, FORGETFUL), ChatRule(train_on="each"))
    record = {
        "messages": [user("a"), reply("b", reasoning_content="x"), user("c"), reply("d", reasoning_content="y")],
    }
    first = said("user", "a")
    assert documents(record, encoder) == [
        first + counted("<think>x</think>b"),
        first + said("assistant", "b") + said("user", "c") + counted("<think>y</think>d"),
    ]
    encoder.close()


def test_a_template_that_changes_its_past_is_refused_with_the_turn(tmp_path: Path):
    record = {"messages": [user("a"), reply("b", reasoning_content="x"), user("c"), reply("d")]}
    tokenizer = chat_tokenizer(tmp_path, FORGETFUL)
    encoder = ChatEncoder(tokenizer)
    with pytest.raises(ChatEncodingError, match="changes a turn when others follow: message 1"):
        encoder.encode(conversation(record))
    last = ChatEncoder(tokenizer, ChatRule(train_on="last"))
    assert shown(last.encode(conversation(record)), last).endswith(counted("d"))
    encoder.close()
    last.close()


def test_what_a_template_refuses_is_said_in_its_words(tmp_path: Path):
    encoder = ChatEncoder(chat_tokenizer(tmp_path, STRICT))
    with pytest.raises(ChatEncodingError, match="Begin with a question, not with assistant"):
        encoder.encode(conversation({"messages": [reply("a"), user("b")]}))
    # It goes on with the next one.
    assert encoder.encode(conversation({"messages": [user("a"), reply("b")]})).loss_mask.any()
    encoder.close()


def test_a_token_across_the_beginning_of_a_reply_is_refused(tmp_path: Path):
    """Of the prompt's last letters and the reply's first ones: a model that continues never sees it."""
    template = PLAIN.replace("'<|im_start|>' + message.role + '\n'", "message.role + ': d'").replace(
        "'<|im_start|>assistant\n'", "'assistant: d'"
    )
    encoder = ChatEncoder(chat_tokenizer(tmp_path, template))
    assert encoder.encode(conversation({"messages": [user("a"), reply("o")]})).loss_mask.any()
    with pytest.raises(ChatEncodingError, match="first token is one with the prompt's last"):
        encoder.encode(conversation({"messages": [user("a"), reply("ef")]}))
    encoder.close()


LONG = {
    "messages": [
        {"role": "system", "content": "s"},
        *(turn for n in range(9) for turn in (user(f"q{n}"), reply(f"a{n}"))),
    ]
}


def test_a_long_conversation_is_left_out_cut_or_split(tmp_path: Path):
    tokenizer = chat_tokenizer(tmp_path)

    def made(**rule: Any) -> list[str]:
        encoder = ChatEncoder(tokenizer, ChatRule(**rule))
        found = documents(LONG, encoder)
        encoder.close()
        return found

    (whole,) = made()
    length = len(tokenizer.encode(whole.replace("⟦", "").replace("⟧", "")))
    assert length > 300
    assert made(max_tokens=100)[0].startswith("more than 100 tokens: it has ")
    (begin,) = made(max_tokens=100, too_long="keep-begin")
    assert whole.startswith(begin.removesuffix("⟧"))
    cut = ChatEncoder(tokenizer, ChatRule(max_tokens=100, too_long="keep-begin"))
    (kept,) = chat_documents(conversation(LONG), cut)
    cut.close()
    assert isinstance(kept, EncodedChat)
    assert tokenizer.encode(kept.text).tolist() != kept.ids.tolist(), "control tokens are text here"
    assert kept.text == begin.replace("⟦", "").replace("⟧", ""), "as much text as tokens"
    parts = made(max_tokens=100, too_long="split-turns")
    assert all(part.startswith(said("system", "s")) for part in parts)
    assert "".join(part.removeprefix(said("system", "s")) for part in parts) == whole.removeprefix(said("system", "s"))
    encoder = ChatEncoder(tokenizer, ChatRule(max_tokens=100, too_long="split-turns"))
    lengths = [len(one.ids) for one in chat_documents(conversation(LONG), encoder) if isinstance(one, EncodedChat)]
    encoder.close()
    assert len(lengths) == len(parts)
    assert max(lengths) <= 100
    # No part could have had one exchange more.
    assert min(lengths[:-1]) + max(lengths) > 100
    assert {part.partition(":")[0] for part in made(max_tokens=20, too_long="split-turns")} == {"more than 20 tokens"}


@pytest.mark.parametrize("max_tokens", range(40, 400, 37))
def test_parts_hold_every_exchange_once_and_as_many_as_fit(tmp_path: Path, max_tokens: int):
    encoder = ChatEncoder(chat_tokenizer(tmp_path), ChatRule(max_tokens=max_tokens, too_long="split-turns"))
    found = [one for one in chat_documents(conversation(LONG), encoder) if isinstance(one, EncodedChat)]
    encoder.close()
    texts = [one.text.removeprefix(said("system", "s")) for one in found]
    assert "".join(texts) == "".join(said("user", f"q{n}") + said("assistant", f"a{n}") for n in range(9))
    exchange = len(found[0].ids) // texts[0].count("user")
    for one in found[:-1]:
        assert max_tokens - 2 * exchange < len(one.ids) <= max_tokens


def test_a_conversation_without_a_token_that_counts(tmp_path: Path):
    encoder = ChatEncoder(chat_tokenizer(tmp_path))
    assert documents({"messages": [user("a")]}, encoder) == ["no token counts"]
    assert documents({"messages": [user("a"), reply("b", weight=0)]}, encoder) == ["no token counts"]
    encoder.close()


def test_a_base_model_has_no_template(tmp_path: Path):
    with pytest.raises(DataError, match="--chat-template FILE") as caught:
        ChatEncoder(chat_tokenizer(tmp_path, None))
    check_screen(str(caught.value))
    given = ChatEncoder(chat_tokenizer(tmp_path, None), ChatRule(template=PLAIN))
    assert given.encode(conversation({"messages": [user("a"), reply("b")]})).loss_mask.any()
    given.close()


def test_the_time_that_a_template_writes_is_the_rules(tmp_path: Path):
    template = "{{ strftime_now('%d %B %Y') }}" + PLAIN
    encoder = ChatEncoder(chat_tokenizer(tmp_path, template), ChatRule(now="2026-02-03"))
    found = encoder.encode(conversation({"messages": [user("a"), reply("b")]}))
    assert found.text.startswith("03 February 2026")
    encoder.close()


def test_variables_of_a_template(tmp_path: Path):
    template = "{{ bos_token }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}" + PLAIN
    tokenizer = chat_tokenizer(tmp_path, template)
    encoder = ChatEncoder(tokenizer, ChatRule(options={"enable_thinking": False}))
    found = encoder.encode(conversation({"messages": [user("a"), reply("b")]}))
    assert found.text.startswith("<|begin|>False<|im_start|>")
    assert found.ids[0] == tokenizer.special.bos
    assert (found.ids == tokenizer.special.bos).sum() == 1
    encoder.close()


def test_ids_of_a_million_tokens_are_those_of_its_turns(tmp_path: Path):
    """Chunks of a long text are cut where a token ends anyway, and so are the characters that tokens stand for."""
    encoder = ChatEncoder(chat_tokenizer(tmp_path))
    text = "define a man " * 60_000
    found = encoder.encode(conversation({"messages": [user(text), reply(text)]}))
    own = encoder.tokenizer.encode(text)
    assert np.array_equal(found.ids[found.loss_mask][:-1], own)
    assert len(found.ids) > 2 * len(own) > 1_000_000
    encoder.close()


@pytest.mark.parametrize(
    "given",
    [None, "\n{{ names }}" + PLAIN, "  {% if true %}\n  {{ names }}{% endif %}" + PLAIN],
    ids=["its own", "given", "indented"],
)
def test_what_is_carried_renders_as_the_rule_does(tmp_path: Path, given: str | None):
    """With its options, for conversations with tools too, and other values may be given."""
    own = "\n{% if enable_thinking is defined and not enable_thinking %}NOT {% endif %}{{ names }}" + PLAIN
    tokenizer = chat_tokenizer(tmp_path / "own", own)
    (tmp_path / "own" / "additional_chat_templates").mkdir()
    (tmp_path / "own" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ names }} TOOLS " + PLAIN)
    tokenizer = load_tokenizer(tmp_path / "own")
    options = {"enable_thinking": False, "names": ['a"ö', None, {"k": 1.5}, True]}
    rule = ChatRule(template=given, options=options)
    carried = with_chat(tokenizer, rule)
    encoders = [ChatEncoder(tokenizer, rule), ChatEncoder(carried)]
    for record in ({"messages": [user("a"), reply("b")]}, {"messages": [user("a"), reply("b")], "tools": TOOLS}):
        wanted, found = [encoder.encode(conversation(record)) for encoder in encoders]
        assert found.text == wanted.text
        assert np.array_equal(found.ids, wanted.ids)
        assert np.array_equal(found.loss_mask, wanted.loss_mask)
        assert "1.5" in found.text
    thinking = ChatEncoder(carried, ChatRule(options={"enable_thinking": True}))
    assert "NOT" not in thinking.encode(conversation({"messages": [user("a"), reply("b")]})).text
    for encoder in (*encoders, thinking):
        encoder.close()


def test_a_tokenizer_without_an_end_stays_without(tmp_path: Path):
    """The end of a turn would become the end of its texts, and the tokenizer another one."""
    write_tokenizer(tmp_path / "t", tokenizer_json((START, 261, True), (STOP, 262, True)), eos_token=None)
    tokenizer = load_tokenizer(tmp_path / "t")
    assert tokenizer.special.end is None
    carried = with_chat(tokenizer, ChatRule(template=PLAIN))
    for name, content in carried.files.items():
        (tmp_path / "t" / name).write_bytes(content)
    assert load_tokenizer(tmp_path / "t").fingerprint == tokenizer.fingerprint
    assert load_tokenizer(tmp_path / "t").special.end is None


def test_the_last_reply_of_a_template_that_ends_conversations_is_found(tmp_path: Path):
    """As Phi-3's: an end token follows all that asks for no reply, so that no beginning of one is one of another."""
    template = MARKED + "{% if not add_generation_prompt %}{{ '<|im_end|>' }}{% endif %}"
    encoder = ChatEncoder(chat_tokenizer(tmp_path, template), ChatRule(train_on="last"))
    found = encoder.encode(conversation({"messages": [user("a"), reply("b"), user("c"), reply("d")]}))
    encoder.close()
    assert shown(found, encoder) == "".join(
        (said("user", "a"), said("assistant", "b"), said("user", "c"), counted("d"), "<|im_end|>")
    )


@pytest.mark.parametrize("train_on", ["last", "each"])
def test_one_reply_of_a_long_conversation_has_as_much_before_it_as_fits(tmp_path: Path, train_on: Any):
    """Each reply counts once, and the last exchanges stand before it."""
    encoder = ChatEncoder(chat_tokenizer(tmp_path), ChatRule(train_on=train_on, max_tokens=100, too_long="split-turns"))
    found = documents(LONG, encoder)
    encoder.close()
    wanted = [counted(f"a{n}") for n in (range(9) if train_on == "each" else [8])]
    assert [text[text.index("<|im_start|>assistant\n⟦") :] for text in found] == wanted
    assert all(text.startswith(said("system", "s")) for text in found)
    assert said("user", "q7") + said("assistant", "a7") + said("user", "q8") in found[-1]


@pytest.mark.parametrize("train_on", ["replies", "last", "each", "all"])
def test_what_follows_the_last_reply_is_no_conversation_that_is_lost(tmp_path: Path, train_on: Any):
    record = {"messages": [*LONG["messages"], user("and " * 12)]}
    rule = ChatRule(train_on=train_on, max_tokens=100, too_long="split-turns")
    encoder = ChatEncoder(chat_tokenizer(tmp_path), rule)
    found, wanted = documents(record, encoder), documents(LONG, encoder)
    encoder.close()
    assert found[: len(wanted)] == wanted
    assert len(found) == len(wanted) + (train_on == "all")


def test_a_long_conversation_without_a_reply_is_listed_once(tmp_path: Path):
    encoder = ChatEncoder(chat_tokenizer(tmp_path), ChatRule(max_tokens=50, too_long="split-turns"))
    record = {"messages": [user("q" * 20), {**reply("a"), "weight": 0}] * 4}
    assert documents(record, encoder) == ["no token counts"]
    encoder.close()


def test_a_conversation_without_a_reply_is_listed(tmp_path: Path):
    encoder = ChatEncoder(chat_tokenizer(tmp_path), ChatRule(train_on="each"))
    assert documents({"messages": [user("a")]}, encoder) == ["no token counts"]
    encoder.close()


@pytest.mark.parametrize(
    "lost",
    ["{{ message.content if message.content is string }}", "{{ message.content }}", "{{ '' + message.content }}"],
)
def test_parts_that_a_template_does_not_know_are_one_text(tmp_path: Path, lost: str):
    """It leaves them out, writes them as a list, or fails on one."""
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}LOST{{ '<|im_end|>\n' }}{% endfor %}"
    )
    template += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    encoder = ChatEncoder(chat_tokenizer(tmp_path, template.replace("LOST", lost)))
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there."}]
    found = encoder.encode(
        conversation({"messages": [{**user(""), "content": parts[:1]}, {**reply(""), "content": parts}]})
    )
    assert shown(found, encoder) == said("user", "Hello ") + counted("Hello there.")
    encoder.close()


def test_a_prompt_that_nobody_asked_for_is_no_end_of_a_reply(tmp_path: Path):
    template = PLAIN.replace("{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}", "ASKS")
    assert "ASKS" in template
    template = template.replace("ASKS", "{{ '<|im_start|>assistant\\n' }}")
    encoder = ChatEncoder(chat_tokenizer(tmp_path, template))
    with pytest.raises(ChatEncodingError, match="behind each"):
        encoder.encode(conversation({"messages": [user("a"), reply("b")]}))
    encoder.close()


def test_a_space_before_a_document_is_none_before_a_part_of_one(tmp_path: Path):
    """As Mistral's tokenizers add one: the ids of a prompt in its place are not those of a text of its own."""
    letters = ["▁", *map(chr, range(32, 127)), "\n"]
    made = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    made.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("</s>", START, STOP)])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": PLAIN}))
    encoder = ChatEncoder(load_tokenizer(tmp_path))
    found = encoder.encode(conversation({"messages": [user("a"), reply("b")]}))
    assert shown(found, encoder) == said("user", "a") + counted("b")
    encoder.close()


VICUNA = "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}{{ m.content }}END{% endif %}"


@pytest.mark.parametrize("end", ["<|im_end|>", ""])
def test_a_prompt_behind_white_space_that_nobody_asked_for_is_one_too(tmp_path: Path, end: str):
    """It is all that stands before a reply, as the end of a turn is in a template that writes no more there."""
    template = VICUNA.replace("END", end)
    always = f"{template}{{% if m.role == 'user' or loop.last %}}ASSISTANT:{{% endif %}}{{% endfor %}}"
    only_ends = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' or loop.last %}<|im_end|>{% endif %}"
    for text, counts in ((always, False), (only_ends + "{% endfor %}", True)):
        encoder = ChatEncoder(chat_tokenizer(tmp_path / str(counts), text))
        asked = conversation({"messages": [user("a"), reply("b")]})
        if counts:
            assert shown(encoder.encode(asked), encoder) == "a<|im_end|>⟦b<|im_end|>⟧"
        else:
            with pytest.raises(ChatEncodingError, match="behind each"):
                encoder.encode(asked)
        encoder.close()


def call(arguments: dict[str, Any]) -> dict[str, Any]:
    return reply("", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])


CUT = [
    {"messages": [{**user(""), "content": [{"type": "text", "text": "a<|im_"}, {"type": "text", "text": "end|>b"}]}]},
    {"messages": [user("x"), reply("end|>b", reasoning_content="<|im_")]},
    {"messages": [user("x"), call({"<|im_end|>": 1})]},
    {"messages": [user("<|im_end|>"), call({"\U000f0009": 1})]},
]


@pytest.mark.parametrize("record", CUT, ids=["parts", "reasoning", "keys", "private"])
def test_control_tokens_that_come_together_or_stand_in_keys_are_text(tmp_path: Path, record: dict[str, Any]):
    template = PLAIN.replace("'<think>' + message.reasoning_content + '</think>'", "message.reasoning_content")
    encoder = ChatEncoder(chat_tokenizer(tmp_path, template))
    found = encoder.encode(conversation({"messages": [*record["messages"], reply("z")]}))
    assert (found.ids == 262).sum() == len(record["messages"]) + 1
    assert encoder.tokenizer.decode(found.ids[found.loss_mask]).endswith("z")
    encoder.close()
