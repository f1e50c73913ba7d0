"""A result file of schema 1 from the first release; it must load forever."""

from pathlib import Path

import pytest

from iobench.results import ResultFile, read


@pytest.fixture(scope="session")
def example_path() -> Path:
    return Path(__file__).with_name("example.jsonl")


@pytest.fixture(scope="session")
def example(example_path: Path) -> ResultFile:
    return read(example_path)
