"""The options of ``data build`` that say who does the work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from launcher.cli.console import note
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from data_pipeline.prepare.parts.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who does the work."""

    workers: int | None = None
    """Cores to use, all unless given, of this machine or of the cluster; each takes about 0.5 GB. The result does not
    depend on it."""
    engine: Literal["local", "ray"] = "local"
    """local: processes of this machine. ray: workers all over a Ray cluster, whose nodes share the source's and the
    output's file systems."""
    ray_address: Annotated[str | None, arg(metavar="ADDRESS")] = None
    """HOST:PORT of the cluster's head, or "auto". Unless given, RAY_ADDRESS, else a cluster that this machine belongs
    to, else this machine alone."""

    @contextlib.contextmanager
    def hired(self) -> Iterator[Engine]:
        """Yield the engine; a cluster stays connected until the block ends."""
        # Before anything is hashed: a cluster that does not answer is known at once.
        if self.engine == "ray":
            from data_pipeline.prepare.parts.cluster import open_cluster

            with open_cluster(self.ray_address, say=note) as engine:
                yield engine
            return
        if self.ray_address is not None:
            raise ConfigError("--ray-address says where a Ray cluster is: it needs --engine ray.")
        from data_pipeline.prepare.parts.pool import LocalEngine

        yield LocalEngine()
