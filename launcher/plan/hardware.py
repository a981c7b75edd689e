"""``Hardware``: how fast a device and its links are. Shipped for a few GPUs, each figure with its source."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.wording import did_you_mean
from longctx.errors import ConfigError

_FOLDER = Path(__file__).parent / "profiles"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates that one device attains, not those of a data sheet: bytes and FLOPs a second."""

    name: str
    memory_bytes: float
    """What a run may fill of a device's memory."""
    peak_flops: float
    """Of the data sheet: what MFU is a share of; 0 where nobody knows it."""
    product_flops: float
    """Large matrix products in the run's dtype."""
    attention_flops: float
    """Attention forward, 2·(D + V) a query-key pair that the mask leaves, and head."""
    attention_backward_flops: float
    """Backward, which is 2.5 times those."""
    memory_bandwidth: float
    """The device's own memory: read and written bytes together."""
    host_bandwidth: float
    """To the host's memory, and as much back at the same time."""
    node_bandwidth: float
    """To the other devices of a machine, in each direction."""
    network_bandwidth: float
    """To other machines, in each direction; each device has as much."""
    host_memory_bytes: float
    """A device's share of the host's memory."""
    host_memory_bandwidth: float
    """Its share of what that memory moves."""
    disk_bandwidth: float
    """Its share of a disk of its machine, written or read."""
    message_seconds: float
    """Before a message's first byte."""
    sources: dict[str, str]
    """Where each figure comes from."""


def load_hardware(given: str) -> Hardware:
    """The profile that ``--device`` names: a shipped one, or a file; ConfigError for one that is neither or wrong."""
    known = {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}
    path = known.get(given, Path(given))
    if not path.is_file():
        question = did_you_mean(given, list(known), most=1)
        raise ConfigError(
            f"--device {given} is neither a profile nor a file of one.{question}\nProfiles: {', '.join(known)}."
        )
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--device {given} cannot be read: {error}") from error
    return _from_values(values, given)


def _from_values(values: dict[str, Any], given: str) -> Hardware:
    figures = [f.name for f in dataclasses.fields(Hardware) if f.name not in ("name", "sources")]
    unknown = sorted(set(values) - {"name", *figures})
    missing = [name for name in ("name", *figures) if name not in values]
    if unknown or missing:
        listed = [f"{name} is not known" for name in unknown] + [f"{name} is missing" for name in missing]
        raise ConfigError(f"--device {given} is no profile: {', '.join(listed)}.\nCopy a shipped one: {_FOLDER}.")
    found, sources = {}, {}
    for name in figures:
        figure = values[name]
        if not isinstance(figure, dict) or not _is_rate(figure.get("value"), name) or not figure.get("source"):
            raise ConfigError(
                f"--device {given}: {name} is {figure!r}; it must have a value above 0 and a source.\n"
                f'Write [{name}], value = 1e12, source = "where it comes from".'
            )
        found[name], sources[name] = float(figure["value"]), str(figure["source"])
    return Hardware(name=str(values["name"]), sources=sources, **found)


def _is_rate(value: Any, name: str) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    # The one figure that may be unknown.
    return 0 < value < float("inf") or (name == "peak_flops" and value == 0)
