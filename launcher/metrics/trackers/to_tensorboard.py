"""TensorBoard adapter, the only file that imports it. Event files are in the run folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from torch.utils.tensorboard import SummaryWriter

from launcher.metrics.trackers.tracker import TrackedRun

TENSORBOARD_FOLDER = "tensorboard"


class TensorBoardTracker:
    """One TensorBoard run; it hides points that earlier attempts logged from ``first_step`` on."""

    def __init__(self, run: TrackedRun) -> None:
        if not isinstance(threading.excepthook, _WithoutTensorBoard):
            threading.excepthook = _WithoutTensorBoard(threading.excepthook)
        folder = run.folder / TENSORBOARD_FOLDER
        self._writer = SummaryWriter(str(folder), purge_step=run.first_step, flush_secs=30)

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Add one point per curve."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step, walltime=seconds)
        # A resumed run does not log earlier validations again, so they must survive a kill.
        if any(tag.startswith("validation") for tag in values):
            self._writer.flush()

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text as a code block, because TensorBoard renders Markdown."""
        self._writer.add_text(name, f"````text\n{text}\n````", step)

    def close(self, how: str) -> None:
        """Flush the event file."""
        self._writer.close()


class _WithoutTensorBoard:
    """Thread exception hook that hides tracebacks from TensorBoard's own thread.

    The writer's next call raises the error.
    """

    def __init__(self, others: Callable[[threading.ExceptHookArgs], object]) -> None:
        self._others = others

    def __call__(self, args: threading.ExceptHookArgs, /) -> None:
        if isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard."):
            return
        self._others(args)
