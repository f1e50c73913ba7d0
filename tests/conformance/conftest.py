"""The file systems of the conformance tests."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from iobench.units import MIB


@pytest.fixture
def mounted(request: pytest.FixtureRequest, shared_filesystems, tmp_path: Path) -> Path:
    """An empty directory on a file system of the kind that the test asks for. All tests share the
    file systems."""
    return _directory(request.param, shared_filesystems, tmp_path)


@pytest.fixture
def on_ext4(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An empty directory on ext4 in memory, where syncs cost nothing; without root `tmp_path`."""
    if os.geteuid() != 0:
        return tmp_path
    return _directory("ext4", request.getfixturevalue("shared_filesystems"), tmp_path)


def _directory(kind: str, make: Callable[..., Path], tmp_path: Path) -> Path:
    directory = _mounted(kind, make) / tmp_path.name
    directory.mkdir()
    return directory


_roots: dict[str, Path] = {}


def _mounted(kind: str, make: Callable[..., Path]) -> Path:
    if kind not in _roots:
        _roots[kind] = make(kind, 1024 * MIB)
    return _roots[kind]
