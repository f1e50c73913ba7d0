"""TestTarget: where the files of one check are, seen without the writer under test."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["Directory", "TestTarget"]

_FUSE_RELEASES_WITHIN_S = 10.0


class TestTarget(Protocol):
    """An empty target of its own for each check. Implement it for targets that are no directory."""

    @property
    def target(self) -> str:
        """What a writer's `write`, `read` and `available` are given."""

    def locate(self, name: str) -> str:
        """What a writer's `open` is given for the file `name`."""

    def stored(self, name: str) -> bytes | None:
        """The bytes under `name`; None when nothing is there."""

    def put(self, name: str, data: bytes) -> None:
        """Have exactly `data` under `name`."""

    def names(self) -> set[str]:
        """Every name in the target, hidden and temporary ones too, but not those of directories."""


# pytest collects imported classes whose name begins with Test, and warns of this one. Set here, as
# an attribute in the body would be a member of the protocol.
TestTarget.__test__ = False  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Directory:
    """A directory of a mounted file system; made when it is missing."""

    path: Path

    def __post_init__(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    @property
    def target(self) -> str:
        return str(self.path)

    def locate(self, name: str) -> str:
        return str(self.path / name)

    def stored(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        (self.path / name).write_bytes(data)

    def names(self) -> set[str]:
        """See `TestTarget`. On FUSE, a replaced file that was open stays until after its close.

        The kernel does not wait for the file system to answer its RELEASE; until then libfuse keeps
        the file as `.fuse_hidden...`. Those are waited for, and told if they stay.
        """
        until = time.monotonic() + _FUSE_RELEASES_WITHIN_S
        while _is_hidden_by_fuse(found := self._names()) and time.monotonic() < until:
            time.sleep(0.01)
        return found

    def _names(self) -> set[str]:
        found = (path for path in self.path.rglob("*") if not path.is_dir())
        return {str(path.relative_to(self.path)) for path in found}


def _is_hidden_by_fuse(names: set[str]) -> bool:
    return any(Path(name).name.startswith(".fuse_hidden") for name in names)
