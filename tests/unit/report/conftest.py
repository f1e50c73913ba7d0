"""The example result file of the schema's own tests, read once."""

from pathlib import Path

import pytest

from iobench.results import ResultFile, read


@pytest.fixture(scope="session")
def example_path() -> Path:
    return Path(__file__).parents[1] / "results" / "example.jsonl"


@pytest.fixture(scope="session")
def example(example_path: Path) -> ResultFile:
    return read(example_path)
