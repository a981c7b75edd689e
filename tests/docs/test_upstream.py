"""Reports for other projects: their scripts show what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY
from tests.launcher.runs import free_port

REPORT = REPOSITORY / "docs" / "upstream" / "deepspeed-zero2-gradient-lifetime.md"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("arguments", "gradients"), [((), 2), (("mended",), 0)])
def test_plain_deepspeed_drops_gradients_in_flight_and_one_line_mends_it(tmp_path: Path, arguments, gradients):
    script = tmp_path / "reproduce.py"
    match = re.search(r"```python\n(.*?)```", REPORT.read_text(), re.S)
    assert match is not None
    script.write_text(match[1])
    environment = {**os.environ, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert re.findall(r"unrecorded: (\d+) gradients", ran.stdout) == [str(gradients)] * 2
    errors = {float(error) for error in re.findall(r"off by (\S+) of", ran.stdout)}
    if gradients:
        assert max(errors) > 0.1
    else:
        assert errors == {0.0}
