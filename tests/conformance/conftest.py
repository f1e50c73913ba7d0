"""The file systems of the conformance tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from iobench.units import MIB

_KINDS = ("tmpfs", "ext4", "xfs", "btrfs", "overlay", "fuse")


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.root) for kind in _KINDS])
def mounted(request: pytest.FixtureRequest, shared_filesystems, tmp_path: Path) -> Path:
    """An empty directory on a file system of each kind. All tests share the file systems."""
    root = _mounted(request.param, shared_filesystems)
    directory = root / tmp_path.name
    directory.mkdir()
    return directory


_roots: dict[str, Path] = {}


def _mounted(kind: str, make) -> Path:
    if kind not in _roots:
        _roots[kind] = make(kind, 1024 * MIB)
    return _roots[kind]
