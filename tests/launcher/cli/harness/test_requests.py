"""lm-eval's requests as ids, options and batches, without lm-eval and without a model."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.evaluation.harness.chat_renderer import ChatRenderer
from launcher.evaluation.harness.request_batches import assign_by_cost, by_context, packs, portions
from launcher.evaluation.harness.request_encoder import Encoder, GenerationRequest, check_request_lengths, generation_of
from launcher.evaluation.harness.settings import Settings, parse_device
from longctx.chat.template import TemplateError
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.generation.beams import Beams
from longctx.generation.penalties import Penalties
from longctx.generation.sampling import Greedy, Sampling
from longctx.generation.scoring import Pair
from longctx.tokenizer import load_tokenizer
from tests.longctx.chat.templates import START, STOP, STRICT, chat_tokenizer


@pytest.fixture(scope="session")
def encoder(world: Path) -> Encoder:
    return Encoder(load_tokenizer(world / "tokenizer.model"))


@pytest.fixture(scope="session")
def begin(world: Path) -> int:
    token = load_tokenizer(world / "tokenizer.model").special.begin
    assert token is not None
    return token


def test_a_text_begins_once(world, encoder, begin):
    """Also where it spells its first token itself, as a template does."""
    tokenizer = load_tokenizer(world / "tokenizer.model")
    ids = encoder.text("def main")
    assert ids == [begin, *tokenizer.encode("def main").tolist()]
    assert encoder.text(f"{tokenizer.piece(begin)}def main") == ids
    assert encoder.text("") == [begin]


def test_a_pair_is_the_whole_text_cut_where_the_context_ends(encoder, begin):
    for context, continuation in (
        ("import", " os"),
        ("import ", "os"),
        ("import \n ", "os"),
        (" ", "os"),
        ("a\n", " b"),
    ):
        pair = encoder.pair(context, continuation)
        assert [*pair.context, *pair.continuation] == encoder.text(context + continuation)
        assert list(pair.context) == encoder.text(context.rstrip())
    assert encoder.pair("", "import") == Pair([begin], encoder.text("import")[1:])


def test_a_continuation_without_a_token_of_its_own_is_refused(encoder):
    with pytest.raises(ConfigError, match="no separate token"):
        encoder.pair("import", "")
    with pytest.raises(ConfigError, match="no separate token"):
        encoder.pair("", "")


def test_windows_predict_each_id_once_with_all_the_context_there_is(encoder, begin):
    text = "import os\nimport sys\n" * 8
    ids = encoder.text(text)
    for length in (1, 2, 7, len(ids) - 1, len(ids), len(ids) + 5):
        windows = encoder.windows(text, length)
        assert [token for window in windows for token in window.continuation] == ids
        # A perplexity counts the first token too, behind another one like it: that is lm-eval's rule.
        assert windows[0] == Pair([begin], ids[:length])
        done = 0
        for window in windows:
            assert window.num_read <= length
            if done:
                assert window.num_read == length
                assert list(window.context) == ids[done - len(window.context) : done]
            done += len(window.continuation)
    assert encoder.windows("", 8) == [Pair([begin], [begin])]


def test_a_tokenizer_without_begin_takes_its_end():
    def fake(bos: int | None, end: int | None) -> SimpleNamespace:
        special = SimpleNamespace(bos=bos, end=end, begin=None)
        return SimpleNamespace(special=special, piece=lambda token: f"<{token}>", path="F")

    assert Encoder(fake(None, 5)).prefix == 5  # type: ignore[arg-type]
    assert Encoder(fake(0, 5)).prefix == 0  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="neither a begin nor an end"):
        Encoder(fake(None, None))  # type: ignore[arg-type]


def test_what_is_too_long_is_refused_with_what_works():
    check_request_lengths([3, 8], 8, "the longest needs", "")
    with pytest.raises(
        ConfigError, match=r"2 of 3 requests do not fit: the longest needs 1,200 tokens.*Requests are not truncated"
    ) as said:
        check_request_lengths([3, 9, 1200], 8, "the longest needs", "Try fewer.")
    assert str(said.value).endswith("Try fewer.")


OPTIONS = [
    ({}, Greedy(), 256, ()),
    ({"until": "\n", "max_gen_toks": 7, "do_sample": False, "temperature": 0.0}, Greedy(), 7, ("\n",)),
    ({"until": ["a", "b", "a"], "max_new_tokens": 9, "top_p": 0.5}, Greedy(), 9, ("a", "b")),
    ({"temperature": 0.5, "top_k": 3}, Sampling(temperature=0.5, top_k=3), 256, ()),
    ({"do_sample": True, "temperature": 1.0, "min_p": 0.1}, Sampling(min_p=0.1), 256, ()),
    ({"temperature": 0.5, "do_sample": False}, Greedy(), 256, ()),
    ({"num_beams": 3, "length_penalty": 0.0}, Beams(num_beams=3, length_penalty=0.0), 256, ()),
]


@pytest.mark.parametrize(("options", "strategy", "count", "until"), OPTIONS, ids=[str(case[0]) for case in OPTIONS])
def test_options_of_generation(options, strategy, count, until):
    wanted = GenerationRequest(max_new_tokens=count, until=until, strategy=strategy, penalties=Penalties())
    assert generation_of(options) == wanted


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topk": 3}, "topk is unknown"),
        ({"do_sample": True}, "temperature above 0"),
        ({"num_beams": 2, "temperature": 1.0}, "Leave out do_sample and temperature"),
    ],
)
def test_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        generation_of(options)


def test_model_args():
    settings = Settings.of({"checkpoint": 2024, "dtype": "bfloat16", "context": 2, "tokenizer": None})
    assert settings == Settings(checkpoint=Path("2024"), dtype="bfloat16", context=2)
    small = ModelConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=1, ffn_size=8, max_positions=64)
    assert settings.limit(small) == 64
    assert Settings(checkpoint=Path(), max_length=32).limit(small) == 32
    assert Settings(checkpoint=Path(), max_length=99, beyond_positions=True).limit(small) == 99
    for cpu in ("cpu", "cpu:0"):
        assert parse_device(cpu) == "cpu"
    assert (parse_device(None), parse_device("cuda:1")) == ("auto", "cuda")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "names no checkpoint"),
        ({"checkpoint": "x", "max_lenght": 3}, "Did you mean max_length"),
        ({"checkpoint": "x", "context": "two"}, "context=two: give a whole number"),
        ({"checkpoint": "x", "chunk_tokens": 0}, "chunk_tokens=0"),
    ],
)
def test_model_args_that_cannot_be_are_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        Settings.of(arguments)


def test_a_limit_beyond_the_positions_has_to_be_asked_for():
    model = {"vocab_size": 8, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "ffn_size": 8, "max_positions": 64}
    with pytest.raises(ConfigError, match="beyond_positions=true"):
        Settings(checkpoint=Path(), max_length=65).limit(ModelConfig(**model))
    with pytest.raises(ConfigError, match="max_length=64 or less"):
        Settings(checkpoint=Path(), max_length=65, beyond_positions=True).limit(
            ModelConfig(**model, position="learned")
        )


def test_batches():
    pairs = [Pair([1], [2]), Pair([1, 2, 3], [4, 5]), Pair([1], [3, 4]), Pair([1, 2, 3], [4])]
    assert by_context(pairs) == [[1, 3], [0, 2]]
    assert packs([3, 4, 1, 9, 2], 8) == [[0, 1, 2], [3], [4]]
    assert list(portions([3, 4, 1, 9, 2], 8)) == [range(3), range(3, 4), range(4, 5)]
    assert list(portions([], 8)) == packs([], 8) == []
    costs = [random.Random(0).randrange(1, 100) for _ in range(40)]
    for degree in (1, 2, 3, 50):
        shares = assign_by_cost(costs, degree)
        assert sorted(index for share in shares for index in share) == list(range(40))
        totals = [sum(costs[index] for index in share) for share in shares]
        assert max(totals) - min(totals) <= max(costs)


def test_turns_go_on_where_the_template_leaves_them(tmp_path):
    """With the spaces at their end if the template keeps them; and without a system turn if it refuses one."""
    template = STRICT.replace("{{ message.content }}", "{{ message.content | trim }}")
    for name, own, end in (("kept", STRICT, "An \n"), ("trimmed", template, "An")):
        tokenizer = chat_tokenizer(tmp_path / name, own)
        chats = ChatRenderer(tokenizer, options={"enable_thinking": False})
        question, begun = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "An \n"}
        head = f"{START}user\nQ{STOP}\n{START}assistant\n"
        assert chats.render([question], asks=True) == head
        assert chats.render([question, begun], asks=False) == head + end
        assert chats.render([{"role": "system", "content": "s"}, question], asks=True) == head
        with pytest.raises(TemplateError, match="Begin with a question"):
            chats.render([begun], asks=True)
        encoder = Encoder(tokenizer)
        assert encoder.text(head).count(261) == 0
        encoder.reads_control = True
        assert encoder.text(head).count(261) == 2
        assert encoder.pair(head, "x").context + encoder.pair(head, "x").continuation == encoder.text(f"{head}x")
    with pytest.raises(ConfigError, match=r"no chat template 'other'\. Available: default"):
        ChatRenderer(tokenizer, "other")


def test_thoughts_are_not_scored():
    with pytest.raises(ConfigError, match="enable_thinking=false"):
        Settings.of({"checkpoint": "x", "enable_thinking": True})
    assert Settings.of({"checkpoint": "x", "enable_thinking": False}).chat_options() == {"enable_thinking": False}
