"""Runs with all charts."""

from dataclasses import replace
from pathlib import Path

import pytest

from iobench.report.charts.run import Measured
from iobench.report.document import Document
from iobench.report.run import run_document
from iobench.results import MemoryUse, ResultFile, read
from iobench.units import MIB


@pytest.fixture(scope="session")
def recorded() -> ResultFile:
    """A whole run with series, memory and ceilings."""
    result = read(Path(__file__).parents[4] / "results" / "reference-llama7b.jsonl")
    used = MemoryUse(process_bytes=32 * MIB, page_cache_bytes=0)
    return replace(result, samples=tuple(replace(one, memory=used) for one in result.samples))


@pytest.fixture(scope="session")
def old() -> ResultFile:
    """A run of an earlier version, without series and memory."""
    return read(Path(__file__).parents[2] / "results" / "recorded.jsonl")


@pytest.fixture(scope="session")
def measured(recorded: ResultFile) -> Measured:
    return Measured.of(recorded)


@pytest.fixture(scope="session")
def page(recorded: ResultFile) -> Document:
    return run_document(recorded)
