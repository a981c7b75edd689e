"""``Hardware``: rates of a device and its links. Profiles of a few devices are included, with sources for all figures.

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
"""Where ``measure`` writes to and ``--device measured`` reads from, in the working folder."""


def _by(*sizes: str, like: str = "") -> dict[str, Any]:
    """Return a field's metadata: its possible table axes, and the earlier field to use if a profile lacks this one."""
    return {"sizes": sizes, "like": like}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates that one device attains, rather than those of a data sheet: bytes, FLOPs or parameters per second.

    A rate may be a table by dtype and by the sizes that its field names. Sizes are: tokens and width of a product (the
    root of its inner times outer width), length of a document or of the square of a hop, head size, bytes of one tensor
    or message, and ZeRO's stage (plus 1).
    """

    name: str
    device_type: str = "cuda"
    """"cuda", or "cpu", whose memory is the machine's."""
    memory_bytes: float
    """What a run may fill of a device's memory."""
    peak_flops: float
    """Of the data sheet: what MFU is a share of; 0 where nobody knows it."""
    product_flops: Rate = field(metadata=_by("tokens", "width"))
    """Matrix products, forward."""
    product_backward_flops: Rate = field(metadata=_by("tokens", "width", like="product_flops"))
    """Their two products of backward."""
    attention_flops: Rate = field(metadata=_by("length", "head_dim"))
    """Causal attention forward, 2·(D + V) a query-key pair that the mask leaves, and head."""
    attention_backward_flops: Rate = field(metadata=_by("length", "head_dim"))
    """Backward, which is 2.5 times those."""
    full_attention_flops: Rate = field(metadata=_by("length", "head_dim", like="attention_flops"))
    """The same of queries that see all keys, as in the hops of a ring."""
    full_attention_backward_flops: Rate = field(metadata=_by("length", "head_dim", like="attention_backward_flops"))
    window_attention_flops: Rate = field(metadata=_by("window", "head_dim", like="attention_flops"))
    """The same under a window."""
    window_attention_backward_flops: Rate = field(metadata=_by("window", "head_dim", like="attention_backward_flops"))
    memory_bandwidth: Rate = field(metadata=_by("bytes"))
    """The device's own memory: read and written bytes together, as sums of two tensors move them."""
    copy_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """Copies, or conversions to another dtype."""
    norm_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """RMSNorm forward: its input and output."""
    norm_backward_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """Backward, as if it moved twice those."""
    rotary_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """Rotation of queries and keys: input and output."""
    activation_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """Gated activation forward: three tensors of the FFN's inner width."""
    activation_backward_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """Backward, as if it moved twice those."""
    loss_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """From logits to their gradient, as if logits were moved five times in float32."""
    routing_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """Tokens to experts on the same device and back: four times their assignments, forward."""
    routing_backward_bandwidth: Rate = field(metadata=_by("bytes", like="memory_bandwidth"))
    """Backward, as if it moved twice those."""
    host_bandwidth: Rate = field(metadata=_by())
    """To the host's memory, and as much back at the same time."""
    node_bandwidth: Rate = field(metadata=_by("bytes"))
    """To the other devices of a machine, in each direction."""
    exchange_bandwidth: Rate = field(metadata=_by("bytes", like="node_bandwidth"))
    """The same of an all-to-all, which each device gives and gets so many bytes in."""
    network_bandwidth: Rate = field(metadata=_by("bytes"))
    """To other machines, in each direction; each device has as much."""
    host_memory_bytes: float
    """A device's share of the host's memory."""
    host_memory_bandwidth: Rate = field(metadata=_by())
    """Its share of what that memory moves."""
    disk_bandwidth: Rate = field(metadata=_by())
    """Its share of a disk of its machine, written or read."""
    message_seconds: float
    """Before a message's first byte."""
    hidden_share: float = 1.0
    """How much of a message's time the device can compute besides: less than 1 where ranks share their cores."""
    layer_seconds: Rate | None = field(default=None, metadata=_by("stage"))
    """The host's, for one layer's operators forward and backward, where nothing hides them."""
    gradient_parameters: Rate | None = field(default=None, metadata=_by("stage"))
    """Whose gradients a micro-batch before a step's last adds up; where a profile has none, arithmetic on bytes."""
    reduction_parameters: Rate | None = field(default=None, metadata=_by("stage"))
    """Whose gradients its last micro-batch adds up and reduces over the ranks."""
    update_parameters: Rate | None = field(default=None, metadata=_by("stage"))
    """Which a step's end updates: gradients clipped, AdamW, weights gathered."""
    micro_batch_seconds: Rate | None = field(default=None, metadata=_by("stage"))
    """What a micro-batch takes beside all that: DeepSpeed's and the loop's bookkeeping."""
    step_seconds: Rate | None = field(default=None, metadata=_by("stage"))
    """What a step does."""
    process_bytes: float = 0.0
    """Of a CPU's memory, what a rank's program takes before it has a model."""
    ranks: float = 0.0
    """How many of these devices were measured at once, where the figures depend on it; 0 where they do not."""
    kernels: Mapping[str, Mapping[str, Rate]] = field(default_factory=dict)
    """Attention's rates by kernel, where they are known apart. The fields above are of what ``auto`` takes on a machine
    without flash-attn, or of the kernel that was measured."""
    sources: dict[str, str]
    """Where each figure comes from."""

    def attention_rate(self, name: str, kernel: str) -> Rate:
        """Return the rate of this name, specific to this kernel if the profile has it."""
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
"""Attention kernels that a profile may have sections of its own for, as ``[cudnn.attention_flops]``."""
SIZES = {f.name: f.metadata["sizes"] for f in dataclasses.fields(Hardware) if f.metadata}
"""The figures that may be tables, and by which sizes."""
_LIKE = {f.name: f.metadata["like"] for f in dataclasses.fields(Hardware) if f.metadata.get("like")}
"""What a profile may leave out, and the figure before it that it is then like."""
_OPTIONAL = {f.name for f in dataclasses.fields(Hardware) if f.default is not dataclasses.MISSING} | set(_LIKE)
_REQUIRED = ["name", *(name for name in _FIELDS if name not in _OPTIONAL)]


def load_hardware(given: str) -> Hardware:
    """Load the profile that ``--device`` names: an included one, ``measured``, or a file.

    Raise ConfigError if it does not exist or is malformed.
    """
    known = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
    path = known.get(given, Path(given))
    if given == MEASURED:
        path = Path(MEASURED_FILE)
        if not path.is_file():
            raise ConfigError(
                f"--device measured reads {MEASURED_FILE} in the working folder, {Path.cwd()}, and it is not there.\n"
                "`longctx measure` writes it: it measures this machine in about a minute."
            )
    elif not path.is_file():
        names = list(known)
        names.append(MEASURED)
        question = did_you_mean(given, names, most=1)
        raise ConfigError(
            f"--device {given} is neither a profile nor a file of one.{question}\n"
            f"Profiles: {', '.join(known)}, or {MEASURED} after `longctx measure`."
        )
    return from_values(read_toml(path, f"--device {given}"), given)


def from_values(values: dict[str, Any], given: str) -> Hardware:
    """Build the profile from a file's values; raise ConfigError, naming it ``given``, if they are not valid."""
    unknown = sorted(set(values) - {"name", "device_type", *KERNELS} - set(_FIELDS))
    missing = [name for name in _REQUIRED if name not in values]
    if unknown or missing:
        listed = [f"{name} is not known" for name in unknown] + [f"{name} is missing" for name in missing]
        raise ConfigError(f"--device {given} is no profile: {', '.join(listed)}.\nCopy a shipped one: {FOLDER}.")
    device_type = values.get("device_type", "cuda")
    if device_type not in ("cpu", "cuda"):
        raise ConfigError(f'--device {given}: device_type = {device_type!r} is neither "cpu" nor "cuda".')
    # Profiles without a device type are of GPUs: those were written first.
    found: dict[str, Any] = {"device_type": device_type}
    sources: dict[str, str] = {}
    for name in _FIELDS:
        if name in values:
            found[name], sources[name] = _figure(name, values[name], given)
    for name, like in _LIKE.items():
        # In the order of the fields: the figure to copy is already set.
        found.setdefault(name, found[like])
    kernels = {kernel: _of_kernel(kernel, values[kernel], given, sources) for kernel in KERNELS if kernel in values}
    return Hardware(name=str(values["name"]), kernels=kernels, sources=sources, **found)


def _of_kernel(kernel: str, sections: Any, given: str, sources: dict[str, str]) -> dict[str, Rate]:
    """Read a kernel's rates, and add their sources to ``sources``; missing rates are taken from related ones."""
    names = [name for name in SIZES if "attention" in name]
    if not isinstance(sections, dict) or not set(sections) <= set(names):
        raise ConfigError(f"--device {given}: [{kernel}] may have {', '.join(names)}, and nothing else.")
    found: dict[str, Rate] = {}
    for name, section in sections.items():
        found[name], sources[f"{kernel}.{name}"] = _figure(name, section, given)
    for name in names:
        like = _LIKE.get(name)
        if name not in found and like in found:
            found[name] = found[like]
    return found


def _figure(name: str, section: Any, given: str) -> tuple[Any, str]:
    problem = "it is no section with a source"
    if isinstance(section, dict) and isinstance(section.get("source"), str) and section["source"]:
        if name in SIZES:
            rate = read_rate(section, SIZES[name])
            if isinstance(rate, Rate):
                return rate, section["source"]
            problem = rate
        elif set(section) != {"value", "source"}:
            problem = "it must have a value and a source and nothing else"
        elif _is_figure(name, section["value"]):
            return float(section["value"]), section["source"]
        else:
            problem = f"value = {section['value']!r} is no number that it can be"
    raise ConfigError(
        f"--device {given}: {name} is {str(section)[:200]}: {problem}.\n"
        f'Write [{name}], value = 1e12, source = "where it comes from".'
    )


def _is_figure(name: str, value: Any) -> bool:
    if name == "hidden_share":
        return is_amount(value + 1) and 0 <= value <= 1 if isinstance(value, (int, float)) else False
    # Figures that may be unknown, or zero.
    return is_amount(value) or (name in ("peak_flops", "process_bytes", "ranks") and value == 0)
