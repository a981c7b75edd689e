"""Builds in many parts: the same bytes for any number of workers, and what is found in a staging folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from data_pipeline.inspect import find_problems
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.duplicates.decide import SPLIT_SEED_TAG
from data_pipeline.prepare.encode_texts import encode_documents
from data_pipeline.prepare.left_out import LEFT_OUT_FILE, LeftOutFile, read_left_out
from data_pipeline.prepare.parts import staging, worker_messages
from data_pipeline.prepare.parts.part_record import RECORD_FILE, PartRecord
from data_pipeline.prepare.parts.staging import Staging, open_staging, staging_folder
from data_pipeline.prepare.sources import open_source
from data_pipeline.shards.manifest import VALIDATION_FOLDER
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.shard_writer import ShardWriter
from data_pipeline.shuffle import falls_below
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer, load_tokenizer
from tests.data_pipeline.prepare.parts.conftest import OPTIONS, Build, Stop, content, stop_at, watch_parts
from tests.launcher.cli.calls import flip_a_byte


def interrupt_after(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Ctrl-C before the part of this number."""
    encode = worker_messages.encode_part

    def interrupted(part, *arguments, **options):
        if part.number == parts:
            raise KeyboardInterrupt
        return encode(part, *arguments, **options)

    monkeypatch.setattr(worker_messages, "encode_part", interrupted)


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_bytes_do_not_depend_on_the_number_of_workers(
    build: Build, expected: dict[str, bytes], tmp_path: Path, workers: int
):
    report = build(tmp_path / "out", workers)
    assert report.parts > 10
    assert content(tmp_path / "out") == expected
    assert find_problems(tmp_path / "out") == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_every_document_is_there_once_and_everything_else_is_listed(
    build: Build, mixed: Path, expected: dict[str, bytes], expected_folder: Path
):
    source = open_source(mixed)
    documents = {document.name: document.text for document in source}
    assert any(name.startswith("m_lines.jsonl:") for name in documents)
    found: dict[str, str] = {}
    for folder in (expected_folder, expected_folder / VALIDATION_FOLDER):
        shards = ShardSet.open(folder)
        assert shards.manifest.skipped == source.skipped
        for number in range(shards.num_documents):
            assert shards.name(number) not in found
            found[shards.name(number)] = shards.tokenizer().decode(shards.document(number))
    assert found == documents
    left_out = read_left_out(expected_folder)
    assert dict(left_out.counts) == source.skipped
    assert left_out.examples == source.left_out.examples
    reasons = {"empty", "binary", "not UTF-8", "damaged", "null", "not JSON", "lone surrogate", "no field 'text'"}
    assert set(source.skipped) == reasons


def test_one_part_gives_what_one_writer_gives(mixed: Path, tokenizer: Tokenizer, tmp_path: Path):
    """What every release has written: shard folders of small corpora stay up to date."""
    source = open_source(mixed)
    plain = tmp_path / "plain"
    (plain / VALIDATION_FOLDER).mkdir(parents=True)
    folders = {"training": plain, "validation": plain / VALIDATION_FOLDER}
    writers = {
        split: ShardWriter(folder, vocab_size=tokenizer.vocab_size, shard_tokens=OPTIONS["shard_tokens"])
        for split, folder in folders.items()
    }
    left_out = LeftOutFile(plain)
    for encoded, _ in encode_documents(source.read(left_out.add), tokenizer):
        is_held_out = falls_below(encoded.hash, OPTIONS["validation_fraction"], SPLIT_SEED_TAG)
        writers["validation" if is_held_out else "training"].add(encoded)
    listed = {"training": left_out.close(), "validation": ""}
    for split, writer in writers.items():
        tokenizer.save(folders[split])
        described = {"sources": [source.fingerprint()], "options": OPTIONS, "skipped": source.skipped}
        writer.finish(split=split, tokenizer=tokenizer, left_out=listed[split], **described)
    report = build_shards(open_source(mixed), tokenizer, tmp_path / "out", **OPTIONS)
    assert report.parts == 1
    assert content(tmp_path / "out") == content(plain)
    assert build_shards(open_source(mixed), tokenizer, plain, **OPTIONS).up_to_date


def test_progress_counts_everything_once(build: Build, tmp_path: Path):
    for workers in (1, 2):
        calls: list[tuple[int, int]] = []
        report = build(tmp_path / str(workers), workers, progress=lambda *counts, calls=calls: calls.append(counts))
        assert calls == sorted(calls)
        assert report.validation is not None
        assert calls[-1][0] == report.training.documents + report.validation.documents
        assert calls[-1][1] == report.training.text_bytes + report.validation.text_bytes


class TestGoingOn:
    def test_finished_parts_are_kept_and_not_read_again(
        self,
        build: Build,
        expected: dict[str, bytes],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ):
        with monkeypatch.context() as patch:
            interrupt_after(patch, 4)
            with pytest.raises(KeyboardInterrupt):
                build(tmp_path / "out")
        assert not (tmp_path / "out").exists()
        encoded = watch_parts(monkeypatch, "encode_part")
        said: list[str] = []
        report = build(tmp_path / "out", say=said.append)
        assert said == [f"resuming: 4 of {report.parts} parts are finished"]
        assert encoded == list(range(4, report.parts))
        assert report.parts_found == 4
        assert content(tmp_path / "out") == expected
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    @pytest.mark.few(1)
    @pytest.mark.parametrize("harm", ["flip", "remove", "record", "list"])
    def test_a_damaged_part_is_encoded_again(
        self,
        build: Build,
        expected: dict[str, bytes],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        harm: str,
    ):
        with monkeypatch.context() as patch:
            interrupt_after(patch, 8)
            with pytest.raises(KeyboardInterrupt):
                build(tmp_path / "out")
        parts = staging_folder(tmp_path / "out") / "parts"
        if harm == "flip":
            flip_a_byte(next(parts.glob("00002/*/00000.arrow")))
        elif harm == "remove":
            next(parts.glob("00002/*/00000.arrow")).unlink()
        elif harm == "list":
            next(parts.glob(f"*/{LEFT_OUT_FILE}")).write_bytes(b"")
        else:
            path = parts / "00002" / RECORD_FILE
            path.write_bytes(path.read_bytes()[:-20])
        report = build(tmp_path / "out")
        assert report.parts_found == 7
        assert content(tmp_path / "out") == expected

    @pytest.mark.few(2)
    @pytest.mark.parametrize("moment", ["record", "move", "manifest", "rename", "remove"])
    def test_a_build_that_ends_while_it_is_put_together_goes_on(
        self,
        build: Build,
        expected: dict[str, bytes],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        moment: str,
    ):
        with monkeypatch.context() as patch:
            if moment == "record":
                patch.setattr(PartRecord, "save", stop_at(PartRecord.save, call=5))
            elif moment == "move":
                patch.setattr(Path, "rename", stop_at(Path.rename, call=7))
            elif moment == "manifest":
                patch.setattr("data_pipeline.prepare.parts.staging.Manifest.save", stop_at(None, call=1))
            elif moment == "rename":
                patch.setattr(Staging, "publish", stop_at(None, call=1))
            else:
                patch.setattr(staging.shutil, "rmtree", stop_at_last_removal)
            with pytest.raises(Stop):
                build(tmp_path / "out")
        report = build(tmp_path / "out")
        assert report.up_to_date == (moment == "remove")
        if moment in ("move", "manifest", "rename"):
            assert report.parts_found == report.parts
        assert content(tmp_path / "out") == expected
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def test_a_replaced_folder_survives_a_kill_between_the_renames(
        self, build: Build, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        build(tmp_path / "out", validation_fraction=0.5)
        old = content(tmp_path / "out")
        rename = Path.rename

        def stop(path: Path, target: Path) -> Path:
            if path.name == "whole":
                raise Stop
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", stop)
            with pytest.raises(Stop):
                build(tmp_path / "out", overwrite=True)
        assert content(tmp_path / ".out.retired") == old
        build(tmp_path / "out")
        assert content(tmp_path / "out") == expected
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def test_another_recipe_is_refused_until_told(
        self, build: Build, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        with monkeypatch.context() as patch:
            interrupt_after(patch, 2)
            with pytest.raises(KeyboardInterrupt):
                build(tmp_path / "out", validation_fraction=0.5)
        with pytest.raises(DataError, match=r"finished parts from a build of .* with another options.\n.*--overwrite"):
            build(tmp_path / "out")
        said: list[str] = []
        assert build(tmp_path / "out", overwrite=True, say=said.append).parts_found == 0
        assert "removing another build's parts" in said[0]
        assert content(tmp_path / "out") == expected

    def test_exact_holds_for_parts_that_were_built_without_it(
        self, build: Build, mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        from tests.longctx.conversion.tiny_tokenizer import train_tokenizer

        path = train_tokenizer(tmp_path / "lossy.model", add_dummy_prefix=True, remove_extra_whitespaces=True)
        lossy = load_tokenizer(path)
        output = tmp_path / "out"
        with monkeypatch.context() as patch:
            interrupt_after(patch, 3)
            with pytest.raises(KeyboardInterrupt):
                build_shards(open_source(mixed), lossy, output, workers=1, **OPTIONS)
        for workers in (1, 2):
            with pytest.raises(DataError, match="does not round-trip exactly"):
                build_shards(open_source(mixed), lossy, output, workers=workers, exact=True, **OPTIONS)
        report = build_shards(open_source(mixed), lossy, output, workers=2, **OPTIONS)
        assert report.parts_found >= 3
        assert (report.inexact > 40, len(report.differences)) == (True, 3)


class TestPlace:
    def test_two_builds_at_once_are_refused(self, build: Build, tmp_path: Path):
        output = tmp_path / "out"
        with (
            open_staging(output, {}, count=0, overwrite=False, say=print),
            pytest.raises(DataError, match=r"is being built by process \d+ on"),
        ):
            build(output)
        build(output)

    def test_a_folder_of_others_is_not_touched(self, build: Build, tmp_path: Path):
        folder = staging_folder(tmp_path / "out")
        folder.mkdir()
        (folder / "thesis.txt").write_text("precious")
        for overwrite in (False, True):
            with pytest.raises(DataError, match=r"contains thesis.txt. Remove it"):
                build(tmp_path / "out", overwrite=overwrite)
        assert (folder / "thesis.txt").read_text() == "precious"

    def test_an_error_before_the_first_part_leaves_nothing(
        self, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        interrupt_after(monkeypatch, 0)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "out")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("workers", [0, -1])
    def test_too_few_workers(self, build: Build, tmp_path: Path, workers: int):
        with pytest.raises(DataError, match=f"workers={workers} must be at least 1"):
            build(tmp_path / "out", workers)


class TestFailingWorkers:
    def test_a_fault_is_the_users_error(self, mixed: Path, tokenizer: Tokenizer, small_parts: None, tmp_path: Path):
        with pytest.raises(DataError, match=r"m_lines.jsonl:\d+: no field 'text'"):
            build_shards(
                open_source(mixed, exclude=["z_damaged*"], strict=True),
                tokenizer,
                tmp_path / "out",
                workers=2,
                **OPTIONS,
            )

    def test_a_file_that_changes_is_named(
        self, mixed: Path, tokenizer: Tokenizer, small_parts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        folder = Path(shutil.copytree(mixed, tmp_path / "in"))
        source = open_source(folder)
        source.fingerprint()
        (folder / "m_lines.jsonl").write_bytes(b"{}")
        with pytest.raises(DataError, match=r"m_lines.jsonl has changed since it was listed"):
            build_shards(source, tokenizer, tmp_path / "out", workers=2, **OPTIONS)

    def test_a_fault_of_ours_keeps_its_traceback(
        self, build: Build, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(tokenizer, "fingerprint", "0" * 32)
        with pytest.raises(RuntimeError, match=r"part [01] \(.*\) failed in its worker:\n(?s:.*)AssertionError"):
            build(tmp_path / "out", 2)


remove = shutil.rmtree


def stop_at_last_removal(folder: Path, **options) -> None:
    """Stands for ``shutil.rmtree``, and stops where the output has appeared."""
    if (folder.parent / "out").exists():
        raise Stop
    remove(folder, **options)
