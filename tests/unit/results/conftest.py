"""A result file of schema 1 as the first release wrote it; it must load for ever."""

from pathlib import Path

import pytest

from iobench.results import ResultFile, read


@pytest.fixture(scope="session")
def example_path() -> Path:
    return Path(__file__).with_name("example.jsonl")


@pytest.fixture(scope="session")
def example(example_path: Path) -> ResultFile:
    return read(example_path)
