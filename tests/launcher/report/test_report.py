"""The report: one self-contained page from whatever a run folder holds, with words where there is nothing to draw."""

from __future__ import annotations

import math
import re
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from launcher.metrics.metrics_writer import MetricsWriter
from launcher.report import expert_report as report_experts
from launcher.report import page as report
from launcher.report import report_header
from launcher.report import report_plots as report_figures
from launcher.report.page import write_report
from longctx.errors import ConfigError, DataError

CONFIG = '[run]\nseed = 1\n\n[train]\nsteps = 20\n\n[data]\ntrain = "a <b> & c"\n'


def train(step: int, **changes: object) -> dict:
    record = {
        "kind": "train",
        "step": step,
        "loss": 8.0 - step / 10,
        "lr": 1e-3 / step,
        "grad_norm": 1.0 + 1 / step,
        "tokens": 4096 * step,
        "tokens_per_second": 10_000.0,
        "step_seconds": 0.5,
        "data_wait_seconds": 0.05,
        "max_memory_bytes": 0,
        "mfu": None,
        "expert_layers": [1, 3],
        "expert_load": [[10 + step, 10, 10, 10], [0, 20, 10, 10]],
        "expert_max_violation": [0.1, 1.0],
        "expert_mean_violation": [0.05, 0.5],
        "expert_dropped_share": [0.0, 0.0],
        "router_entropy": [1.3, 1.2],
        "router_logit_rms": [0.5 + step, 0.5],
        "time": f"2025-01-01T00:00:{step:02d}+00:00",
    }
    return {**record, **changes}


def dense(step: int, **changes: object) -> dict:
    """A step of a model without experts, whose report has fewer pictures to draw."""
    return train(step, **{"expert_load": [], "expert_layers": [], **changes})


def validation(step: int, **changes: object) -> dict:
    bins = [(0, 1), (1, 2), (2, 4), (4, 8)]
    record = {
        "kind": "validation",
        "step": step,
        "loss": 7.0 - step / 10,
        "unigram_entropy": 6.5,
        "num_targets": 100,
        "loss_by_position": [{"start": a, "stop": b, "loss": 7 - a / 4, "num_targets": b - a} for a, b in bins],
        "time": f"2025-01-01T00:00:{step:02d}+00:00",
    }
    return {**record, **changes}


def make_run(folder: Path, records: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG)
    with closing(MetricsWriter(folder)) as writer:
        for record in records:
            writer.write(record)
    return folder


def page_of(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def section_of(page: str, title: str) -> str:
    return next(part for part in page.split("<section>") if f"<h2>{title}</h2>" in part)


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    resume = {"kind": "event", "event": "resume", "step": 10, "time": "2025-01-01T00:00:10+00:00"}
    steps = [train(step) for step in range(1, 21)]
    records = [validation(0), *steps[:10], validation(10), resume, *steps[10:], validation(20)]
    folder = make_run(tmp_path_factory.mktemp("runs") / "my-run", records)
    (folder / "metrics.discarded.jsonl").write_text("{}\n{}\n")
    return page_of(folder)


def test_the_page_has_every_part_and_tells_of_resumes_and_discarded_rows(full_page: str) -> None:
    titles = re.findall(r"<h2>(.*?)</h2>", full_page)
    assert titles == [
        "Loss",
        "Validations",
        "Loss by position",
        "Speed and memory",
        "Expert load",
        "Expert load by layer",
        "Routing",
    ]
    assert full_page.count("<svg") == 6
    assert "finished: 20 steps" in full_page
    assert "Resumed at step 10;" in full_page
    assert "2 rows from repeated steps" in full_page
    assert ">resumed</text>" in section_of(full_page, "Loss")


def test_key_figures(full_page: str) -> None:
    found = dict(re.findall(r'class="label">(.*?)</div><div class="value">(.*?)</div>', full_page))
    assert found == {
        "Training loss": "6.9500",
        "Validation loss": "5.0000",
        "Perplexity": "148.4",
        "Unigram entropy": "6.5000",
        "Learned from context": "1.5000",
        "Tokens": "81.9k",
        "Tokens per second": "10.0k",
        "Wall time": "20 s",
    }
    assert "of it 10 s in steps" in full_page


def test_the_page_needs_nothing_but_itself(full_page: str) -> None:
    assert not re.search(r"<(script|link|iframe|img|object)\b", full_page)
    assert all(ref.startswith(("#", "data:image/png")) for ref in re.findall(r'(?:href|src)="([^"]*)"', full_page))
    assert "@import" not in full_page


def test_pictures_are_well_formed_and_share_no_ids(full_page: str) -> None:
    for svg in re.findall(r"<svg.*?</svg>", full_page, flags=re.DOTALL):
        root = ElementTree.fromstring(svg)
        assert "viewBox" in root.attrib
        assert "width" not in root.attrib
    ids = re.findall(r'\bid="([^"]+)"', full_page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', full_page)) <= set(ids)


def test_expert_table_by_hand(full_page: str) -> None:
    rows = re.findall(r"<tr>(.*?)</tr>", section_of(full_page, "Expert load"))
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows][1:]
    # The last tenth is steps 19 and 20: expert 0 of layer 0 got 29 + 30 of 59 + 3·20 tokens.
    assert cells[0][:3] == ["1", f"{59 * 4 / 119:.2f}", f"{(11 + 12) * 4 / 83:.2f}"]
    assert cells[0][3] == f"{30 * 4 / 60:.2f} (step 20)"
    assert (cells[1][0], cells[1][4]) == ("3", "25%")


def test_dead_experts_are_named_with_their_steps(tmp_path: Path) -> None:
    loads = [[[1, 1, step % 7], [0 if 20 < step <= 80 or step > 140 else 1, 1, 1]] for step in range(1, 201)]
    moment = "2025-01-01T00:00:00+00:00"
    records = [train(step, expert_load=load, time=moment) for step, load in enumerate(loads, start=1)]
    run = report.load_run(make_run(tmp_path / "run", records))
    said = report_experts.dead_experts(run.train)
    assert said == ["model.layers.3.mlp.experts.0 (steps 21 to 80, 141 to 200)"]
    assert report.dead_caption(said) == f"Without a token for 50 steps or more: {said[0]}."
    assert report_header.run_warnings(run) == ["Without a token for 50 steps or more: 1 expert, named below."]


def test_a_run_of_an_earlier_release_is_still_shown() -> None:
    old = {"kind": "train", "step": 1, "loss": 7.0, "expert_load": [[1, 2], [3, 4]]}
    assert ">Layer 1</text>" in report_experts.plot_expert_loads([old])
    assert report_experts.plot_balance([old]) is None


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [])
    # Cut short by a kill.
    (folder / "metrics.jsonl").write_text('{"kind": "tr')
    page = page_of(folder)
    assert "no step yet" in page
    assert "<svg" not in page
    assert section_of(page, "Loss").count("No step has been logged yet.") == 1


def test_a_loss_that_is_not_finite_is_said_and_drawn(tmp_path: Path) -> None:
    records = [dense(1), dense(2), dense(3, loss=math.nan, grad_norm=math.inf), dense(4, loss=math.inf)]
    page = page_of(make_run(tmp_path / "run", [*records, validation(4, loss=math.nan)]))
    assert "The loss was not finite in 2 steps, first at step 3." in page
    assert ">not finite</text>" in section_of(page, "Loss")


def test_a_failed_report_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", [])
    before = page_of(folder)

    def fail(run: report.RunData) -> str:
        raise OSError("disk full")

    monkeypatch.setattr(report, "render_report", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(folder)
    assert (folder / "report.html").read_text() == before
    assert not list(folder.glob(".*"))


def test_what_is_no_run_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere is not a run folder: it does not exist"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no config\.toml and no metrics\.jsonl"):
        write_report(tmp_path)
    (tmp_path / "config.toml").write_text(CONFIG)
    with pytest.raises(DataError, match=r"holds no metrics\.jsonl"):
        write_report(tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [train(1)])
    (folder / "config.toml").write_text("steps =")
    with pytest.raises(ConfigError, match=r"config\.toml: not TOML"):
        write_report(folder)
    other = make_run(tmp_path / "other", [train(1, time="yesterday")])
    with pytest.raises(DataError, match="time='yesterday' is not an ISO time"):
        write_report(other)


def test_smoothing_keeps_a_line_and_skips_what_is_not_finite() -> None:
    values = np.arange(100.0)
    series = report_figures.Series(steps=np.arange(100.0), values=values.copy())
    np.testing.assert_allclose(series.smoothed().values, values)
    series.values[50] = np.nan
    smooth = series.smoothed().values
    assert np.isfinite(smooth).all()
    np.testing.assert_allclose(smooth[40:61], values[40:61], atol=0.6)


def test_the_smoothed_curve_has_no_hook_at_its_end() -> None:
    """One odd last step moves the end of the curve by its share of the steps that the curve's end is made of."""
    values = np.full(600, 5.0)
    values[-1] = 6.0
    smooth = report_figures.Series(steps=np.arange(600.0), values=values).smoothed().values
    assert np.abs(smooth - 5.0).max() < 0.2
    assert np.abs(np.diff(smooth)).max() < 0.05


def test_thinning_is_the_mean_of_equal_groups() -> None:
    series = report_figures.Series(steps=np.arange(5.0), values=np.array([1.0, 3.0, np.nan, 5.0, 7.0]))
    thin = series.thinned(limit=3)
    np.testing.assert_allclose(thin.steps, [0.5, 2.5, 4.0])
    np.testing.assert_allclose(thin.values, [2.0, 5.0, 7.0])
    assert series.thinned(limit=5) is series


def test_sample_texts_keep_their_lines_and_are_escaped(tmp_path: Path) -> None:
    samples = [{"prompt": "def", "text": f" f{step}():\n  <b>"} for step in range(20)]
    records = [validation(step, sample=sample) for step, sample in enumerate(samples)]
    part = section_of(page_of(make_run(tmp_path / "run", records)), "Sample text")
    found = re.findall(r'<td class="text">(.*?)</td>', part, flags=re.DOTALL)
    assert len(found) == report.MAX_SAMPLES
    assert (found[0], found[-1]) == (" f0():\n  &lt;b&gt;", " f19():\n  &lt;b&gt;")


def test_time_left_counts_what_lies_between_steps(tmp_path: Path) -> None:
    run = report.load_run(make_run(tmp_path / "run", [dense(step) for step in range(1, 6)]))
    # A second a step by the clock of the records, half of it in steps; 15 steps are left.
    assert report_header.seconds_left(run) == 15
    assert report_header.state(run) == "at step 5 of 20, about 15 s left when it was logged"


@pytest.mark.slow
def test_loads_of_a_large_model_are_drawn_from_the_steps_that_have_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    records = []
    for step in range(1, 61):
        loads = rng.integers(1, 50, size=(3, 192))
        if step > 5:
            loads[2, 7] = 0
        records.append(train(step, **expert_fields(loads), time="2025-01-01T00:00:00+00:00"))
    folder = make_run(tmp_path / "run", records)
    run = report.load_run(folder)
    with_loads = [record["step"] for record in run.train if "expert_load" in record]
    assert with_loads == [1, 2, 4, 6, 8, 12, 16, 18, 24, 30, 32, 36, 42, 48, 54, 60]
    # Dead experts are exact all the same: idle ones stand in every record.
    routed = report_experts.routed_records(run.train)
    assert report_experts.dead_experts(routed) == ["model.layers.2.mlp.experts.7 (steps 6 to 60)"]
    part = section_of(page_of(folder), "Expert load")
    assert "<th>max/mean, last 1 recorded step</th>" in part
    worst = max(range(60), key=lambda number: records[number]["expert_max_violation"][0])
    assert f"(step {worst + 1:,})" in part


def expert_fields(loads_LE: np.ndarray) -> dict:
    """The fields of a train record about these loads."""
    loads, num_layers = loads_LE.tolist(), len(loads_LE)
    return {
        "expert_layers": list(range(num_layers)),
        "expert_load": loads,
        "expert_max_violation": [max(counts) * len(counts) / sum(counts) - 1 for counts in loads],
        "expert_mean_violation": [0.123456789] * num_layers,
        "expert_dropped_share": [0.0] * num_layers,
        "router_entropy": [3.123456789] * num_layers,
        "router_logit_rms": [0.98765432] * num_layers,
    }
