"""The example result file of the schema's own tests, read once."""

from pathlib import Path

import pytest

from iobench.results import ResultFile, read


@pytest.fixture(scope="session")
def example() -> ResultFile:
    return read(Path(__file__).parent / "results" / "example.jsonl")
