"""Mixtures: shares of tokens, rows of other lengths and other weights in mid-run, and every token as often as asked."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.loader import Loader, build_loader, build_validation_loader, held_out_mixture, open_order
from data_pipeline.mixture.file import Mixture
from data_pipeline.mixture.mixed_order import MixedOrder
from data_pipeline.mixture.streams import source_seed
from data_pipeline.prepare.sources import open_source
from data_pipeline.prepare.train_tokenizer import train_tokenizer
from data_pipeline.rows import epoch_blocks
from data_pipeline.rows.epoch_blocks import BlockPlanner
from data_pipeline.rows.row_stream import RowStream, StreamPosition
from data_pipeline.shards.reader import ShardSet
from longctx.batch import IGNORED_TARGET
from longctx.errors import ConfigError, DataError
from longctx.tokenizer import Tokenizer
from longctx.untrusted.git_lfs import POINTER_LINE
from tests.data_pipeline.lengths import global_rows, write_lengths

SEQ_LEN = 128
LENGTHS = {
    "short": [1 + number * 53 % 40 for number in range(400)],
    "mixed": [1 + (number * number * 53) % 190 for number in range(150)],
    "long": [100 + number * 37 % 500 for number in range(40)],
}


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shard folders side by side."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, lengths in LENGTHS.items():
        write_lengths(folder / name, tokenizer, lengths, shard_tokens=3000)
    return folder


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of some 40 documents: every source but one has several."""
    monkeypatch.setattr(epoch_blocks, "MIN_DOCUMENTS", 40)
    monkeypatch.setattr(epoch_blocks, "MIN_ROWS", 4)


def source(name: str, **options) -> str:
    lines = [f"{key} = {value}" for key, value in options.items()]
    return "\n".join(["[[sources]]", f'name = "{name}"', f'path = "{name}"', *lines, ""])


def write(folder: Path, text: str, name: str = "mixture.toml") -> Path:
    (folder / name).write_text(text)
    return folder / name


THREE = source("short", weight=1) + source("mixed", weight=2) + source("long", weight=5)


def order_of(path: Path, seed: int = 0) -> MixedOrder:
    order = open_order(path, SEQ_LEN, seed=seed)[1]
    assert isinstance(order, MixedOrder)
    return order


def all_rows(order: MixedOrder) -> tuple[list, str]:
    """Every row until the mixture is used up, and what is said then."""
    rows, at = [], order.start()
    try:
        while True:
            more, at = order.rows(at, 1)
            rows += more
    except DataError as error:
        return rows, str(error)


def pieces_of(rows: list) -> Counter:
    """How often each token stands in the rows, as (document, token)."""
    return Counter((document, token) for row in rows for document, start, stop in row for token in range(start, stop))


def whole(folder: Path, name: str, first: int = 0, times: int = 1) -> Counter:
    return Counter({(first + d, t): times for d, n in enumerate(LENGTHS[name]) for t in range(n)})


class TestOneSource:
    def test_is_its_folder_in_the_order_of_its_seed(self, folder: Path):
        order = order_of(write(folder, source("mixed"), "one.toml"), seed=3)
        rows, _ = order.rows(order.start(), 400)
        plain = open_order(folder / "mixed", SEQ_LEN, seed=source_seed(3, "mixed"))[1]
        assert rows == plain.rows(plain.start(), 400)[0]


class TestShares:
    @settings(max_examples=25)
    @given(weights=st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), seed=st.integers(0, 99))
    def test_no_source_is_ever_a_row_behind_or_two_ahead(self, folder: Path, weights: list[int], seed: int):
        text = "".join(source(name, weight=weight) for name, weight in zip(LENGTHS, weights, strict=True))
        order = order_of(write(folder, text, "weights.toml"), seed)
        at = order.start()
        for _ in range(150):
            _, at = order.rows(at, 1)
            for position, weight in zip(at.sources, weights, strict=True):
                behind = weight / sum(weights) * at.tokens_consumed - position.tokens_since_reset
                assert -2 * SEQ_LEN < behind < 2 * SEQ_LEN
                assert weight or not position.tokens

    def test_without_weights_they_are_the_tokens_and_temperature_evens_them(self, folder: Path):
        text = "".join(source(name) for name in LENGTHS)
        tokens = [sum(lengths) for lengths in LENGTHS.values()]
        plain = Mixture.load(write(folder, text, "plain.toml")).shares(-1, tokens)
        assert plain == pytest.approx([count / sum(tokens) for count in tokens])
        even = Mixture.load(write(folder, "temperature = 1e9\n" + text, "even.toml")).shares(-1, tokens)
        assert even == pytest.approx([1 / 3] * 3)
        root = Mixture.load(write(folder, "temperature = 2\n" + text, "root.toml")).shares(-1, tokens)
        roots = np.sqrt(tokens)
        assert root == pytest.approx(list(roots / roots.sum()))


class TestEpochs:
    def test_every_token_as_often_as_its_source_has_epochs(self, folder: Path):
        text = source("short", epochs=2) + source("mixed", epochs=1, weight=0.5) + source("long", epochs=3)
        order = order_of(write(folder, text, "epochs.toml"))
        rows, error = all_rows(order)
        assert re.search(r"exhausted after .* \(short 2, mixed 1, long 3\)\.\n.*reduce train.steps", error)
        wanted = whole(folder, "short", 0, 2) + whole(folder, "mixed", 400) + whole(folder, "long", 550, 3)
        assert pieces_of(rows) == wanted


class TestUpsampling:
    def test_long_documents_stand_in_an_epoch_as_often_as_asked(self, folder: Path):
        rules = "[{ min_tokens = 100, factor = 3 }, { min_tokens = 150, factor = 0 }]"
        order = order_of(write(folder, source("mixed", epochs=1, upsample=rules), "often.toml"))
        found = pieces_of(all_rows(order)[0])
        factor = {d: 1 + 2 * (n >= 100) if n < 150 else 0 for d, n in enumerate(LENGTHS["mixed"])}
        assert found == Counter(
            {(d, t): factor[d] for d, n in enumerate(LENGTHS["mixed"]) for t in range(n) if factor[d]}
        )

    def test_a_fraction_is_a_draw_for_each_document_and_epoch(self, folder: Path):
        path = write(folder, source("short", upsample="[{ min_tokens = 0, factor = 1.5 }]"), "half.toml")
        order = order_of(path)
        at, found = order.start(), [Counter() for _ in range(3)]
        while at.epoch < 3:
            epoch = at.epoch
            (row,), at = order.rows(at, 1)
            found[epoch].update(document for document, start, _ in row if not start)
        for epoch in found:
            assert set(epoch) == set(range(400))
            assert set(epoch.values()) == {1, 2}
            assert 540 < epoch.total() < 660
        assert found[0] != found[1] != found[2]

    def test_a_source_of_which_nothing_is_left_is_refused(self, folder: Path):
        path = write(folder, source("mixed", upsample="[{ min_tokens = 0, factor = 0 }]"), "none.toml")
        with pytest.raises(DataError, match="has no documents: upsample drops them all"):
            order_of(path).rows(order_of(path).start(), 1)

    @pytest.mark.parametrize("seed", range(12))
    def test_an_epoch_that_ends_in_empty_blocks_is_not_followed_by_a_row_of_the_next(self, folder: Path, seed: int):
        rules = "[{ min_tokens = 0, factor = 0.01 }]"
        order = order_of(
            write(folder, source("mixed", epochs=1, upsample=rules) + source("long", epochs=1), "rare.toml"), seed
        )
        at = order.start()
        rows, error = all_rows(order)
        assert "exhausted" in error
        assert order.first_rows(None) == rows
        # Of the long source every token once; of the rare one at most once.
        assert max(pieces_of(rows).values()) == 1
        for _ in rows:
            order.read(json.loads(json.dumps(order.state(at))))
            _, at = order.rows(at, 1)
        order.read(order.state(at))


class TestStages:
    STAGES = """
        [[stages]]
        from_tokens = 2000
        row_tokens = 32
        [[stages]]
        from_tokens = 5000
        row_tokens = 64
        weights = { long = 0 }
        [[stages]]
        from_tokens = 9000
    """

    def test_row_length_and_weights_change_where_they_say(self, folder: Path):
        order = order_of(write(folder, THREE + self.STAGES, "stages.toml"))
        at = order.start()
        for number in range(120):
            before = at
            (row,), at = order.rows(at, 1)
            begins = number * SEQ_LEN
            longest = 128 if begins < 2000 or begins >= 9000 else 32 if begins < 5000 else 64
            assert max(stop - start for _, start, stop in row) <= longest
            assert sum(stop - start for _, start, stop in row) <= SEQ_LEN
            if 5000 <= begins < 9000:
                assert at.sources[2].tokens == before.sources[2].tokens

    def test_an_epoch_with_all_lengths_has_every_token_once(self, folder: Path):
        text = source("mixed", epochs=1) + self.STAGES.replace("weights = { long = 0 }", "")
        order = order_of(write(folder, text, "lengths.toml"))
        rows, _ = all_rows(order)
        assert pieces_of(rows) == whole(folder, "mixed")

    @pytest.mark.slow
    @settings(max_examples=25)
    @given(lengths=st.lists(st.tuples(st.sampled_from([7, 31, 64, 128, 500]), st.integers(1, 9)), max_size=12))
    def test_however_often_the_length_changes(self, folder: Path, lengths: list[tuple[int, int]]):
        stream = RowStream(BlockPlanner(ShardSet.open(folder / "mixed"), SEQ_LEN, seed=1))
        rows, at = [], StreamPosition()
        for row_tokens, count in lengths:
            for _ in range(count):
                if at.epoch == 0:
                    taken, _, at = stream.take(at, 1, row_tokens)
                    rows += taken
                    assert stream.has_row(at)
        while at.epoch == 0:
            taken, _, at = stream.take(at, 1, 100)
            rows += taken
        assert pieces_of(rows) == whole(folder, "mixed")


def loaders(path: Path, degree: int = 1, micro: int = 1) -> list[Loader]:
    options = {"seq_len": SEQ_LEN, "rows_per_step": 24, "micro_batch_rows": micro, "data_degree": degree, "seed": 5}
    return [build_loader(path, data_rank=rank, **options) for rank in range(degree)]


class TestStream:
    @settings(max_examples=20)
    @given(steps=st.integers(0, 6), degree=st.sampled_from([1, 2, 3, 4, 6]))
    def test_goes_on_at_any_step_with_any_degree(self, folder: Path, steps: int, degree: int):
        path = write(folder, THREE + TestStages.STAGES, "resumed.toml")
        ranks = loaders(path, 2)
        global_rows(ranks, steps)
        states = [json.dumps(rank.state_dict()) for rank in ranks]
        assert states[0] == states[1]
        assert len(states[0]) < 1024
        resumed = loaders(path, degree)
        for rank in resumed:
            rank.load_state_dict(json.loads(states[0]))
        assert (resumed[0].tokens_consumed, resumed[0].rows_consumed) == (ranks[0].tokens_consumed, 24 * steps)
        assert torch.equal(global_rows(resumed, 2), global_rows(ranks, 2))

    def test_a_batch_reads_what_its_rows_say(self, folder: Path):
        path = write(folder, THREE, "batch.toml")
        order = order_of(path, seed=5)
        rows, _ = order.rows(order.start(), 24)
        shards = [ShardSet.open(folder / name) for name in LENGTHS]
        first = np.cumsum([0, *(len(lengths) for lengths in LENGTHS.values())])
        (loader,) = loaders(path)
        for row in rows:
            batch, at = next(loader), 0
            for document, start, stop in row:
                number = int(np.searchsorted(first, document, side="right")) - 1
                ids = shards[number].document(document - first[number])
                assert batch.tokens[0, at : at + stop - start].tolist() == ids[start:stop].tolist()
                assert (
                    batch.targets[0, at : at + stop - start].tolist()
                    == [*ids[start + 1 : stop + 1].tolist(), IGNORED_TARGET][: stop - start]
                )
                at += stop - start


class TestChangedFile:
    def test_other_weights_lose_and_repeat_nothing(self, folder: Path):
        text = source("mixed", epochs=1, weight=1) + source("long", weight=9)
        path = write(folder, text, "changed.toml")
        order = order_of(path)
        rows, at = order.rows(order.start(), 40)
        state = json.loads(json.dumps(order.state(at)))
        path.write_text(text.replace("weight = 9", "weight = 1"))
        again = order_of(path)
        position = again.read(state)
        before = position.sources
        more, after = again.rows(position, 30)
        taken = [new.tokens - old.tokens for new, old in zip(after.sources, before, strict=True)]
        # Counted from here on: neither pays for what the other weights gave.
        assert abs(taken[0] - taken[1]) < 2 * SEQ_LEN
        rows += more
        while after.sources[0].stream.epoch == 0:
            more, after = again.rows(after, 1)
            rows += more
        of_mixed = Counter({key: count for key, count in pieces_of(rows).items() if key[0] < 150})
        assert of_mixed == whole(folder, "mixed")

    def test_a_source_may_come_and_go(self, folder: Path):
        path = write(folder, THREE, "comes.toml")
        order = order_of(path)
        _, at = order.rows(order.start(), 30)
        state = order.state(at)
        path.write_text(source("mixed", weight=1) + source("short", weight=1))
        without = order_of(path)
        _, at = without.rows(without.read(state), 10)
        rested = without.state(at)
        assert rested["sources"]["long"] == state["sources"]["long"]
        path.write_text(THREE)
        again = order_of(path).read(json.loads(json.dumps(rested)))
        assert [s.tokens for s in again.sources][2] == state["sources"]["long"]["tokens"]
        assert again.rows_consumed == 40

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda state: state["sources"]["long"].update(manifest_hash="0"), "manifest_hash='0', but the mixture"),
            (lambda state: state["sources"]["long"].update(upsample=[[1, 2.0]]), "upsample="),
            (lambda state: state["sources"]["long"].update(block=99), "block 99 of epoch 0 has no row"),
            (lambda state: state["sources"]["long"].update(block_row=9999), "has no row 9999"),
            (lambda state: state["sources"]["long"].update(epoch=-1), "integers from 0 to"),
            (lambda state: state["sources"]["long"].update(before=[[1]]), "pairs of row length and row count"),
            (lambda state: state["sources"]["long"].update(before=[[128, 10**6]]), "has no row"),
            (lambda state: state["sources"]["long"].pop("tokens"), "expected exactly the fields"),
            (lambda state: state["sources"].update(long=3), "expected exactly the fields"),
            (lambda state: state.update(seq_len=64), "seq_len=64, but this run has 128"),
            (lambda state: state.update(sources=[]), "does not belong to a mixture"),
            (lambda state: state.update(rows_consumed=1.5), "integers from 0 to"),
        ],
    )
    def test_a_state_of_other_data_or_a_damaged_one_is_refused(self, folder: Path, change, message: str):
        order = order_of(write(folder, THREE, "damaged.toml"))
        state = json.loads(json.dumps(order.state(order.rows(order.start(), 10)[1])))
        change(state)
        with pytest.raises(DataError, match=message):
            order.read(state)

    def test_a_folders_state_and_a_mixtures_are_not_each_others(self, folder: Path):
        (mixed,) = loaders(write(folder, source("mixed"), "kinds.toml"))
        (plain,) = loaders(folder / "mixed")
        with pytest.raises(DataError, match="does not belong to a mixture"):
            mixed.load_state_dict(plain.state_dict())
        with pytest.raises(DataError, match="not a loader state"):
            plain.load_state_dict(mixed.state_dict())


class TestForecast:
    @pytest.mark.parametrize("rows", [1, 17, 60, 150])
    def test_is_what_the_rows_then_take(self, folder: Path, rows: int):
        order = order_of(write(folder, THREE + TestStages.STAGES, "forecast.toml"))
        found, (_, at) = order.estimate_usage(order.start(), rows), order.rows(order.start(), rows)
        for expected, source in zip(found.sources, at.sources, strict=True):
            # Rows are not quite full, and the last one of each stage is of one source.
            assert expected.tokens == pytest.approx(source.tokens, abs=0.06 * rows * SEQ_LEN + 4 * SEQ_LEN)
        assert found.missing_tokens == 0

    def test_from_the_middle_it_counts_what_came_before(self, folder: Path):
        order = order_of(write(folder, THREE, "middle.toml"))
        _, at = order.rows(order.start(), 40)
        assert sum(source.tokens for source in order.estimate_usage(at, 0).sources) == at.tokens_consumed
        assert (
            sum(source.tokens for source in order.estimate_usage(at, 10).sources) == at.tokens_consumed + 10 * SEQ_LEN
        )

    def test_says_what_is_missing(self, folder: Path):
        order = order_of(write(folder, source("short", epochs=1) + source("mixed", epochs=2, weight=0.1), "few.toml"))
        tokens = sum(LENGTHS["short"]) + 2 * sum(LENGTHS["mixed"])
        found = order.estimate_usage(order.start(), 1000)
        assert [source.epochs for source in found.sources] == [1, 2]
        assert found.missing_tokens == pytest.approx(1000 * SEQ_LEN - tokens)


class TestValidation:
    def test_takes_what_the_sources_hold_out_once(self, built: Path, tmp_path: Path):
        path = write(tmp_path, f'[[sources]]\nname = "a"\npath = "{built}"\nweight = 3\n')
        options = {"seq_len": SEQ_LEN, "held_out": True}
        batches = list(build_validation_loader(path, **options))
        plain = list(build_validation_loader(built / "validation", seq_len=SEQ_LEN))
        assert len(batches) == len(plain)
        for ours, theirs in zip(batches, plain, strict=True):
            assert torch.equal(ours.tokens, theirs.tokens)
        few = build_validation_loader(path, max_rows=3, data_degree=2, micro_batch_rows=2, **options)
        assert (few.num_rows, len(few)) == (3, 1)

    def test_of_several_sources_each_row_is_of_the_one_that_is_behind(self, folder: Path):
        path = write(folder, THREE + TestStages.STAGES, "validated.toml")
        loader = build_validation_loader(path, seq_len=SEQ_LEN, max_rows=30)
        assert len(loader) == 30
        assert loader.bytes_per_token == pytest.approx(1)
        again = build_validation_loader(path, seq_len=SEQ_LEN, max_rows=30)
        assert all(torch.equal(one.tokens, other.tokens) for one, other in zip(loader, again, strict=True))
        # Without an end, until each source was read once.
        tokens = sum(int((batch.document_ids >= 0).sum()) for batch in build_validation_loader(path, seq_len=SEQ_LEN))
        assert tokens == sum(sum(lengths) for lengths in LENGTHS.values())

    def test_without_held_out_documents_there_is_nothing(self, folder: Path):
        assert not held_out_mixture(write(folder, THREE, "nothing.toml")).sources


class TestFile:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "sources"),
            ('[[source]]\nname = "a"\n', "source is not a valid key. Did you mean sources"),
            (source("mixed", upsample="[{ min_token = 1, factor = 2 }]"), "upsample.0.min_token .*min_tokens"),
            ("sources = 3", "sources=3"),
            ("sources = []", r"\[\[sources\]\] is missing"),
            (source("mixed", weight='"1"'), "weight='1'"),
            (source("mixed", weight=-1), "weight=-1: Input should be greater than or equal to 0"),
            (source("mixed", weight=0), "all weights are 0"),
            (source("mixed", epochs=0), "epochs=0: Input should be greater than or equal to 1"),
            (source("mixed") + source("mixed"), "is empty or already used"),
            (source("mixed", upsample="[{ min_tokens = 1, factor = -2 }]"), "min_tokens of at least 0"),
            ("temperature = 0\n" + source("mixed"), "temperature=0: Input should be greater than 0"),
            (source("mixed") + "[[stages]]\nfrom_tokens = 5\n[[stages]]\nfrom_tokens = 5\n", "must be at least 6"),
            (source("mixed") + "[[stages]]\nweights = { mixd = 1 }\n", "Did you mean mixed"),
            (source("mixed") + "[[stages]]\nrow_tokens = 100\n", "row_tokens=100 .*Try 128"),
            ("[[sources", "is not TOML"),
            (f"{POINTER_LINE.decode()}\noid sha256:4d7a\nsize 9\n", "is a Git LFS pointer"),
        ],
    )
    def test_what_means_nothing_is_refused(self, folder: Path, text: str, message: str):
        with pytest.raises(ConfigError, match=f"(?s)refused.toml.*{message}"):
            open_order(write(folder, text, "refused.toml"), SEQ_LEN)

    def test_what_is_missing_is_named(self, folder: Path):
        with pytest.raises(ConfigError, match="cannot be read"):
            open_order(folder / "nowhere.toml", SEQ_LEN)
        with pytest.raises(DataError, match="nowhere"):
            open_order(write(folder, source("nowhere"), "no_folder.toml"), SEQ_LEN)

    def test_folders_of_other_tokenizers_are_refused(self, folder: Path, tokenizer: Tokenizer, source_of_other: Path):
        text = source("mixed") + f'[[sources]]\nname = "other"\npath = "{source_of_other}"\n'
        with pytest.raises(DataError, match="different tokenizers"):
            open_order(write(folder, text, "tokenizers.toml"), SEQ_LEN)


@pytest.fixture(scope="module")
def source_of_other(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard folder of another tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    other = train_tokenizer(open_source(corpus), folder / "other.model", vocab_size=400)
    write_lengths(folder / "shards", other, [5, 6, 7])
    return folder / "shards"
