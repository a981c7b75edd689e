"""What looks at a step's calls imports no compiler, and what it copied goes with it, whether one is loaded or not."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import gc, random, sys, weakref
import torch
from parallel.audit.capture import Capture, operators_of

if sys.argv[1] == "compiler":
    import torch._dynamo
loaded = "torch._dynamo" in sys.modules
gc.disable()
with Capture("product", operators_of("product", "cpu"), random.Random(0), count=1, limit_bytes=1 << 20,
             name_of=lambda address: "") as capture:
    torch.ones(3, 4) @ torch.ones(4, 5)
assert capture.seen == 1 and len(capture.samples) == 1, (capture.seen, capture.samples)
assert ("torch._dynamo" in sys.modules) == loaded
gone = weakref.ref(capture)
del capture
assert gone() is None, "what was copied waits for Python to look for cycles"
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["nothing", "compiler"])
def test_a_look_imports_no_compiler_and_its_copies_go_with_it(what):
    subprocess.run([sys.executable, "-c", SCRIPT, what], check=True, timeout=120)
