"""TiersFile: the tiers of a Checkpointer as a TOML file, for measurements."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iobench.checkpoint.option_check import check_slots
from iobench.errors import OptionError, TargetError, transfer_errors
from iobench.tiers.given import AnyTier
from iobench.tiers.local import Local
from iobench.tiers.memory import Memory
from iobench.tiers.paced import Paced
from iobench.tiers.placement import Placement
from iobench.tiers.remote import Remote
from iobench.writers.registry import make
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.target import S3Target, is_s3

__all__ = ["TiersFile"]

_PACE = ("rate", "latency")
_KEYS: dict[str, tuple[str, ...]] = {
    "memory": ("size", "node", "path", *_PACE),
    "local": _PACE,
    "remote": (
        *("location", "writer", "bandwidth_limit"),
        *("max_lag", "max_lag_size", "on_lag", "every_save"),
    ),
    "placement": ("goal", "separations", "dwell", "probe_every"),
}


@dataclass(frozen=True, kw_only=True)
class TiersFile:
    """What the file says: `[[memory]]`, `[local]`, `[remote]`, `[placement]`, and `on_full`.

    Keys are those of Memory, Paced, Remote and Placement. `rate` and `latency` make a Paced tier.
    """

    tables: Mapping[str, Any]
    on_full: str = "wait"
    memories: tuple[AnyTier, ...] = ()
    local: AnyTier | None = None
    remote: Remote | None = None
    placement: Placement | None = None

    @classmethod
    def read(cls, path: Path) -> TiersFile:
        """Read a file. Raises TargetError if it cannot be read, OptionError for what it has."""
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise TargetError(f"{path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise OptionError(f"{path}: not a TOML file ({error})") from error
        try:
            return cls._of(document)
        except (OptionError, TypeError) as error:
            raise OptionError(f"{path}: {error}") from error

    @classmethod
    def _of(cls, document: dict[str, Any]) -> TiersFile:
        _only("the file", document, (*_KEYS, "on_full"))
        on_full = document.get("on_full", "wait")
        check_slots(1, on_full)
        tables = document.get("memory", [])
        if not isinstance(tables, list):
            raise OptionError("memory: write [[memory]], there may be several")
        for name, keys in _KEYS.items():
            for table in tables if name == "memory" else [document.get(name, {})]:
                if not isinstance(table, dict):
                    raise OptionError(f"{name}: must be a table")
                _only(f"[{name}]", table, keys)
        remote, placement = document.get("remote"), document.get("placement")
        return cls(
            tables=document,
            on_full=on_full,
            memories=tuple(_paced(Memory, table) for table in tables),
            local=_paced(Local, document["local"]) if "local" in document else None,
            remote=None if remote is None else Remote(**remote),
            placement=None if placement is None else Placement(**placement),
        )

    @property
    def memory_bytes(self) -> int:
        """The sizes of all memory tiers."""
        plain = [one.tier if isinstance(one, Paced) else one for one in self.memories]
        return sum(one.size_bytes for one in plain if isinstance(one, Memory))

    @contextmanager
    def options(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the options of a Checkpointer whose remote tier is `name` below the location.

        The checkpoints there are removed afterwards.
        """
        tiers = [*self.memories, *([self.local] if self.local is not None else [])]
        if self.remote is None:
            yield self._given(tiers)
            return
        where = f"{str(self.remote.location).rstrip('/')}/{name}"
        try:
            yield self._given([*tiers, Remote(**{**self.tables["remote"], "location": where})])
        finally:
            _remove(where)

    def _given(self, tiers: list[AnyTier]) -> dict[str, Any]:
        return {"tiers": tiers, "on_full": self.on_full, "placement": self.placement}


def _only(where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = [key for key in table if key not in known]
    if unknown:
        raise OptionError(f"{where} has {', '.join(unknown)}; known are {', '.join(known)}")


def _paced(kind: type[Memory] | type[Local], table: Mapping[str, Any]) -> AnyTier:
    tier = kind(**{key: value for key, value in table.items() if key not in _PACE})
    pace = {key: value for key, value in table.items() if key in _PACE}
    return Paced(tier, **pace) if pace else tier


def _remove(where: str) -> None:
    """Remove all that is below a location of this measurement."""
    if not is_s3(where):
        with transfer_errors("removing", where):
            shutil.rmtree(where, ignore_errors=not Path(where).exists())
        return
    from iobench.writers.s3 import S3Writer

    writer = make("s3")
    assert isinstance(writer, S3Writer)
    try:
        S3Objects(writer.client, S3Target.parse(where)).remove()
    finally:
        writer.client.close()
