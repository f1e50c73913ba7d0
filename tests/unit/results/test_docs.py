"""docs/results.md names every field of every record, and no other."""

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from iobench.bench.judging.ceiling import Ceiling
from iobench.environment import Machine, Storage
from iobench.report.winners import Summary, Winner
from iobench.results import CeilingSample, End, Failure, Run, Sample
from iobench.writers.transfer import Fallback, PathCount

DOCS = Path(__file__).parents[3] / "docs" / "results.md"
COMMON = {"run_id"}  # documented once, for all records


def fields(kind: Any) -> set[str]:
    """Names as in the tables: those of nested records are joined by a dot."""
    names = set()
    for name, hint in get_type_hints(kind).items():
        if name not in {field.name for field in dataclasses.fields(kind)}:
            continue
        if getattr(hint, "flattened", False):
            names |= fields(hint)
            continue
        inner = [hint, *get_args(hint)]
        nested = [one for one in inner if dataclasses.is_dataclass(one)]
        if nested and nested[0] not in (Fallback, PathCount, Machine, Storage):
            names |= {f"{name}.{below}" for below in fields(nested[0])}
            names |= {name} if len(inner) > 1 else set()
        else:
            names.add(name)
    return names


def documented(heading: str) -> set[str]:
    """The names in the first column of the table below the line with `heading`."""
    text = DOCS.read_text().split(heading, 1)[1]
    table = re.search(r"(?:^\|.*\n)+", text[text.index("\n|") + 1 :], re.MULTILINE)
    assert table is not None
    rows = [line.split("|")[1] for line in table[0].splitlines()]
    return {name for row in rows for name in re.findall(r"`([a-z0-9_.]+)`", row)}


@pytest.mark.parametrize(
    ("kind", "heading"),
    [
        (Run, "## `run`"),
        (Sample, "## `sample`"),
        (CeilingSample, "## `ceiling`"),
        (Failure, "## `failure`"),
        (End, "## `end`"),
    ],
)
def test_every_field_of_a_record_is_documented(kind: Any, heading: str) -> None:
    assert documented(heading) - COMMON == fields(kind) - COMMON


@pytest.mark.parametrize(
    ("kind", "header"),
    [
        (Ceiling, "| field of `ceiling`"),
        (Summary, "| field of a summary"),
        (Winner, "| field of `winners`"),
    ],
)
def test_every_field_of_the_report_is_documented(kind: Any, header: str) -> None:
    assert documented(header) == fields(kind)
