"""Record: the samples of a benchmark script as JSON Lines, for `--record FILE`.

The first line says what ran where (`kind` is `benchmark`), each further line is one sample:

    {"schema": "iobench.benchmark/1", "kind": "benchmark", "name": "dcp", "command": [...], ...}
    {"schema": "iobench.benchmark/1", "kind": "sample", "round": 0, "arm": "save odirect", ...}

A sample has `elapsed_s`, and `bytes`, `files`, `cpu_s` or `removal_s` where the script knows them.
`python benchmarks/tables.py FILE` makes the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from iobench.environment.machine import describe_environment
from iobench.errors import ResultFileError
from iobench.results import utc_now
from iobench.results.file import RecordFile, records

SCHEMA = "iobench.benchmark/1"
KINDS = {"benchmark": dict, "sample": dict}


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="a new JSON Lines file for every sample"
    )


class Record:
    """Writes the samples to a new file as they come; without a path, nowhere.

    Raises ResultFileError: a record is never overwritten.
    """

    def __init__(self, path: Path | None, *, target: Path) -> None:
        self._file = None if path is None else RecordFile.create(path)
        if path is None:
            return
        script = Path(sys.argv[0])
        self._append(
            kind="benchmark",
            name=script.stem,
            started_at=utc_now(),
            command=["python", f"benchmarks/{script.name}", *sys.argv[1:]],
            environment=describe_environment(target),
        )

    def sample(self, arm: str, turn: int, elapsed_s: float, **figures: float) -> None:
        """One timed operation of `arm` in round `turn`; figures are named with their unit."""
        self._append(kind="sample", round=turn, arm=arm, elapsed_s=elapsed_s, **figures)

    def _append(self, **values: Any) -> None:
        if self._file is not None:
            self._file.append({"schema": SCHEMA, **values})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What `read` found: the header's values, and the samples of each arm, in order."""

    header: Mapping[str, Any]
    arms: Mapping[str, Sequence[Mapping[str, Any]]]


def read(path: Path) -> Recorded:
    """The record at `path`. Raises ResultFileError for a file of another kind."""
    lines = [values for _, values in records(path, SCHEMA, KINDS)]
    if not lines or lines[0]["kind"] != "benchmark":
        raise ResultFileError(f"{path}: begins with no benchmark; give a file of --record")
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for sample in lines[1:]:
        arms.setdefault(sample["arm"], []).append(sample)
    return Recorded(header=lines[0], arms=arms)
