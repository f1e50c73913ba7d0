"""Every writer of files meets every fault, and nothing may be left open or running after it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from iobench.testing import Footprint
from iobench.writers import registry
from iobench.writers.base import Writer

_WRITERS = {
    "buffered": {"threads": 2},
    "uncached": {"threads": 2},
    "odirect": {"threads": 2},
    "uring": {"rings": 2, "iodepth": 4},
    "hybrid": {"threads": 2, "small_size": "16KiB"},
    "aiofiles": {"iodepth": 2, "fallocate": True},
}
"""The settings with which small blocks are moved by two workers."""


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with Footprint.unchanged():
        yield


@pytest.fixture(params=_WRITERS)
def name(request: pytest.FixtureRequest) -> str:
    """Each writer that stores files."""
    return request.param


@pytest.fixture
def settings(name: str) -> str:
    """The same for a child process: the options as JSON."""
    return json.dumps({"block_size": "64KiB", **_WRITERS[name]})


@pytest.fixture
def make(name: str) -> Callable[..., Writer]:
    """Makes that writer, perhaps with other options too; skips where it cannot work."""

    def made(directory: Path, **options: object) -> Writer:
        writer = registry.make(name, **{"block_size": "64KiB", **_WRITERS[name], **options})
        answer = writer.available(directory)
        if not answer.ok:
            pytest.skip(f"{answer.reason} {answer.remedy}")
        return writer

    return made


@pytest.fixture
def names() -> Callable[[Path], set[str]]:
    """The names in a directory, hidden ones too, `lost+found` not."""
    return lambda directory: set(os.listdir(directory)) - {"lost+found"}
