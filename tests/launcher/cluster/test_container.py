"""The container file: what it leaves out, what set-up takes in it, and two containers of it that train together."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY
from tests.launcher.cluster.namespaces import Namespaces, why_no_namespaces
from tests.launcher.runs import flags
from tests.launcher.workers import rows

CONTAINERFILE = REPOSITORY / "docs" / "clusters" / "Containerfile"
IMAGE = "localhost/longctx-test"
PORT = 2222


def base_image() -> str:
    """What the container file builds on."""
    return re.findall(r"^ARG BASE=(\S+)$", CONTAINERFILE.read_text(), re.M)[0]


def why_no_image() -> str | None:
    """Why no image can be built here without a download of its base; None when one can."""
    if os.geteuid() != 0 or shutil.which("buildah") is None:
        return "needs root and buildah: apt-get install buildah"
    if subprocess.run(["buildah", "inspect", "--type", "image", base_image()], capture_output=True).returncode != 0:
        return f"needs the base image: buildah pull {base_image()}"
    return why_no_namespaces()


def test_no_image_gets_what_git_ignores():
    ignored = {line.strip("/") for line in (REPOSITORY / ".gitignore").read_text().splitlines()}
    left_out = {line.removeprefix("**/") for line in (REPOSITORY / ".dockerignore").read_text().splitlines()}
    assert ".venv" in ignored
    for name in ignored:
        assert name in left_out or any(Path(name).match(pattern) for pattern in left_out), name
    assert ".git" in left_out, "it may hold a user's token"


def test_names_of_base_images_are_whole():
    """A short name is looked up in a list that each machine has its own of, or refused."""
    assert base_image().count("/") == 2
    (for_gpus,) = re.findall(r"--build-arg BASE=(\S+)", CONTAINERFILE.read_text())
    assert for_gpus.count("/") == 2


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """An image of this repository; it is gone after the tests."""
    if reason := why_no_image():
        pytest.skip(reason)
    words = ["buildah", "bud", "--isolation", "chroot", "--pull-never", "--layers=false"]
    subprocess.run([*words, "-t", IMAGE, "-f", str(CONTAINERFILE), str(REPOSITORY)], check=True, timeout=1500)
    yield IMAGE
    subprocess.run(["buildah", "rmi", IMAGE], check=True, timeout=60)


class Containers:
    """Containers of the image, each with a network and an ssh server of its own, and one folder for all."""

    def __init__(self, image: str, hosts: Namespaces, shared: Path, stack: ExitStack) -> None:
        self.hosts, self._shared, self._stack = hosts, shared, stack
        self._image = image

    def on(self, host: str, script: str) -> list[str]:
        """The words that run a script in a new container with this host's network."""
        made = ["buildah", "from", "--pull-never", self._image]
        name = subprocess.run(made, check=True, capture_output=True, text=True, timeout=120).stdout.strip()
        self._stack.callback(subprocess.run, ["buildah", "rm", name], check=True, timeout=60, capture_output=True)
        words = ["buildah", "run", "--isolation", "chroot", "--volume", f"{self._shared}:/shared"]
        return self.hosts.on(host, *words, name, "--", "bash", "-euc", script)

    def serve(self) -> None:
        """Start each one's ssh server, which lets in whoever has the shared key."""
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._shared / "key"], check=True)
        script = (
            "mkdir -p -m 700 /run/sshd ~root/.ssh; ssh-keygen -A; cp /shared/key.pub ~root/.ssh/authorized_keys;"
            f"exec /usr/sbin/sshd -D -e -p {PORT}"
        )
        for host in self.hosts.hosts:
            server = subprocess.Popen(self.on(host, script), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self._stack.callback(server.wait, 20)
            self._stack.callback(server.terminate)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_containers_are_two_hosts(image, shards, tmp_path):
    shared = tmp_path / "shared"
    shutil.copytree(shards, shared / "shards")
    hosts = Namespaces(tmp_path, 2)
    (shared / "hostfile").write_text((tmp_path / "hostfile").read_text())
    (shared / "environment").write_text(
        "DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\nPATH=/longctx/.venv/bin:/usr/bin:/bin\n"
    )
    ssh = f"-p {PORT} -i /shared/key -o StrictHostKeyChecking=no -o LogLevel=ERROR"
    arguments = flags(Path("/shared/shards"), Path("/shared/run"), {"train.steps": 4})
    script = f"""
        export DS_ENV_FILE=/shared/environment PDSH_SSH_ARGS_APPEND='{ssh}'
        for host in {" ".join(hosts.hosts)}; do until ssh {ssh} $host true; do sleep 0.2; done; done
        longctx doctor
        deepspeed --hostfile /shared/hostfile --no_ssh_check --master_addr {hosts.hosts[0]} launcher/pretrain.py \
            {" ".join(arguments)}
        longctx report /shared/run
    """
    with ExitStack() as stack:
        stack.callback(hosts.remove)
        hosts.make()
        containers = Containers(image, hosts, shared, stack)
        containers.serve()
        ended = subprocess.run(containers.on(hosts.hosts[0], script), capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "All is well." in ended.stdout + ended.stderr
    assert [row["step"] for row in rows(shared / "run") if row["kind"] == "train"] == [1, 2, 3, 4]
    assert "2 ranks = " in (shared / "run" / "logs" / "rank_0.log").read_text()
    assert (shared / "run" / "report.html").exists()
