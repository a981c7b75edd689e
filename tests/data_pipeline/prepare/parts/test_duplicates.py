"""Builds that look for duplicates: what they leave out, whatever the number of workers and wherever they are killed."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.inspect import describe, find_problems
from data_pipeline.prepare.build_shards import BuildReport, build_shards
from data_pipeline.prepare.duplicates.duplicate_rule import DuplicateRule
from data_pipeline.prepare.duplicates.outcome import DUPLICATES_FILE
from data_pipeline.prepare.duplicates.signatures import similarity
from data_pipeline.prepare.parts import build_engine, worker_messages
from data_pipeline.prepare.parts.staging import staging_folder
from data_pipeline.prepare.sources import open_source
from data_pipeline.shards.manifest import VALIDATION_FOLDER
from data_pipeline.shards.reader import ShardSet
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.prepare.duplicates.oracle import edited, sign
from tests.data_pipeline.prepare.parts.conftest import OPTIONS, Stop, content, stop_at, watch_parts
from tests.launcher.cli.calls import flip_a_byte

NEAR = DuplicateRule(kind="near")

Build = Callable[..., BuildReport]


@pytest.fixture(scope="module")
def repeated(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short files, copies of some of them, and edited ones; as files, and as lines of a table that is cut."""
    folder = tmp_path_factory.mktemp("repeated")
    draw = random.Random(0)
    texts = [path.read_text()[:3000] for path in sorted(corpus.glob("*.py"))[:24]]
    lines = []
    for number, text in enumerate(texts):
        (folder / f"m{number:02d}.txt").write_text(text)
        lines += [text, edited(text, 0.02, draw), f"{edited(text, 0.3, draw)} {number}"]
    draw.shuffle(lines)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines) + "no JSON\n")
    for number in range(6):
        (folder / f"z{number}.txt").write_text(texts[number])
    (folder / "z_empty.txt").write_text("")
    return folder


@pytest.fixture
def build(repeated: Path, tokenizer: Tokenizer, small_parts: None) -> Build:
    """Builds the repeated texts into a folder."""

    def run(output: Path, workers: int = 1, duplicates: DuplicateRule = NEAR, **options) -> BuildReport:
        source = open_source(repeated)
        return build_shards(source, tokenizer, output, workers=workers, duplicates=duplicates, **(OPTIONS | options))

    return run


def listed(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / DUPLICATES_FILE).read_text().splitlines()]


def documents(folder: Path) -> dict[str, str]:
    """The text of every document of a shard folder by name."""
    shards = ShardSet.open(folder)
    tokenizer = shards.tokenizer()
    return {shards.name(n): tokenizer.decode(shards.document(n)) for n in range(shards.num_documents)}


def test_the_bytes_do_not_depend_on_the_number_of_workers(build: Build, expected: dict[str, bytes], tmp_path: Path):
    report = build(tmp_path / "out", 2)
    assert report.parts > 3
    assert content(tmp_path / "out") == expected
    assert find_problems(tmp_path / "out") == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    again = build(tmp_path / "out")
    assert again.up_to_date
    assert again.duplicates == report.duplicates


def test_every_document_is_there_or_listed_with_one_that_is(
    repeated: Path, expected: dict[str, bytes], expected_folder: Path
):
    texts = {document.name: document.text for document in open_source(repeated)}
    training, held_out = documents(expected_folder), documents(expected_folder / VALIDATION_FOLDER)
    there = training | held_out
    removed = {entry["name"]: entry for entry in listed(expected_folder)}
    assert list(removed) == [name for name in texts if name in removed]
    assert there == {name: text for name, text in texts.items() if name not in removed}
    assert len(removed) > 40
    # The table's lines are before the files: its copies stay.
    assert {name for name in removed if name.startswith("z")} == {f"z{number}.txt" for number in range(6)}
    for entry in removed.values():
        name, of = entry["name"], entry["of"]
        assert of in there
        if entry["kind"] == "exact":
            assert texts[name] == texts[of]
        else:
            alike = similarity(sign([texts[name]], NEAR), sign([texts[of]], NEAR))[0]
            assert entry["similarity"] == round(alike, 4) >= 0.8
            assert len(texts[name].encode()) <= len(texts[of].encode())
    assert len(set(there.values())) == len(there)
    signatures = sign([*training.values(), *held_out.values()], NEAR)
    for number in range(len(signatures)):
        assert similarity(np.repeat(signatures[[number]], number, axis=0), signatures[:number]).max(initial=0) < 0.8


def groups_of_alike(texts: list[str]) -> list[int]:
    """Sizes of the groups of texts that are joined by pairs alike, of two texts or more."""
    signatures, group = sign(texts, NEAR), list(range(len(texts)))
    for a in range(len(texts)):
        alike = similarity(np.repeat(signatures[[a]], a, axis=0), signatures[:a])
        joined = {group[b] for b in np.flatnonzero(alike >= 0.8)}
        group = [group[a] if one in joined else one for one in group]
    return [size for size in Counter(group).values() if size > 1]


def test_the_report_counts_what_is_listed(repeated: Path, expected: dict[str, bytes], expected_folder: Path):
    sizes = {document.name: len(document.text.encode()) for document in open_source(repeated)}
    found = describe(expected_folder).duplicates
    for kind in ("exact", "near"):
        names = [entry["name"] for entry in listed(expected_folder) if entry["kind"] == kind]
        assert found[f"{kind}_documents"] == len(names) > 10
        assert found[f"{kind}_bytes"] == sum(sizes[name] for name in names)
    # How many texts are alike to begin with depends on the Python whose library they are from.
    sizes_of_groups = groups_of_alike([document.text for document in open_source(repeated)])
    assert found["groups"] == len(sizes_of_groups) > 20
    assert found["largest_group"] == max(sizes_of_groups)
    assert describe(expected_folder / VALIDATION_FOLDER).duplicates == {}


@pytest.mark.parametrize("kind", ["exact", "together"])
def test_the_other_kinds(build: Build, repeated: Path, tmp_path: Path, kind: str):
    report = build(tmp_path / "one", 1, DuplicateRule(kind=kind))
    assert report.duplicates is not None
    texts = {document.name: document.text for document in open_source(repeated)}
    sides = [documents(tmp_path / "one"), documents(tmp_path / "one" / VALIDATION_FOLDER)]
    if kind == "exact":
        assert sorted((sides[0] | sides[1]).values()) == sorted(set(texts.values()))
        assert {entry["kind"] for entry in listed(tmp_path / "one")} == {"exact"}
        return
    assert sides[0] | sides[1] == texts
    assert not (tmp_path / "one" / DUPLICATES_FILE).exists()
    assert report.duplicates.counts.groups == 23
    signatures = [sign(list(side.values()), NEAR) for side in sides]
    for signature in signatures[1]:
        pairs = np.repeat(signature[None], len(signatures[0]), axis=0)
        assert similarity(pairs, signatures[0]).max() < 0.8


def test_keeping_duplicates_writes_what_no_option_writes(build: Build, repeated: Path, tokenizer, tmp_path: Path):
    build(tmp_path / "keep", 1, DuplicateRule())
    build_shards(open_source(repeated), tokenizer, tmp_path / "plain", workers=1, **OPTIONS)
    assert content(tmp_path / "keep") == content(tmp_path / "plain")
    with pytest.raises(DataError, match="from another options"):
        build(tmp_path / "keep")


class TestGoingOn:
    @pytest.mark.few(2)
    @pytest.mark.parametrize("moment", ["sign", "decide", "encode", "publish"])
    def test_finished_work_is_not_done_again(
        self,
        build: Build,
        expected: dict[str, bytes],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        moment: str,
    ):
        with monkeypatch.context() as patch:
            if moment == "sign":
                patch.setattr(worker_messages, "sign_part", stop_at(worker_messages.sign_part, call=3))
            elif moment == "decide":
                patch.setattr(build_engine, "save_outcome", stop_at(None, call=1))
            elif moment == "encode":
                patch.setattr(worker_messages, "encode_part", stop_at(worker_messages.encode_part, call=3))
            else:
                patch.setattr("data_pipeline.prepare.parts.staging.Staging.publish", stop_at(None, call=1))
            with pytest.raises(Stop):
                build(tmp_path / "out")
        signed, said = watch_parts(monkeypatch, "sign_part"), []
        report = build(tmp_path / "out", say=said.append)
        expected_signed = {"sign": list(range(2, report.parts))}
        assert signed == expected_signed.get(moment, [])
        assert any("resuming" in line for line in said)
        assert report.parts_found == {"encode": 2, "publish": report.parts}.get(moment, 0)
        assert content(tmp_path / "out") == expected
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    @pytest.mark.parametrize("harm", ["signature", "decision", "list"])
    def test_damage_is_found_and_done_again(
        self,
        build: Build,
        expected: dict[str, bytes],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        harm: str,
    ):
        step, call = ("sign_part", 3) if harm == "signature" else ("encode_part", 2)
        with monkeypatch.context() as patch:
            patch.setattr(worker_messages, step, stop_at(getattr(worker_messages, step), call=call))
            with pytest.raises(Stop):
                build(tmp_path / "out")
        folder = staging_folder(tmp_path / "out")
        damaged = {"signature": "signatures/00001/bands.bin", "decision": "decisions/00001.bin"}
        flip_a_byte(folder / damaged.get(harm, f"decisions/{DUPLICATES_FILE}"))
        signed = watch_parts(monkeypatch, "sign_part")
        report = build(tmp_path / "out")
        first = {"signature": [1]}.get(harm, [0, 1])
        assert signed == first + list(range(2, report.parts))
        assert content(tmp_path / "out") == expected

    # Another text in a duplicate, and a file that is no longer a document; both as long as they were.
    @pytest.mark.parametrize(("changed", "letter"), [("z2.txt", b"b"), ("m03.txt", b"\xff")])
    def test_a_source_that_changes_between_the_passes_is_refused(
        self,
        repeated: Path,
        tokenizer: Tokenizer,
        small_parts: None,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        changed: str,
        letter: bytes,
    ):
        corpus = Path(shutil.copytree(repeated, tmp_path / "corpus"))
        save = build_engine.save_outcome

        def change(*arguments):
            path = corpus / changed
            path.write_bytes(path.read_bytes().translate(bytes.maketrans(b"a", letter)))
            return save(*arguments)

        monkeypatch.setattr(build_engine, "save_outcome", change)
        with pytest.raises(DataError, match=r"changed during the build.*\n.*build again with --overwrite"):
            build_shards(open_source(corpus), tokenizer, tmp_path / "out", workers=1, duplicates=NEAR, **OPTIONS)
        assert not (tmp_path / "out").exists()


def test_verify_knows_the_list(expected: dict[str, bytes], expected_folder: Path, tmp_path: Path):
    folder = Path(shutil.copytree(expected_folder, tmp_path / "copy"))
    flip_a_byte(folder / DUPLICATES_FILE)
    assert find_problems(folder) == [f"{folder / DUPLICATES_FILE} was changed after it was written."]
    (folder / DUPLICATES_FILE).unlink()
    assert find_problems(folder) == [f"{folder / DUPLICATES_FILE} is missing."]
