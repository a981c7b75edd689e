"""Heartbeats: a thread in every rank that reports its state to the coordinator and checks that the coordinator is
alive.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from parallel.runtime.activity import ACTIVITY
from parallel.runtime.watch.activity_sampler import ActivitySampler, AwakeClock
from parallel.runtime.watch.connection import Connection
from parallel.runtime.watch.failure import FAILED, FIRST_ALIVE, Failure
from parallel.runtime.watch.processes import RankProcess
from parallel.runtime.watch.stack_traces import PREFIX, place_of_main, stack_trace_path, write_stack_traces
from parallel.runtime.watch.stall_detection import RankState
from parallel.runtime.watch.stall_report import PROCESS_STATES, state_line
from parallel.runtime.watch.watch_options import WatchOptions

_MAX_SAMPLE_SECONDS = 1.0
"""Maximum seconds between two samples of the main thread, however long the timeout is."""
_OTHERS_SECONDS = 0.5
"""How long the rank that reports in place of rank 0 waits for other ranks to write their stacks."""


class HeartbeatLog:
    """Thread that samples the main thread, sends heartbeats, and ends this process if the coordinator falls silent."""

    def __init__(self, options: WatchOptions) -> None:
        self._options = options
        self._clock = AwakeClock(2 * options.heartbeat_seconds + 1.0)
        self._sampler = ActivitySampler(ACTIVITY, spins=options.spins)
        self._stop_event = threading.Event()
        self._line: Connection | None = None
        self._state: RankState | None = None

    def start(self, line: Connection) -> None:
        """Start the thread, once all ranks have joined."""
        self._line = line
        threading.Thread(target=self._run, name="watch beats", daemon=True).start()

    def stop(self) -> None:
        """Stop reporting."""
        self._stop_event.set()

    def report_position(self, causes: list[RankProcess]) -> None:
        """Write this process's stacks and report its position to the coordinator; ``causes`` make the run hang."""
        where = place_of_main()
        self.write(where)
        if self._line is not None:
            states = {str(process.rank): process.state() for process in causes}
            self._line.send_message("report", where=where, states=states)

    def _run(self) -> None:
        line, options = self._line, self._options
        assert line is not None
        last_sent = last_received = self._clock.tick()
        last_count = line.messages
        while not self._stop_event.wait(min(options.heartbeat_seconds, _MAX_SAMPLE_SECONDS)):
            now = self._clock.tick()
            self._state = self._sampler.sample(now)
            if now - last_sent >= 0.99 * options.heartbeat_seconds:
                last_sent = now
                line.send_message("beat", state=vars(self._state))
            # Any message proves that the coordinator is alive.
            if line.messages != last_count:
                last_count, last_received = line.messages, now
            elif now - last_received >= options.limit and line.first is None:
                self._end_without_hub(now - last_received)
                return

    def write(self, where: str = "") -> Path | None:
        """Write this process's stacks, if it has a folder for them."""
        state_text = "has not begun"
        if self._state is not None:
            state_text = state_line(self._state)
        if where:
            state_text += f"; {where}"
        return write_stack_traces(self._options.folder, self._options.rank, state_text)

    def _end_without_hub(self, seconds: float) -> None:
        """End this process: rank 0 and its coordinator are silent. Each rank reports it; one per machine informs the
        user.
        """
        line, options = self._line, self._options
        assert line is not None
        # All ranks get here within one heartbeat, without a coordinator to collect states: these are in the ranks'
        # files.
        own = self.write(place_of_main())
        hub = next((process for process in line.neighbors if process.rank == 0), None)
        state, to_kill = "", ()
        if hub is not None:
            # Sample the state before another rank resumes the process to end it.
            state, to_kill = hub.state(), (vars(hub),)
        time.sleep(_OTHERS_SECONDS)
        lines = [
            f"ClusterError: the run hangs at step {ACTIVITY.step}, because of rank 0: no heartbeat for {seconds:.1f} s "
            f"(run.timeout_seconds={options.timeout:g}).",
            f"Rank 0: {PROCESS_STATES[state]}.",
            "The other ranks were in:",
        ]
        lines += self._first_lines(own)
        if options.folder is not None:
            lines.append(f"Thread stacks: {options.folder / PREFIX}N.txt.")
        lines.append("Resume from the newest checkpoint with --run.resume latest.")
        text = "\n".join(part for part in (*lines, options.hint) if part)
        line.end_by(Failure(rank=-1, code=FAILED, text=text, speaker=FIRST_ALIVE, kills=to_kill))

    def _first_lines(self, own: Path | None) -> list[str]:
        """Collect the first lines from the ranks' stack files; without a folder only this rank's state."""
        if own is None:
            assert self._state is not None
            return [f"  rank {self._options.rank}: {state_line(self._state)}"]
        found = []
        for rank in range(self._options.world_size):
            path = stack_trace_path(own.parent, rank)
            # Skip files from an earlier hang in this folder.
            if path.exists() and path.stat().st_mtime > own.stat().st_mtime - self._options.timeout / 2:
                with path.open() as file:
                    found.append(f"  {file.readline().strip()}")
        return found[:10]
