"""``Hardware``: rates for a device and its links. Profiles for a few devices are included, with a source per value.

``launcher measure`` writes such a profile for the machine it runs on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.plan.rates import Rate, is_amount, read_rate
from launcher.wording import did_you_mean
from longctx.errors import ConfigError
from longctx.files import read_toml

FOLDER = Path(__file__).parent / "profiles"
MEASURED = "measured"
MEASURED_FILE = "hardware.toml"
"""Written by ``measure`` and read by ``--device measured``, in the working folder."""


def _by(*sizes: str, like: str = "") -> dict[str, Any]:
    """Return a field's metadata: its possible table axes, and the earlier field to use if a profile lacks this one."""
    return {"sizes": sizes, "like": like}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates that one device attains in practice, not from a data sheet: bytes, FLOPs or parameters per second.

    A rate may be a table by dtype and by its field's sizes. Sizes are: matmul tokens and width (the root of inner times
    outer width), length of a document or side of a hop's square, head size, bytes per tensor or message, and ZeRO stage
    plus 1.
    """

    name: str
    device_type: str = "cuda"
    """Either "cuda" or "cpu"; on a CPU, device memory is host memory."""
    memory_bytes: float
    """Device memory that a run may fill."""
    peak_flops: float
    """Data-sheet peak, the denominator in MFU; 0 if unknown."""
    product_flops: Rate = field(metadata=_by("tokens", "width"))
    """Matmuls, forward."""
    product_backward_flops: Rate = field(metadata=_by("tokens", "width", like="product_flops"))
    """Both backward matmuls."""
    attention_flops: Rate = field(metadata=_by("length", "head_dim"))
    """Causal attention forward: 2·(D + V) FLOPs per unmasked query-key pair and head."""
    attention_backward_flops: Rate = field(metadata=_by("length", "head_dim"))
    """Backward, counted as 2.5 times the forward FLOPs."""
    full_attention_flops: Rate = field(metadata=_by("length", "head_dim", like="attention_flops"))
    """Attention with all keys visible, as in ring hops."""
    full_attention_backward_flops: Rate = field(metadata=_by("length", "head_dim", like="attention_backward_flops"))
    window_attention_flops: Rate = field(metadata=_by("window", "head_dim", like="attention_flops"))
    """Attention under a window."""
    window_attention_backward_flops: Rate = field(metadata=_by("window", "head_dim", like="attention_backward_flops"))
    memory_bandwidth: Rate = field(metadata=_by("bytes"))
    """Device memory: bytes read plus bytes written, as in a sum of two tensors."""
    copy_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """Copies, or conversions to another dtype."""
    norm_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """RMSNorm forward: input and output."""
    norm_backward_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """Backward, counted as twice the forward bytes."""
    rotary_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """Rotation applied to queries and keys: input and output."""
    activation_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """Gated activation forward: three tensors with the FFN's inner width."""
    activation_backward_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """Backward, counted as twice the forward bytes."""
    loss_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """From logits to their gradient, counted as five float32 passes over the logits."""
    routing_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """Dispatch to experts on the same device and combine: four times their assignments, forward."""
    routing_backward_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """Backward, counted as twice the forward bytes."""
    host_bandwidth: Rate = field(metadata=_by())
    """To host memory, with as many bytes back at the same time."""
    node_bandwidth: Rate = field(metadata=_by("bytes"))
    """To other devices in the machine, per direction."""
    exchange_bandwidth: Rate = field(metadata=_by("bytes", like="node_bandwidth"))
    """All-to-all over the same links: bytes that each device sends and receives."""
    network_bandwidth: Rate = field(metadata=_by("bytes"))
    """To other machines, per direction and device."""
    host_memory_bytes: float
    """Host memory per device."""
    host_memory_bandwidth: Rate = field(metadata=_by())
    """Host memory bandwidth per device."""
    disk_bandwidth: Rate = field(metadata=_by())
    """Disk bandwidth per device, for writing or reading."""
    message_seconds: float
    """Latency before a message's first byte."""
    hidden_share: float = 1.0
    """Share of a message's time that can overlap with computation; below 1 if ranks share cores."""
    layer_seconds: Rate | None = field(default=None, metadata=_by("stage"))
    """Host seconds for one layer's operators, forward and backward, if no device work hides them."""
    gradient_parameters: Rate | None = field(default=None, metadata=_by("stage"))
    """Parameters per second for accumulating gradients in a micro-batch before a step's last one. Without it, plan uses
    arithmetic on bytes."""
    reduction_parameters: Rate | None = field(default=None, metadata=_by("stage"))
    """Parameters per second for accumulating and reducing gradients in a step's last micro-batch."""
    update_parameters: Rate | None = field(default=None, metadata=_by("stage"))
    """Parameters per second at the end of a step: gradient clipping, AdamW, weight all-gather."""
    micro_batch_seconds: Rate | None = field(default=None, metadata=_by("stage"))
    """Remaining seconds per micro-batch: bookkeeping in DeepSpeed and the loop."""
    step_seconds: Rate | None = field(default=None, metadata=_by("stage"))
    """Remaining seconds per step."""
    process_bytes: float = 0.0
    """Memory that a rank's program takes on a CPU before it has a model."""
    ranks: float = 0.0
    """Devices measured concurrently, if the values depend on it; otherwise 0."""
    kernels: Mapping[str, Mapping[str, Rate]] = field(default_factory=dict)
    """Attention rates by kernel, if known separately. The fields above describe ``auto``'s choice on a machine without
    flash-attn, or the measured kernel."""
    sources: dict[str, str]
    """Source for each value."""

    def attention_rate(self, name: str, kernel: str) -> Rate:
        """Return the rate with this name, specific to this kernel if the profile has it."""
        return self.kernels.get(kernel, {}).get(name) or getattr(self, name)

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain values."""
        found: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Rate):
                value = value.to_json()
            elif f.name == "kernels":
                value = {kernel: {key: rate.to_json() for key, rate in of.items()} for kernel, of in value.items()}
            found[f.name] = value
        return found


_FIELDS = [f.name for f in dataclasses.fields(Hardware) if f.name not in ("name", "device_type", "sources", "kernels")]
KERNELS = ("cuda_flash", "flash2", "flash3", "flash4", "cudnn", "flex")
"""Attention kernels that may have their own sections in a profile, such as ``[cudnn.attention_flops]``."""
SIZES = {f.name: f.metadata["sizes"] for f in dataclasses.fields(Hardware) if f.metadata}
"""Fields that may be tables, with their axes."""
_LIKE = {f.name: f.metadata["like"] for f in dataclasses.fields(Hardware) if f.metadata.get("like")}
"""Fields that a profile may leave out, with the earlier field that replaces them."""
_OPTIONAL = {f.name for f in dataclasses.fields(Hardware) if f.default is not dataclasses.MISSING} | set(_LIKE)
_REQUIRED = ["name", *(name for name in _FIELDS if name not in _OPTIONAL)]


def load_hardware(given: str) -> Hardware:
    """Load the profile named by ``--device``: an included one, ``measured``, or a file.

    Raise ConfigError if it does not exist or is malformed.
    """
    known = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
    path = known.get(given, Path(given))
    if given == MEASURED:
        path = Path(MEASURED_FILE)
        if not path.is_file():
            raise ConfigError(
                f"--device measured reads {MEASURED_FILE}, which is missing in the working folder {Path.cwd()}.\nRun "
                "`longctx measure` to write it: it takes about a minute."
            )
    elif not path.is_file():
        names = list(known)
        names.append(MEASURED)
        question = did_you_mean(given, names, most=1)
        raise ConfigError(
            f"--device {given} is neither a profile nor a profile file.{question}\nProfiles: {', '.join(known)}, or "
            f"{MEASURED} after `longctx measure`."
        )
    return hardware_from_values(read_toml(path, f"--device {given}"), given)


def hardware_from_values(values: dict[str, Any], given: str) -> Hardware:
    """Build the profile from a file's values; raise ConfigError, naming it ``given``, if they are invalid."""
    unknown = sorted(set(values) - {"name", "device_type", *KERNELS} - set(_FIELDS))
    missing = [name for name in _REQUIRED if name not in values]
    if unknown or missing:
        problems = [f"{name} is unknown" for name in unknown] + [f"{name} is missing" for name in missing]
        raise ConfigError(
            f"--device {given} is not a valid profile: {', '.join(problems)}.\nCopy a shipped one: {FOLDER}."
        )
    device_type = values.get("device_type", "cuda")
    if device_type not in ("cpu", "cuda"):
        raise ConfigError(f'--device {given}: device_type = {device_type!r} is neither "cpu" nor "cuda".')
    # Profiles without a device type are for GPUs: those were written first.
    found: dict[str, Any] = {"device_type": device_type}
    sources: dict[str, str] = {}
    for name in _FIELDS:
        if name in values:
            found[name], sources[name] = _read_value(name, values[name], given)
    for name, like in _LIKE.items():
        # In field order: the value to copy is already set.
        found.setdefault(name, found[like])
    kernels = {kernel: _of_kernel(kernel, values[kernel], given, sources) for kernel in KERNELS if kernel in values}
    return Hardware(name=str(values["name"]), kernels=kernels, sources=sources, **found)


def _of_kernel(kernel: str, sections: Any, given: str, sources: dict[str, str]) -> dict[str, Rate]:
    """Read a kernel's rates, and add their sources to ``sources``; take missing rates from related ones."""
    names = [name for name in SIZES if "attention" in name]
    if not isinstance(sections, dict) or not set(sections) <= set(names):
        raise ConfigError(f"--device {given}: [{kernel}] may only have {', '.join(names)}.")
    found: dict[str, Rate] = {}
    for name, section in sections.items():
        found[name], sources[f"{kernel}.{name}"] = _read_value(name, section, given)
    for name in names:
        like = _LIKE.get(name)
        if name not in found and like in found:
            found[name] = found[like]
    return found


def _read_value(name: str, section: Any, given: str) -> tuple[Any, str]:
    problem = "it must be a section with a source"
    if isinstance(section, dict) and isinstance(section.get("source"), str) and section["source"]:
        if name in SIZES:
            rate = read_rate(section, SIZES[name])
            if isinstance(rate, Rate):
                return rate, section["source"]
            problem = rate
        elif set(section) != {"value", "source"}:
            problem = "it must have exactly a value and a source"
        elif _is_valid_value(name, section["value"]):
            return float(section["value"]), section["source"]
        else:
            problem = f"value = {section['value']!r} is not a valid number"
    raise ConfigError(
        f"--device {given}: {name} is {str(section)[:200]}: {problem}.\n"
        f'Write [{name}], value = 1e12, source = "its origin".'
    )


def _is_valid_value(name: str, value: Any) -> bool:
    # Values that may be unknown, or zero; false is neither.
    is_zero = name in ("hidden_share", "peak_flops", "process_bytes", "ranks") and value == 0 and value is not False
    return (is_amount(value) or is_zero) and (name != "hidden_share" or value <= 1)
