"""Runs with all charts."""

from pathlib import Path

import pytest

from iobench.report.page.page import Page
from iobench.report.page.rows import Measured
from iobench.report.page.run_page import run_page
from iobench.results import ResultFile, read


@pytest.fixture(scope="session")
def recorded() -> ResultFile:
    """A whole run with series and ceilings."""
    return read(Path(__file__).parents[4] / "results" / "reference-llama7b.jsonl")


@pytest.fixture(scope="session")
def old() -> ResultFile:
    """A run of an earlier version, without series."""
    return read(Path(__file__).parents[2] / "results" / "recorded.jsonl")


@pytest.fixture(scope="session")
def measured(recorded: ResultFile) -> Measured:
    return Measured.of(recorded)


@pytest.fixture(scope="session")
def page(recorded: ResultFile) -> Page:
    return run_page([recorded])
