"""Another package of one of our names: found before it does harm, and said on one screen."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import longctx_train
from longctx_train import DISTRIBUTION, PACKAGES, find_clashes, find_other_owners
from tests.helpers import REPOSITORY


def written(path: Path, text: str = "") -> Path:
    """The file, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def other_distribution(site: Path, name: str, version: str, package: str) -> None:
    """A distribution of somebody else's that provides ``package``."""
    information = site / f"{name}-{version}.dist-info"
    written(information / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    written(information / "top_level.txt", f"{package}\n")
    written(information / "RECORD", f"{package}/__init__.py,,\n")
    written(site / package / "__init__.py", "raise ImportError('not ours')\n")


def start(*path: Path, argument: str = "--version") -> subprocess.CompletedProcess[str]:
    """The command ``longctx`` in a process whose modules come from these folders first."""
    folders = [str(folder) for folder in path]
    script = f"import sys; sys.path[:0] = {folders}; import longctx_train; sys.exit(longctx_train.main())"
    return subprocess.run([sys.executable, "-c", script, argument], cwd="/", capture_output=True, text=True, timeout=60)


def test_a_package_of_another_distribution_comes_first(tmp_path):
    for name in ("longctx", "launcher", "parallel"):
        site = tmp_path / name
        other_distribution(site, name, "0.3.2", name)
        ended = start(site, REPOSITORY)
        assert (ended.returncode, ended.stdout) == (1, ""), ended
        assert f"`import {name}` finds {site / name}, not {REPOSITORY / name}." in ended.stderr
        assert f"{name} 0.3.2 provides it. Try: {sys.executable} -m pip uninstall {name}" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert len(ended.stderr.splitlines()) < 10


def test_a_folder_of_that_name_on_the_path(tmp_path):
    assert list(find_clashes()) == [], "nothing is wrong here"
    written(tmp_path / "parallel" / "__init__.py")
    ended = start(tmp_path, REPOSITORY)
    assert ended.returncode == 1
    assert f"remove {tmp_path} from PYTHONPATH" in ended.stderr


def test_set_up_names_every_other_owner(tmp_path, monkeypatch):
    other_distribution(tmp_path, "parallel", "0.2.5", "parallel")
    monkeypatch.syspath_prepend(tmp_path)
    (said,) = [line for line in find_other_owners() if line.startswith("parallel")]
    assert "parallel 0.2.5, which does not belong to longctx-train, also provides the package parallel" in said


def test_a_distribution_that_wrote_over_a_file_of_ours(tmp_path):
    """Both in one site-packages: pip lets the later one overwrite the earlier one."""
    shutil.copyfile(longctx_train.__file__, tmp_path / "longctx_train.py")
    record = []
    for name in PACKAGES:
        first = written(tmp_path / name / "__init__.py", '"""Ours."""\n')
        digest = base64.urlsafe_b64encode(hashlib.sha256(first.read_bytes()).digest()).rstrip(b"=").decode()
        record.append(f"{name}/__init__.py,sha256={digest},12")
    information = tmp_path / "longctx_train-0.1.0.dist-info"
    written(information / "METADATA", f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 0.1.0\n")
    written(information / "RECORD", "\n".join(record))
    script = "import longctx_train; print(list(longctx_train.find_clashes()))"

    def found() -> str:
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {script}"]
        return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60).stdout

    assert found() == "[]\n"
    other_distribution(tmp_path, "longctx", "0.3.2", "longctx")
    said = found()
    assert "longctx/__init__.py is not the file that longctx-train installed: longctx 0.3.2" in said
    assert "pip uninstall longctx" in said
