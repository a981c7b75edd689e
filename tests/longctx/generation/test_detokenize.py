"""Text of tokens that come one by one: joined, it is what decoding all of them gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import sentencepiece as spm
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.generation.detokenize import TextStream

CORPUS = ["def main():\n    return 'ä 🙂 日本語'\n", "the cat sat  on the mat\n", "naïve café — déjà vu\n"] * 20


@pytest.fixture(scope="module")
def decoders(tmp_path_factory) -> dict:
    """Decoding by name, with the number of ids: SentencePiece with its prefix space, and bytes of UTF-8."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "corpus").write_text("".join(CORPUS))
    found = {}
    for name, options in {
        "prefix": {},
        "exact": {"add_dummy_prefix": False, "normalization_rule_name": "identity"},
    }.items():
        spm.SentencePieceTrainer.train(
            input=str(folder / "corpus"), model_prefix=str(folder / name), vocab_size=330, model_type="bpe",
            byte_fallback=True, character_coverage=0.98, minloglevel=2, **options,
        )  # fmt: skip
        model = spm.SentencePieceProcessor(str(folder / f"{name}.model"))
        found[name] = (lambda ids, model=model: model.decode(list(ids)), 3, model.vocab_size())
    fast = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    fast.train_from_iterator(CORPUS, trainer)
    found["bytes"] = (lambda ids: fast.decode(list(ids)), 0, fast.get_vocab_size())
    return found


def streamed(decode, prompt: Sequence[int], ids: Sequence[int]) -> list[str]:
    stream = TextStream(decode, prompt)
    return [*(stream.add(token) for token in ids), stream.finish()]


@pytest.mark.parametrize("name", ["prefix", "exact", "bytes"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_parts_are_the_whole_text(decoders, name, data):
    decode, first, size = decoders[name]
    token = st.integers(first, size - 1)
    ids = data.draw(st.lists(token, max_size=12))
    text = data.draw(st.sampled_from(["", "a", "def main():\n", "ä 🙂", "  x", "the cat"]))
    prompt = encode(decoders, name, text)
    whole = decode([*prompt, *ids])
    assert whole == decode(prompt) + "".join(streamed(decode, prompt, ids))


def encode(decoders, name: str, text: str) -> list[int]:
    """Some ids whose text is this one: the fewest tokens, from the left."""
    decode, first, size = decoders[name]
    pieces = {decode([token]): token for token in range(first, size)}
    ids = []
    while text:
        length = next((n for n in range(len(text), 0, -1) if text[:n].strip() and text[:n] in pieces), 0)
        if not length:
            return ids
        ids.append(pieces[text[:length]])
        text = text[length:]
    return ids


def test_an_unfinished_character_waits(decoders):
    decode, _, size = decoders["bytes"]
    by_byte = {text: token for token in range(size) if len(text := decode([token])) == 1}
    face = [token for token in range(size) if decode([token]) == "\ufffd"]
    stream = TextStream(decode, [by_byte["a"]])
    assert stream.add(by_byte["b"]) == "b"
    assert stream.add(face[0]) == ""
    assert stream.add(by_byte["c"]) == "\ufffdc"
    assert stream.add(face[0]) == ""
    assert stream.finish() == "\ufffd"


def test_a_word_after_a_prompt_keeps_its_space(decoders):
    """SentencePiece drops the space before whatever it decodes first: a token's text alone would lose it."""
    decode, first, size = decoders["prefix"]
    spaced = next(
        token for token in range(first, size) if decode([token, token]).count(" ") == 1 and decode([token]).isalpha()
    )
    word = decode([spaced])
    assert streamed(decode, [], [spaced, spaced]) == [word, f" {word}", ""]
    assert streamed(decode, [spaced], [spaced]) == [f" {word}", ""]


def test_only_a_few_tokens_are_decoded_at_a_time(decoders):
    decode, _, size = decoders["bytes"]
    lengths = []
    letter = next(token for token in range(size) if decode([token]) == "a")
    stream = TextStream(lambda ids: lengths.append(len(ids)) or decode(ids), [letter] * 1000)
    for _ in range(100):
        assert stream.add(letter) == "a"
    assert max(lengths) <= 2
