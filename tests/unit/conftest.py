"""A result file of schema 1 from the first release, which must load forever, and a new file."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from iobench.results import ResultFile, read


@pytest.fixture(scope="session")
def example_path() -> Path:
    return Path(__file__).parent / "results" / "example.jsonl"


@pytest.fixture(scope="session")
def example(example_path: Path) -> ResultFile:
    return read(example_path)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A new file, open for reading and writing."""
    number = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    yield number
    os.close(number)
