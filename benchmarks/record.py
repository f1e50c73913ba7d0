"""Record: the samples of a benchmark script as JSON Lines, for `--record FILE`.

The first line says what ran where (`kind` is `benchmark`), each further line is one sample:

    {"schema": "iobench.benchmark/1", "kind": "benchmark", "name": "dcp", "command": [...], ...}
    {"schema": "iobench.benchmark/1", "kind": "sample", "round": 0, "arm": "save odirect", ...}

A sample has `elapsed_s`, and `bytes`, `files`, `cpu_s` or `removal_s` where the script knows them.
`python benchmarks/tables.py FILE` makes the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iobench.environment.machine import describe_environment
from iobench.results import utc_now

SCHEMA = "iobench.benchmark/1"


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="a new JSON Lines file for every sample"
    )


class Record(ExitStack):
    """Writes the samples to a new file as they come; without a path, nowhere.

    Each line is handed to the system at once, so that a killed run loses no sample. Raises
    FileExistsError: a record is never overwritten.
    """

    def __init__(self, path: Path | None, *, target: Path) -> None:
        super().__init__()
        self._file = None
        if path is None:
            return
        script = Path(sys.argv[0])
        header = {
            "kind": "benchmark",
            "name": script.stem,
            "started_at": utc_now(),
            "command": ["python", f"benchmarks/{script.name}", *sys.argv[1:]],
            "environment": describe_environment(target),
        }
        self._file = self.enter_context(path.open("x", encoding="ascii"))
        self._append(header)

    def sample(self, arm: str, turn: int, elapsed_s: float, **figures: float) -> None:
        """One timed operation of `arm` in round `turn`; figures are named with their unit."""
        if self._file is not None:
            self._append(
                {"kind": "sample", "round": turn, "arm": arm, "elapsed_s": elapsed_s, **figures}
            )

    def _append(self, values: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps({"schema": SCHEMA, **values}, allow_nan=False) + "\n")
        self._file.flush()


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What `read` found: the header's values, and the samples of each arm, in order."""

    header: Mapping[str, Any]
    arms: Mapping[str, Sequence[Mapping[str, Any]]]


def read(path: Path) -> Recorded:
    """The record at `path`. Raises ValueError for a file of another kind."""
    lines = list(_lines(path))
    if not lines or lines[0]["kind"] != "benchmark":
        raise ValueError(f"{path}: begins with no benchmark; give a file of --record")
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for sample in lines[1:]:
        arms.setdefault(sample["arm"], []).append(sample)
    return Recorded(header=lines[0], arms=arms)


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(path.read_text(encoding="ascii").splitlines(), 1):
        values = json.loads(line)
        if values.get("schema") != SCHEMA:
            raise ValueError(f"{path}, line {number}: not of the schema {SCHEMA}")
        yield values
