"""Journals of tunings of a simulated storage."""

import json
from functools import cache
from pathlib import Path

from iobench.environment import Machine, Storage
from iobench.environment.machine import Cpu
from iobench.environment.memory import MachineMemory
from iobench.results.codec import to_plain
from iobench.tune.journal import SCHEMA, TrialRecord, TuningRecord, TuningRequest
from iobench.tune.objective import Measurement, Step
from iobench.tune.outcome import Outcome
from iobench.tune.space import Candidate
from iobench.units import GIB
from support.simulated_storage import SimulatedStorage, space_of_writers

HEADER = TuningRecord(
    started_at="2026-01-01T00:00:00Z",
    command=("iobench", "autotune", "llama7b"),
    iobench="0.1.0",
    asked=TuningRequest(
        workload="llama7b", target="/mnt", max_s=180.0, max_bytes=60 * GIB, largest_bytes=GIB
    ),
    machine=Machine(
        hostname="node1",
        fingerprint="ba9876543210",
        kernel="6.18",
        cpu=Cpu(model="Example CPU", usable_cpus=16),
        memory=MachineMemory(total_bytes=64 * GIB),
    ),
    storage=Storage(path="/mnt", kind="local", fs_type="ext4", source="/dev/vda"),
    fingerprint="0123456789ab",
)


def tuned(storage: SimulatedStorage) -> tuple[Outcome, list[TrialRecord]]:
    """Run a tuning, and return its outcome and the trials of its journal."""
    trials: list[TrialRecord] = []

    def measure(candidate: Candidate, step: Step) -> Measurement:
        measured = storage(candidate, step)
        trials.append(TrialRecord.of(candidate, step, measured))
        return measured

    return storage.tuner(space_of_writers(), measure=measure).run(), trials


def write_journal(path: Path) -> Path:
    """Write the journal of a finished tuning, always the same one."""
    path.write_text(_text())
    return path


@cache
def _text() -> str:
    _, trials = tuned(SimulatedStorage(seed=3))
    lines = [{"schema": SCHEMA, "kind": one.kind, **to_plain(one)} for one in (HEADER, *trials)]
    return "".join(f"{json.dumps(one)}\n" for one in lines)
