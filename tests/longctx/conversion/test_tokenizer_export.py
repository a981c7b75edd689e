"""The exported fast tokenizer gives SentencePiece's ids, on text that nobody would write on purpose."""

from __future__ import annotations

import json
import random

import pytest
import sentencepiece
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longctx.conversion import check_tokenizer, export_tokenizer
from longctx.errors import DataError
from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.hard_texts import HARD_TEXTS
from longctx.tokenizer.text_chunks import SPACE_MARK
from tests.longctx.conversion.tiny_tokenizer import corpus, train_tokenizer

SPECIALS = ["<|document_begin|>", "<|document_end|>", "<|padding|>", "<unk>", "<s>", "</s>", "<0x41>", "<0xFF>"]
FRAGMENTS = [*SPECIALS, *"\t (🙂é", "\r\n", "\x00", "  ", "    ", "self", "return ", "e\u0301", SPACE_MARK]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    model = train_tokenizer(folder / "source.model", vocab_size=700)
    (folder / "hf").mkdir()
    ids = export_tokenizer(model, folder / "hf", max_positions=64)
    fast = transformers.AutoTokenizer.from_pretrained(str(folder / "hf"), local_files_only=True)
    return model, folder / "hf", ids, sentencepiece.SentencePieceProcessor(model_file=str(model)), fast


def assert_equal_ids(exported, text: str) -> None:
    model, _, _, slow, fast = exported
    ids = fast(text)["input_ids"]
    assert ids == load_tokenizer(model).encode_prompt(text)
    assert fast.decode(ids, skip_special_tokens=True) == text
    if SPACE_MARK not in text:
        assert ids == [1, *slow.encode(text)]


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_nasty_texts(exported, text):
    assert_equal_ids(exported, text)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
        st.text("aeonrst ()=_\n", max_size=200),  # many merges to choose from
        st.text("a =-\t", max_size=120),  # runs
        st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join),
    )
)
def test_any_text(exported, text):
    assert_equal_ids(exported, text)


def test_code_cut_anywhere(exported):
    rng = random.Random(0)
    text = "".join(corpus())
    for _ in range(300):
        start = rng.randrange(len(text))
        assert_equal_ids(exported, text[start : start + rng.randrange(400)])
    assert_equal_ids(exported, text)


@pytest.mark.parametrize("options", [{"vocab_size": 360}, {"vocab_size": 1400}, {"split_by_whitespace": False}])
def test_other_vocabularies(tmp_path, options):
    model = train_tokenizer(tmp_path / "source.model", **options)
    export_tokenizer(model, tmp_path, max_positions=64)
    texts = "".join(corpus())
    check_tokenizer(model, tmp_path, [*HARD_TEXTS, texts, " " * 37, "a" * 53, "=" * 71, texts[::-1]])


def test_ambiguous_merges_follow_sentencepiece(tmp_path):
    """A vocabulary from a two-letter corpus is full of pieces that can be made in several, overlapping ways."""
    rng = random.Random(1)
    words = ["".join(rng.choice("ab") for _ in range(400)) for _ in range(200)]
    words += ["a b " * 20] * 60
    model = train_tokenizer(tmp_path / "source.model", texts=words, vocab_size=420)
    export_tokenizer(model, tmp_path, max_positions=64)
    texts = ["".join(rng.choice("ab") for _ in range(rng.randrange(300))) for _ in range(300)]
    check_tokenizer(model, tmp_path, [*texts, "a" * 99, "ab" * 99, "aba" * 99, "aabaa" * 50])


def test_special_tokens(exported):
    _, folder, ids, slow, fast = exported
    named = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "decoder_start_token_id": 1}
    assert ids == named | {"forced_bos_token_id": None, "forced_eos_token_id": None}
    assert (fast.bos_token_id, fast.eos_token_id, fast.pad_token_id) == (1, 2, 3)
    assert fast.model_max_length == 64
    text = "a<|document_end|>b"
    assert 2 not in fast(text)["input_ids"]
    assert fast(text, split_special_tokens=False)["input_ids"] == [1, *slow.encode("a"), 2, *slow.encode("b")]
    assert fast.decode([1, *slow.encode("x y"), 2], skip_special_tokens=True) == "x y"
    assert (folder / "tokenizer.model").is_file()


def test_a_difference_is_found(exported, tmp_path):
    model, folder, *_ = exported
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    check_tokenizer(model, tmp_path, HARD_TEXTS)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][1:]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="from token"):
        check_tokenizer(model, tmp_path, corpus())


FOREIGN = {
    "a space in front": {"add_dummy_prefix": True},
    "extra spaces removed": {"remove_extra_whitespaces": True, "add_dummy_prefix": True},
    "user-defined symbols": {"user_defined_symbols": ["<|call|>", "\u2581\u2581", "\n\n"]},
    "no byte fallback": {"byte_fallback": False},
    "Unigram": {"model_type": "unigram", "add_dummy_prefix": True},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_models_are_exported_as_sentencepiece_encodes_them(tmp_path, kind):
    lines = [line for text in corpus() for line in text.split("\n") if line]
    pieces = {"bos_piece": "<s>", "eos_piece": "</s>"}
    model = train_tokenizer(tmp_path / "source.model", texts=lines, **pieces, **FOREIGN[kind])
    ids = export_tokenizer(model, tmp_path, max_positions=64)
    assert (ids["bos_token_id"], ids["eos_token_id"]) == (1, 2)
    check_tokenizer(model, tmp_path, [*HARD_TEXTS, *corpus(), "a<|call|>b <|call|>\n\n\n"])
    # The folder's tokenizer.json is a tokenizer of its own, with the same ids.
    again = load_tokenizer(tmp_path)
    for text in corpus():
        assert again.encode_prompt(text) == load_tokenizer(model).encode_prompt(text)


def test_a_unigram_of_ours_is_exported_with_its_own_rule(tmp_path):
    """Real spaces in its pieces, no normaliser, and U+2581 in a text as its bytes."""
    model = train_tokenizer(tmp_path / "source.model", model_type="unigram", vocab_size=400)
    assert load_tokenizer(model).is_own
    export_tokenizer(model, tmp_path, max_positions=64)
    check_tokenizer(model, tmp_path, [*HARD_TEXTS, *corpus()])
    fast = transformers.AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    text = f"a{SPACE_MARK}b {SPACE_MARK}"
    assert fast.decode(fast(text)["input_ids"], skip_special_tokens=True) == text


def test_a_model_that_no_tokenizer_json_expresses_is_refused(tmp_path):
    """Hugging Face's copy of SentencePiece's normaliser composes letters otherwise."""
    model = train_tokenizer(tmp_path / "source.model", bos_piece="<s>", normalization_rule_name="nmt_nfkc")
    export_tokenizer(model, tmp_path, max_positions=64)
    with pytest.raises(DataError, match=r"differs from (?s:.*)--tokenizer none"):
        check_tokenizer(model, tmp_path, HARD_TEXTS)
    model = train_tokenizer(tmp_path / "source.model", model_type="char", bos_piece="<s>", vocab_size=400)
    with pytest.raises(DataError, match=r"its type is characters.*\n.*--tokenizer none"):
        export_tokenizer(model, tmp_path, max_positions=64)


def test_a_vocabulary_without_a_space_is_refused(tmp_path):
    """SentencePiece would spell a space with the bytes of U+2581 then."""
    model = train_tokenizer(tmp_path / "source.model", texts=["abab" * 9, "ba" * 7], vocab_size=265)
    with pytest.raises(DataError, match="no piece for a space"):
        export_tokenizer(model, tmp_path, max_positions=64)
