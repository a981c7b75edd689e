"""``Hardware``: how fast a device and its links are. Shipped for a few devices, each figure with its source.

``launcher measure`` writes such a profile of the machine that it runs on.
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


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates that one device attains, not those of a data sheet: bytes, FLOPs or parameters a second.

    A rate may be a table by dtype and by the sizes that its field names. Sizes: tokens and width of a product (the
    root of its inner and outer width), length of a document or of the square of a hop, and head size, bytes of one
    tensor or message, ZeRO's stage (plus 1).
    """

    name: str
    device_type: str = "cuda"
    """"cuda", or "cpu", whose memory is the machine's."""
    memory_bytes: float
    """What a run may fill of a device's memory."""
    peak_flops: float
    """Of the data sheet: what MFU is a share of; 0 where nobody knows it."""
    product_flops: Rate
    """Matrix products, forward."""
    product_backward_flops: Rate
    """Their two products of backward."""
    attention_flops: Rate
    """Causal attention forward, 2·(D + V) a query-key pair that the mask leaves, and head."""
    attention_backward_flops: Rate
    """Backward, which is 2.5 times those."""
    full_attention_flops: Rate
    """The same of queries that see all keys, as in the hops of a ring."""
    full_attention_backward_flops: Rate
    window_attention_flops: Rate
    """The same under a window."""
    window_attention_backward_flops: Rate
    memory_bandwidth: Rate
    """The device's own memory: read and written bytes together, as sums of two tensors move them."""
    copy_bandwidth: Rate
    """Copies, or conversions to another dtype."""
    norm_bandwidth: Rate
    """RMSNorm forward: its input and output."""
    norm_backward_bandwidth: Rate
    """Backward, as if it moved twice those."""
    rotary_bandwidth: Rate
    """Rotation of queries and keys: input and output."""
    activation_bandwidth: Rate
    """Gated activation forward: three tensors of the FFN's inner width."""
    activation_backward_bandwidth: Rate
    """Backward, as if it moved twice those."""
    loss_bandwidth: Rate
    """From logits to their gradient, as if logits were moved five times in float32."""
    routing_bandwidth: Rate
    """Tokens to experts on the same device and back: four times their assignments, forward."""
    routing_backward_bandwidth: Rate
    """Backward, as if it moved twice those."""
    host_bandwidth: Rate
    """To the host's memory, and as much back at the same time."""
    node_bandwidth: Rate
    """To the other devices of a machine, in each direction."""
    exchange_bandwidth: Rate
    """The same of an all-to-all, which each device gives and gets so many bytes in."""
    network_bandwidth: Rate
    """To other machines, in each direction; each device has as much."""
    host_memory_bytes: float
    """A device's share of the host's memory."""
    host_memory_bandwidth: Rate
    """Its share of what that memory moves."""
    disk_bandwidth: Rate
    """Its share of a disk of its machine, written or read."""
    message_seconds: float
    """Before a message's first byte."""
    hidden_share: float = 1.0
    """How much of a message's time the device can compute besides: less than 1 where ranks share their cores."""
    layer_seconds: Rate | None = None
    """The host's, for one layer's operators forward and backward, where nothing hides them."""
    gradient_parameters: Rate | None = None
    """Whose gradients a micro-batch before a step's last adds up; where a profile has none, arithmetic on bytes."""
    reduction_parameters: Rate | None = None
    """Whose gradients its last micro-batch adds up and reduces over the ranks."""
    update_parameters: Rate | None = None
    """Which a step's end updates: gradients clipped, AdamW, weights gathered."""
    micro_batch_seconds: Rate | None = None
    """What a micro-batch takes beside all that: DeepSpeed's and the loop's bookkeeping."""
    step_seconds: Rate | None = None
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
        """Return the rate of this name, of this kernel where the profile has it."""
        return self.kernels.get(kernel, {}).get(name) or getattr(self, name)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
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
SIZES = {
    "product_flops": ("tokens", "width"),
    "product_backward_flops": ("tokens", "width"),
    "attention_flops": ("length", "head_dim"),
    "attention_backward_flops": ("length", "head_dim"),
    "full_attention_flops": ("length", "head_dim"),
    "full_attention_backward_flops": ("length", "head_dim"),
    "window_attention_flops": ("window", "head_dim"),
    "window_attention_backward_flops": ("window", "head_dim"),
    "memory_bandwidth": ("bytes",),
    "copy_bandwidth": ("bytes",),
    "norm_bandwidth": ("bytes",),
    "norm_backward_bandwidth": ("bytes",),
    "rotary_bandwidth": ("bytes",),
    "activation_bandwidth": ("bytes",),
    "activation_backward_bandwidth": ("bytes",),
    "loss_bandwidth": ("bytes",),
    "routing_bandwidth": ("bytes",),
    "routing_backward_bandwidth": ("bytes",),
    "host_bandwidth": (),
    "node_bandwidth": ("bytes",),
    "exchange_bandwidth": ("bytes",),
    "network_bandwidth": ("bytes",),
    "host_memory_bandwidth": (),
    "disk_bandwidth": (),
    "gradient_parameters": ("stage",),
    "reduction_parameters": ("stage",),
    "update_parameters": ("stage",),
    "layer_seconds": ("stage",),
    "micro_batch_seconds": ("stage",),
    "step_seconds": ("stage",),
}
"""The figures that may be tables, and by which sizes."""
_LIKE = {
    "product_backward_flops": "product_flops",
    "full_attention_flops": "attention_flops",
    "full_attention_backward_flops": "attention_backward_flops",
    "window_attention_flops": "attention_flops",
    "window_attention_backward_flops": "attention_backward_flops",
    "copy_bandwidth": "memory_bandwidth",
    "norm_bandwidth": "memory_bandwidth",
    "norm_backward_bandwidth": "memory_bandwidth",
    "rotary_bandwidth": "memory_bandwidth",
    "activation_bandwidth": "memory_bandwidth",
    "activation_backward_bandwidth": "memory_bandwidth",
    "loss_bandwidth": "memory_bandwidth",
    "routing_bandwidth": "memory_bandwidth",
    "routing_backward_bandwidth": "memory_bandwidth",
    "exchange_bandwidth": "node_bandwidth",
}
"""What a profile may leave out, and the figure before it that it is then like."""
_OPTIONAL = {f.name for f in dataclasses.fields(Hardware) if f.default is not dataclasses.MISSING} | set(_LIKE)
_REQUIRED = [
    f.name for f in dataclasses.fields(Hardware) if f.name not in _OPTIONAL and f.name not in ("sources", "kernels")
]


def load_hardware(given: str) -> Hardware:
    """The profile that ``--device`` names: a shipped one, ``measured``, or a file.

    ConfigError for one that is not there or wrong.
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
    """The profile of a file's values; ConfigError, which calls it ``given``, where they are no profile."""
    unknown = sorted(set(values) - {"name", "device_type", *KERNELS} - set(_FIELDS))
    missing = [name for name in _REQUIRED if name not in values]
    if unknown or missing:
        listed = [f"{name} is not known" for name in unknown] + [f"{name} is missing" for name in missing]
        raise ConfigError(f"--device {given} is no profile: {', '.join(listed)}.\nCopy a shipped one: {FOLDER}.")
    device_type = values.get("device_type", "cuda")
    if device_type not in ("cpu", "cuda"):
        raise ConfigError(f'--device {given}: device_type = {device_type!r} is neither "cpu" nor "cuda".')
    # Profiles are of GPUs where they do not say so: those were written first.
    found: dict[str, Any] = {"device_type": device_type}
    sources: dict[str, str] = {}
    for name in _FIELDS:
        if name in values:
            found[name], sources[name] = _figure(name, values[name], given)
    for name, like in _LIKE.items():
        # In the order of the fields: what another one is like has its value by then.
        found.setdefault(name, found[like])
    kernels = {kernel: _of_kernel(kernel, values[kernel], given, sources) for kernel in KERNELS if kernel in values}
    return Hardware(name=str(values["name"]), kernels=kernels, sources=sources, **found)


def _of_kernel(kernel: str, sections: Any, given: str, sources: dict[str, str]) -> dict[str, Rate]:
    """A kernel's rates, whose sources are added to ``sources``; what it leaves out is like what it has."""
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
    """A figure's value and its source."""
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
    # The figures that may be unknown, or nothing.
    return is_amount(value) or (name in ("peak_flops", "process_bytes", "ranks") and value == 0)
