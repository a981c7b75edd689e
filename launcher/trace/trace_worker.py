"""Process that traces one rank and exits: ``python -m launcher.trace.trace_worker RESULT``, with options on standard
input.

One process per rank, because the stand-ins for driver and network affect the full process.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from launcher.trace.stand_in import has_driver, load_stand_in
from longctx.errors import LongCtxError


def main(result: Path, request: dict[str, Any]) -> None:
    """Trace, and write the result or the error."""
    try:
        written = {"trace": _trace(request)}
    except LongCtxError as error:
        written = {"error": str(error), "kind": type(error).__name__}
    except Exception:
        # The parent raises this again with its traceback; an empty kind marks an internal error.
        written = {"error": traceback.format_exc(), "kind": ""}
    result.write_text(json.dumps(written))
    sys.stdout.flush()
    # Skip PyTorch's cleanup, which would access devices that only the stand-in driver has.
    os._exit(0)


def _trace(request: dict[str, Any]) -> dict[str, Any]:
    finish = None
    if not has_driver():
        finish = load_stand_in()
    # Import torch only after the stand-in.
    import torch

    if finish is not None:
        finish()
    from launcher.config.load_config import config_from_values
    from launcher.config.resolved import ResolvedConfig
    from launcher.plan.planned_world import World
    from launcher.trace.trace_step import trace_rank

    # PyTorch warns about many things that a trace cannot change.
    logging.disable(logging.WARNING)
    # If there is a GPU, choose kernels for it.
    capability = tuple(request["capability"])
    if finish is None and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    trace = trace_rank(
        ResolvedConfig.of(config_from_values(request["config"])),
        World(**request["world"]),
        request["rank"],
        document_tokens=request["document_tokens"],
        capability=capability,
    )
    return trace.to_json()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.load(sys.stdin))
