"""What a run has to do with beyond its machine: a store that takes nothing, lines that a shell elsewhere would run."""

from __future__ import annotations

import time

import pytest

from launcher.checkpoint.checkpoint_store import store_at
from longctx.checkpoint_format import list_checkpoints
from tests.data_pipeline.stores.s3_server import S3Server
from tests.launcher.cli.calls import call
from tests.launcher.faults.scene import Scene

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ADDRESS = "s3://corpora/runs/first"


def test_a_store_that_takes_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    """The run is done, and says by its exit code that its store is not; the next start sends what is missing."""
    server = S3Server()
    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "the-key-of-the-test",
        "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    stored = {"checkpoint.store": ADDRESS}
    # All but what the start tries by itself.
    server.store.fault = lambda method, path: "InternalError" if method in ("PUT", "POST") and "step_" in path else ""
    began = time.monotonic()
    outcome = scene.strike(changed=stored)
    seconds = time.monotonic() - began
    assert outcome.codes == [74, 74], outcome.text
    assert not store_at(ADDRESS).checkpoints()
    server.store.fault = lambda method, path: ""
    again = scene.strike(changed={**stored, "run.resume": "latest"})
    assert again.codes == [0, 0], again.text
    newest = list_checkpoints(scene.run)[-1]
    assert max(store_at(ADDRESS).checkpoints()) == int(newest.name.removeprefix("step_"))
    server.stop()
    scene.record(
        "files",
        "a store that takes nothing",
        injected="S3 answers every write with InternalError, to the end of the run; then another start",
        seen=scene.seen(outcome.text, "is not in s3://"),
        seconds=seconds,
        recovered=scene.went_on(),
    )


@pytest.mark.parametrize("where", ["hostfile", "environment", "option"])
def test_a_line_that_a_shell_would_run(scene: Scene, capsys, monkeypatch: pytest.MonkeyPatch, where: str):
    """``longctx run`` starts nothing, and tries nothing again; nothing was executed."""
    mark, folder = scene.folder / "RAN", scene.folder / "cluster"
    folder.mkdir()
    monkeypatch.setenv("RAN", str(mark))
    bad = {"hostfile": "-oProxyCommand=touch${IFS}$RAN", "environment": "X=$(touch $RAN)", "option": "$(touch $RAN)"}
    hosts = ["node-01", "node-02"]
    if where == "hostfile":
        hosts[1] = bad[where]
    (folder / "hostfile").write_text("".join(f"{host} slots=1\n" for host in hosts))
    (folder / "environment").write_text(bad[where] if where == "environment" else "")
    monkeypatch.setenv("DS_ENV_FILE", str(folder / "environment"))
    words = ["deepspeed", "--hostfile", folder / "hostfile", "launcher/pretrain.py", *scene.settings()]
    if where == "option":
        words += ["--run.tracker_project", bad[where]]
    began = time.monotonic()
    code, _, said = call(capsys, "run", "--", *words)
    seconds = time.monotonic() - began
    assert code == (1 if where == "hostfile" else 2)
    assert not mark.exists()
    scene.record(
        "cluster",
        f"a shell's words in the {where}",
        injected=f"{bad[where]}, over two hosts, by longctx run",
        seen=scene.seen(said, {"environment": "the value of X"}.get(where, bad[where])),
        seconds=seconds,
    )
