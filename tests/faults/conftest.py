"""Every writer of files meets every fault, and nothing may be left open or running after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from iobench.testing import Footprint
from iobench.writers import registry
from iobench.writers.base import Writer

_SMALL = {"block_size": "64KiB", "threads": "2"}
_WRITERS = {
    "buffered": _SMALL,
    "uncached": _SMALL,
    "odirect": _SMALL,
    "uring": {"block_size": "64KiB", "rings": "2", "iodepth": "4"},
}


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with Footprint.unchanged():
        yield


@pytest.fixture(params=_WRITERS)
def name(request: pytest.FixtureRequest) -> str:
    """Each writer that stores files."""
    return request.param


@pytest.fixture
def spec(name: str) -> str:
    """The writer with small blocks and two workers, as `--writer` takes it."""
    return ",".join([name, *(f"{key}={value}" for key, value in _WRITERS[name].items())])


@pytest.fixture
def make(name: str) -> Callable[..., Writer]:
    """Makes that writer, perhaps with other options too; skips where it cannot work."""

    def made(directory: Path, **options: object) -> Writer:
        writer = registry.make(name, **{**_WRITERS[name], **options})
        answer = writer.available(directory)
        if not answer.ok:
            pytest.skip(f"{answer.reason} {answer.remedy}")
        return writer

    return made


@pytest.fixture
def names() -> Callable[[Path], set[str]]:
    """The names in a directory, hidden ones too, `lost+found` not."""
    return lambda directory: set(os.listdir(directory)) - {"lost+found"}
