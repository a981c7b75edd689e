"""The verb ``measure``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from launcher.cli.cli_output import Json, command_line, note, print_json, print_line
from longctx.errors import ConfigError


def benchmark_hardware(
    *,
    output: Path = Path("hardware.toml"),
    overwrite: bool = False,
    ranks: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    cpu_time: bool = False,
    json: Json = False,
) -> None:
    """Measure this machine's speed, in about a minute, and write a profile for `plan --device measured`.

    Measured are matmuls by shape, attention by length and mask, norms, activations, copies, the loss, gradients and the
    optimizer in each ZeRO stage, links between ranks, and the disk with the working folder. A run's own code does the
    work, in as many processes at once as a run would use, because they share cores, memory and links.

    Args:
        output: File to write.
        overwrite: Replace it if it exists.
        ranks: Processes that measure at the same time: as many as a run has on this machine. 0 is one per GPU, or one
            on a CPU.
        device: auto uses GPUs if there are any.
        cpu_time: Count each process's CPU seconds instead of elapsed time, for a machine that other programs use too.
            If ranks share cores, the seconds are multiplied by the ranks per core.
    """
    # Reject an unusable output first: measuring takes a minute.
    if output.exists() and not overwrite:
        raise ConfigError(f"--output {output} exists. Name another file, or replace it with --overwrite.")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: folder {output.parent} does not exist. Create it, or name another file.")
    from launcher.measure.run_benchmarks import BenchmarkOptions, benchmark_machine
    from longctx.files import write_atomically

    options = BenchmarkOptions(ranks=ranks, device=device, cpu_time=cpu_time)
    text, hardware = benchmark_machine(options, output.parent, lambda title: note(f"measuring {title} …"))
    write_atomically(output, text.encode(), ConfigError)
    if json:
        print_json(hardware.to_json())
        return
    print_line(f"{hardware.name}: written to {output}.")
    print_line(
        f"Plan with it: {command_line('plan', '--device', 'measured' if output == Path('hardware.toml') else output)} …"
    )
