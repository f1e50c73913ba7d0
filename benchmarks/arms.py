"""Arms: what a benchmark script compares, in rounds of random order, as JSON Lines if asked for.

The first line says what ran where (`kind` is `benchmark`), each further line is one sample:

    {"schema": "iobench.benchmark/1", "kind": "benchmark", "name": "dcp", "command": [...], ...}
    {"schema": "iobench.benchmark/1", "kind": "sample", "round": 0, "arm": "save odirect", ...}

A sample has `elapsed_s`, and `bytes`, `files`, `cpu_s` or `removal_s` where the script knows them.
`python benchmarks/tables.py FILE` makes the table.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from iobench.bench.targets.directory import scratch_directory
from iobench.environment import describe_machine, describe_storage
from iobench.errors import ResultFileError
from iobench.results import to_plain, utc_now
from iobench.results.file import RecordFile, records
from iobench.stats.comparison import LEAST_FLOOR, Comparison
from iobench.stats.estimates import paired_log_ratio
from iobench.units import GIB, MIB

SCHEMA = "iobench.benchmark/1"
KINDS = {"benchmark": dict, "sample": dict}
Sample = Mapping[str, Any]
_Arm = TypeVar("_Arm")


def options(text: str | None, *, rounds: int = 5) -> argparse.ArgumentParser:
    """Return a parser of what all scripts take: `--target`, `--rounds` and `--record`."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="a new JSON Lines file for every sample"
    )
    return parser


def in_rounds(arms: Iterable[_Arm], rounds: int) -> Iterator[tuple[int, _Arm]]:
    """Yield (round, arm): every arm once a round, in random order."""
    every = list(arms)
    for turn in range(rounds):
        for arm in random.sample(every, len(every)):
            yield turn, arm


def fill(memory: NDArray[np.uint8], seed: int) -> None:
    """Fill the memory with random bytes."""
    chance = np.random.Generator(np.random.SFC64(seed))
    for start in range(0, len(memory), 64 * MIB):
        part = memory[start : start + 64 * MIB]
        part[:] = np.frombuffer(chance.bytes(len(part)), dtype=np.uint8)


class Record:
    """Samples by arm, and a new file that gets each as it comes; without a path, no file.

    Raises ResultFileError: a record is never overwritten.
    """

    def __init__(self, path: Path | None, *, target: Path) -> None:
        self.samples: dict[str, list[Sample]] = {}
        self._file = None if path is None else RecordFile.create(path)
        if path is None:
            return
        script = Path(sys.argv[0])
        self._append(
            kind="benchmark",
            name=script.stem,
            started_at=utc_now(),
            command=["python", f"benchmarks/{script.name}", *sys.argv[1:]],
            environment=to_plain(
                {"machine": describe_machine(), "storage": describe_storage(target)}
            ),
        )

    def sample(self, arm: str, turn: int, elapsed_s: float, **figures: float) -> None:
        """One timed operation of `arm` in round `turn`; figures are named with their unit."""
        one = {"round": turn, "arm": arm, "elapsed_s": elapsed_s, **figures}
        self.samples.setdefault(arm, []).append(one)
        self._append(kind="sample", **one)

    def seconds(self, arm: str) -> list[float]:
        """The times of `arm`, by round."""
        return [one["elapsed_s"] for one in self.samples[arm]]

    def print_table(self) -> None:
        print(table(self.samples), end="")

    def ratio(self, base: str, arm: str) -> tuple[str, str, str]:
        """How many times as fast as `base` an arm is: the ratio of pairs, its interval, and the
        finding."""
        ratio = paired_log_ratio(self.seconds(base), self.seconds(arm))
        held, finding = ratio.interval, Comparison(ratio=ratio, floor=LEAST_FLOOR).finding
        interval = f"{held.low:.3f} to {held.high:.3f}" if held else "-"
        return f"{ratio.ratio:.3f}", interval, str(finding)

    def _append(self, **values: Any) -> None:
        if self._file is not None:
            self._file.append({"schema": SCHEMA, **values})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def read(path: Path) -> tuple[Sample, dict[str, list[Sample]]]:
    """The header's values of the record at `path`, and the samples of each arm, in order.

    Raises ResultFileError for a file of another kind.
    """
    lines = [values for _, values in records(path, SCHEMA, KINDS)]
    if not lines or lines[0]["kind"] != "benchmark":
        raise ResultFileError(f"{path}: begins with no benchmark; give a file of --record")
    arms: dict[str, list[Sample]] = {}
    for sample in lines[1:]:
        arms.setdefault(sample["arm"], []).append(sample)
    return lines[0], arms


@contextmanager
def recording(asked: argparse.Namespace) -> Iterator[tuple[Path, Record]]:
    """Yield a directory in the target, which is removed, and the record."""
    with (
        scratch_directory(asked.target) as scratch,
        Record(asked.record, target=asked.target) as kept,
    ):
        yield scratch, kept


# Tables.


def table(found: Mapping[str, Sequence[Sample]]) -> str:
    """A row per arm, by its first word, which is the operation, then the quickest first."""
    every = [one for samples in found.values() for one in samples]
    columns = [
        (name, cell)
        for name, keys, cell in _COLUMNS
        if all(sample.keys() >= {*keys.split()} for sample in every)
        and not (name == "CPU s/GiB" and "tensors" in every[0])  # by tensor then
    ]
    order = sorted(found, key=lambda name: (name.split()[0], _elapsed_s(found[name])))
    rows = ([name, *(cell(found[name]) for _, cell in columns)] for name in order)
    return "".join(markdown(["arm", *(name for name, _ in columns)], rows))


def markdown(
    head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---:"
) -> Iterator[str]:
    """Yield the lines of a table; `align` is that of all columns but the first."""
    yield from (f"| {' | '.join(one)} |\n" for one in (head, ["---", *[align] * (len(head) - 1)]))
    yield from (f"| {' | '.join(cells)} |\n" for cells in rows)


_Value = Callable[[Sample], float]
_Cell = Callable[[Sequence[Sample]], str]


def _median(form: str, value: _Value) -> _Cell:
    return lambda samples: form.format(statistics.median(map(value, samples)))


def _range(form: str, value: _Value) -> _Cell:
    return lambda samples: " - ".join(form.format(end(map(value, samples))) for end in (min, max))


def _elapsed_s(samples: Sequence[Sample]) -> float:
    return statistics.median(one["elapsed_s"] for one in samples)


def _rate(one: Sample) -> float:
    return float(one["bytes"] / one["elapsed_s"] / GIB)


def _file_rate(one: Sample) -> float:
    return float(one["files"] / one["elapsed_s"])


def _per_tensor(key: str) -> _Cell:
    return _median("{:.1f}", lambda one: one[key] / one["tensors"] * 1e6)


_COLUMNS: Sequence[tuple[str, str, _Cell]] = (
    ("rate", "bytes", _median("{:.2f} GiB/s", _rate)),
    ("slowest - fastest", "bytes", _range("{:.2f}", _rate)),
    ("rate", "files", _median("{:.0f} files/s", _file_rate)),
    ("slowest - fastest", "files", _range("{:.0f}", _file_rate)),
    ("median time", "elapsed_s", _median("{:.3f} s", lambda one: one["elapsed_s"])),
    ("rounds", "elapsed_s", lambda samples: str(len(samples))),
    ("CPU s/GiB", "bytes cpu_s", _median("{:.2f}", lambda o: o["cpu_s"] / (o["bytes"] / GIB))),
    ("removal", "removal_s", _median("{:.3f} s", lambda one: one["removal_s"])),
    ("us/tensor", "tensors", _per_tensor("elapsed_s")),
    ("CPU us/tensor", "tensors cpu_s", _per_tensor("cpu_s")),
    ("CPU us/tensor, caller", "tensors caller_cpu_s", _per_tensor("caller_cpu_s")),
)
"""Each with the keys that all samples need for it."""
