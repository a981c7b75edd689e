"""The template for Kubernetes: its parts name one another, and its pods train, stop, and go on.

A pod here is a process with its own network, host name, mounts and process numbers, as in a container: torchrun is its
process 1, and its environment holds what the template, Kubernetes and the image set, and no more.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
import yaml

from launcher.cluster.launch_commands import SCRIPT
from launcher.config.config_sections import AUTO
from launcher.config.load_config import load_run_config
from launcher.metrics.record import read_metrics
from launcher.supervise.progress import newest_checkpoint_step
from launcher.supervise.training_command import TrainingCommand
from tests.helpers import REPOSITORY
from tests.launcher.cluster.namespaces import Namespaces, why_no_namespaces
from tests.launcher.faults.test_folders import NEXT_STEP, command
from tests.launcher.runs import TINY_MODEL, TINY_RUN
from tests.launcher.test_accidents import environment_of

TEMPLATE = REPOSITORY / "docs" / "clusters" / "kubernetes.yaml"
NODES, GPUS = 2, 8
"""What stands in the template."""
TORCHRUN_SECONDS = 30.0
"""After so long torchrun kills ranks that it has asked to end, unless it is told otherwise."""
LIMIT = 120.0


def job_set() -> dict[str, Any]:
    """The template's JobSet."""
    return yaml.safe_load(TEMPLATE.read_text())


def job(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """The specification of its one job."""
    (replicated,) = manifest["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    return replicated["template"]["spec"]


def container(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """The container of each pod."""
    (found,) = job(manifest)["template"]["spec"]["containers"]
    return found


def environment(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What the template sets in it."""
    return {entry["name"]: entry["value"] for entry in container(manifest)["env"]}


def first_pod(manifest: Mapping[str, Any]) -> str:
    """The name by which the others find the first pod: JobSet makes it of names and indices."""
    name = manifest["metadata"]["name"]
    return f"{name}-{manifest['spec']['replicatedJobs'][0]['name']}-0-0.{name}"


def option(words: list[str], name: str) -> str:
    """The value of an option."""
    return words[words.index(name) + 1]


def test_its_parts_name_one_another():
    manifest = job_set()
    spec, pod, inside = job(manifest), job(manifest)["template"]["spec"], container(manifest)
    shell, flags, script = inside["command"]
    assert (shell, flags) == ("bash", "-euc")
    subprocess.run(["bash", "-n", "-c", script], check=True, timeout=10)
    # What exec starts is process 1, which alone gets the signals of Kubernetes.
    words = shlex.split(script[script.index("exec ") :].replace("\\\n", " "))[1:]
    assert words[0] == "torchrun"
    assert spec["parallelism"] == spec["completions"] == int(option(words, "--nnodes")) == NODES
    assert inside["resources"]["limits"]["nvidia.com/gpu"] == int(option(words, "--nproc_per_node")) == GPUS
    assert option(words, "--node_rank") == "$JOB_COMPLETION_INDEX"
    assert spec["completionMode"] == "Indexed", "without it there is no such variable"
    assert option(words, "--master_addr") == first_pod(manifest)
    assert {"containerPort": int(option(words, "--master_port"))} in inside["ports"]
    assert {mount["name"] for mount in inside["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert SCRIPT in words
    settings = TrainingCommand.of(words).arguments[2:]
    assert load_run_config(settings).run.resume == AUTO, "the same command begins the run and goes on with it"


def test_what_kubernetes_grants_a_save_torchrun_grants_too():
    manifest = job_set()
    pod = job(manifest)["template"]["spec"]
    seconds = int(environment(manifest)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert TORCHRUN_SECONDS < seconds < pod["terminationGracePeriodSeconds"]


def test_a_drained_node_costs_no_restart():
    """Kubernetes marks its pod, the job fails for that reason alone, and JobSet does not count a failure so named."""
    manifest = job_set()
    (rule,) = job(manifest)["podFailurePolicy"]["rules"]
    assert rule == {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert job(manifest)["template"]["spec"]["restartPolicy"] == "Never", "Kubernetes refuses the rule with another"
    (answer,) = manifest["spec"]["failurePolicy"]["rules"]
    assert answer["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert answer["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", answer["name"])


class Pods:
    """The pods of the template, one rank each."""

    def __init__(self, folder: Path, hosts: Namespaces, stack: ExitStack) -> None:
        self.folder, self._hosts, self._stack, self._manifest = folder, hosts, stack, job_set()
        self.names = [first_pod(self._manifest).replace("0-0.", f"0-{index}.") for index in range(NODES)]
        self.said = [folder / f"pod_{index}.log" for index in range(NODES)]
        for index in range(NODES):
            self._write_hosts(index, [index])

    def start(self, index: int, added: Mapping[str, str]) -> subprocess.Popen:
        """Start one, with ``added`` variables; its first process."""
        shell, flags, script = container(self._manifest)["command"]
        for old, new in ((f"--nproc_per_node {GPUS}", "--nproc_per_node 1"), ("/data/", f"{self.folder}/")):
            assert old in script
            script = script.replace(old, new)
        variables = {
            **environment(self._manifest),
            **{"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": self.names[index].partition(".")[0]},
            # The image's.
            **{"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin", "DS_ACCELERATOR": "cpu"},
            **{"TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", "")},
            **added,
        }
        apart = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        inside = 'mount --bind "$1" /etc/hosts; hostname "$HOSTNAME"; shift; exec "$@"'
        words = [*apart, "sh", "-euc", inside, "sh", str(self._names_of(index)), shell, flags, script]
        process = subprocess.Popen(
            self._hosts.on(self._hosts.hosts[index], *words),
            cwd=REPOSITORY, env={name: value for name, value in variables.items() if value},
            stdout=self.said[index].open("a"), stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._stack.callback(_kill, process)
        return process

    def publish(self) -> None:
        """Let the pods find one another by name, as the cluster's name server does once they have addresses."""
        for index in range(NODES):
            self._write_hosts(index, list(range(NODES)))

    def text(self) -> str:
        """What all have said."""
        return "\n".join(path.read_text() for path in self.said if path.exists())

    def _names_of(self, index: int) -> Path:
        return self.folder / f"hosts_{index}"

    def _write_hosts(self, index: int, known: list[int]) -> None:
        lines = [f"{self._hosts.hosts[one]} {self.names[one]} {self.names[one].partition('.')[0]}" for one in known]
        self._names_of(index).write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))


def _kill(process: subprocess.Popen) -> None:
    """End a pod that still runs: all of its processes end with its first one."""
    for member in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
        with suppress(psutil.Error):
            member.kill()
    process.wait(timeout=20)


def ask_to_end(process: subprocess.Popen) -> None:
    """SIGTERM to process 1 of a pod, as the kubelet sends it."""
    # Below `unshare`, which waits for it.
    (first,) = psutil.Process(process.pid).children()
    assert "torchrun" in " ".join(first.cmdline())
    first.send_signal(signal.SIGTERM)


def write_config(path: Path, shards: Path) -> None:
    """The tiny run as the file that the template names."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in {"data.train": str(shards), **TINY_MODEL, **TINY_RUN, "run.timeout_seconds": 120.0}.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    path.write_text(tomli_w.dumps(sections))


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_its_pods_train_save_when_one_is_to_end_and_go_on(shards, tmp_path):
    if reason := why_no_namespaces():
        pytest.skip(reason)
    write_config(tmp_path / "run.toml", shards)
    run, go = tmp_path / "runs" / "mine", tmp_path / "go"
    # The step under way takes longer than torchrun would wait by itself.
    waits = command(NEXT_STEP, f"while ! test -e {shlex.quote(str(go))}; do sleep 0.1; done")
    plain = environment_of(waits, tmp_path / "waits")
    slow = {name: plain[name] for name in ("PYTHONPATH", "LONGCTX_ACCIDENT")}
    hosts = Namespaces(tmp_path, NODES)
    with ExitStack() as stack:
        stack.callback(hosts.remove)
        hosts.make()
        pods = Pods(tmp_path, hosts, stack)
        # The second pod comes up before anybody knows the first one's name.
        second = pods.start(1, slow)
        time.sleep(5)
        first = pods.start(0, slow)
        pods.publish()
        wait_until((tmp_path / "waits").exists, pods.text())
        ask_to_end(second)
        time.sleep(TORCHRUN_SECONDS + 5)
        assert first.poll() is second.poll() is None, pods.text()
        go.touch()
        assert [first.wait(LIMIT), second.wait(LIMIT)] == [1, 1], pods.text()
        assert "Stopped after step 4 of 8" in pods.text(), pods.text()
        assert newest_checkpoint_step(run) == 4

        again = [pods.start(index, {}) for index in range(NODES)]
        assert [pod.wait(LIMIT) for pod in again] == [0, 0], pods.text()
    found = list(read_metrics(run))
    assert [record["step"] for record in found if record["kind"] == "train"] == list(range(1, 9))
    assert [record["step"] for record in found if record.get("event") == "resume"] == [4]
    (stop,) = [record for record in found if record.get("event") == "stop"]
    assert stop["reason"] == "signal", stop
