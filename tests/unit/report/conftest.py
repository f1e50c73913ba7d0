"""The example result file of the schema's own tests, read once."""

from pathlib import Path

import pytest
from support.terminal import Terminal

from iobench.results import ResultFile, read


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 80 columns without colours."""
    for name, value in (("COLUMNS", "80"), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    return Terminal()


@pytest.fixture(scope="session")
def example_path() -> Path:
    return Path(__file__).parents[1] / "results" / "example.jsonl"


@pytest.fixture(scope="session")
def example(example_path: Path) -> ResultFile:
    return read(example_path)
