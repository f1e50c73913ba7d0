"""Rules: the run rules of a published benchmark, and what a run did not keep of them.

`mlperf` are those of MLPerf Storage v3.0 for checkpointing: Rules.md, section 4, of
github.com/mlcommons/storage at commit 0366ccf, after the release v3.0 of September 2026. They are
about submissions, which only its own tool `mlpstorage` can make: the rules about directories, logs
and descriptions of systems have no meaning here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from iobench.bench.judging.verdict import RESIDENT_LIMIT
from iobench.errors import UnknownNameError
from iobench.results.records import Run, Sample
from iobench.units import format_size

_MLPERF = "mlperf"
NO_CLAIM = "no claim of being an official result"
_MEMORIES = 3  # 4.3.1: with more data of each client, its cache needs no clearing
_MORE_THAN = 4  # 4.6.2: processes of each host


@dataclass(frozen=True, kw_only=True)
class Rules:
    """So many saves, then so many restores, of one of these workloads, by so many processes."""

    name: str
    title: str
    times: int
    processes: Mapping[str, int]
    """The processes that each workload needs."""

    @property
    def default(self) -> str:
        """The smallest workload."""
        return min(self.processes, key=self.processes.__getitem__)


RULES: Mapping[str, Rules] = {
    _MLPERF: Rules(
        name=_MLPERF,
        title="MLPerf Storage v3.0, checkpointing",
        times=10,  # 4.7.1
        processes={"mlperf-8b": 8, "mlperf-70b": 64, "mlperf-405b": 512, "mlperf-1t": 1024},
    )
}
"""The rules by their names: 4.3.3 and 4.6.1 have the models and their processes."""


def find_rules(name: str) -> Rules:
    """Return the rules `name`. Raises UnknownNameError."""
    if name not in RULES:
        raise UnknownNameError("rules", name, list(RULES))
    return RULES[name]


@dataclass(frozen=True, kw_only=True)
class RulesKept:
    """The rules of a run, and in words what it did not keep of them."""

    name: str
    title: str
    not_kept: tuple[str, ...]


def rules_kept(run: Run, samples: Sequence[Sample]) -> RulesKept | None:
    """Return the rules that the run was to keep, by its header and samples; None without any."""
    rules = RULES.get(str(run.plan.get("rules")))
    if rules is None:
        return None
    missing = (*_setup(rules, run), *_order(rules, samples), *_cold(run, samples))
    return RulesKept(name=rules.name, title=rules.title, not_kept=missing)


def _setup(rules: Rules, run: Run) -> Iterator[str]:
    workload = run.workload
    wanted = rules.processes.get(workload.name)
    if wanted is None:
        yield f"the workload is {workload.name}, not {', '.join(rules.processes)}"
    if workload.bytes < workload.full_bytes:
        size = f"{format_size(workload.bytes)} of {format_size(workload.full_bytes)}"
        yield f"{size} of each process"
    nodes = _processes_of_nodes(run)
    if wanted is not None and sum(nodes) != wanted:
        yield f"{sum(nodes)} of {wanted} processes"
    elif min(nodes) <= _MORE_THAN:
        yield f"a node has {min(nodes)}, and must have more than {_MORE_THAN} processes"


def _processes_of_nodes(run: Run) -> list[int]:
    if run.world is not None:
        return [run.world.node.count(node) for node in sorted(set(run.world.node))]
    numjobs = run.plan.get("numjobs")
    jobs = numjobs if isinstance(numjobs, Sequence) and numjobs else [1]
    return [max(map(int, jobs))]


def _order(rules: Rules, samples: Sequence[Sample]) -> Iterator[str]:
    found = [one.operation for one in samples]
    for operation in ("save", "restore"):
        if (count := found.count(operation)) != rules.times:
            yield f"{count} of {rules.times} {operation}s"
    if found != sorted(found, key=lambda one: one != "save"):
        yield "not all saves were before all restores"


def _cold(run: Run, samples: Sequence[Sample]) -> Iterator[str]:
    """Each restore must find a cleared cache, unless the data are larger than three memories."""
    cold = [one.cold for one in samples if one.operation == "restore"]
    if all(one is not None and one.resident_fraction <= RESIDENT_LIMIT for one in cold):
        return
    memory = run.environment.machine.memory.total_bytes
    nodes = len(_processes_of_nodes(run))
    written = sum(one.bytes for one in samples if one.operation == "save") // nodes
    if memory is None or written <= _MEMORIES * memory:
        yield f"neither a cleared cache nor data above {_MEMORIES} times the memory"
