"""Result files as one flat pandas table with a row per sample."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from iobench.results.codec import to_plain
from iobench.results.records import Sample
from iobench.results.result_file import ResultFile, read
from iobench.writers.transfer import LatencyFigures

if TYPE_CHECKING:
    import pandas as pd

_PARTS = (
    *("background_restores", "cold", "device", "interference", "memory", "series", "stored"),
    "verified",
)
_TIMES = ("started_at", "run_started_at")


def load(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> pd.DataFrame:
    """Return one row per sample of the file (or files) at `path`, in recorded order.

    Nested fields become columns joined by dots, with the unit last: `option.block_size`,
    `phase.sync_s`, `path.direct.bytes`, `cold.resident_fraction`, `machine.<fact>`,
    `storage.<fact>`, `workload.<fact>`. Facts that a file lacks are missing values. Computed
    columns are `bytes_per_s`, and from the run `file`, `run_status`, `workload`, `hostname` and
    `kernel`. `storage.<fact>` is of the sample's target. Times are UTC timestamps.
    docs/results.md lists every column.

    Raises ResultFileError like `read`.
    """
    import pandas as pd

    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    rows = [row for one in paths for row in _rows(read(one))]
    frame = pd.DataFrame(rows)
    for name in _TIMES:
        if name in frame:
            frame[name] = pd.to_datetime(frame[name], utc=True, format="ISO8601")
    return frame


def _rows(result: ResultFile) -> list[dict[str, Any]]:
    run = result.run
    about_run = {
        "file": str(result.path),
        "run_id": run.run_id,
        "run_started_at": run.started_at,
        "run_status": result.end.status if result.end else "killed",
        "config_hash": run.config_hash,
        "workload": run.workload.name,
        "hostname": run.environment.machine.hostname,
        "kernel": run.environment.machine.kernel,
    }
    facts = _flat(
        {"workload": to_plain(run.workload), "machine": to_plain(run.environment.machine)}
    )
    storages = {
        target: _flat({"storage": to_plain(run.environment.storage_of(target))})
        for target in {sample.axes.target for sample in result.samples}
    }
    return [
        about_run | _row(sample) | facts | storages[sample.axes.target] for sample in result.samples
    ]


def _row(sample: Sample) -> dict[str, Any]:
    row: dict[str, Any] = to_plain(sample)
    paths, phases, options = row.pop("paths"), row.pop("phases_s"), row.pop("options")
    decisions, _ = row.pop("decisions"), row.pop("latencies", None)
    latencies = {name: to_plain(LatencyFigures.of(one)) for name, one in sample.latencies.items()}
    row["bytes_per_s"] = sample.bytes / sample.elapsed_s
    row["notes"] = "; ".join(sample.notes)
    row["fallbacks"] = "; ".join(
        f"{one.wanted} -> {one.used}: {one.reason}" for one in sample.fallbacks
    )
    row |= {f"phase.{name}_s": seconds for name, seconds in phases.items()}
    # A part that is null gets no column.
    parts = {name: row.pop(name, None) or {} for name in _PARTS}
    return row | _flat(
        {"path": paths, "decision": decisions, "latency": latencies, "option": options} | parts
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings, joining keys by dots; lists are unchanged."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
