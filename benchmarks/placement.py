"""Placement next to an oracle, in live runs with a link whose rate changes. Needs root.

    python benchmarks/placement.py --target DIRECTORY [--size 32MiB] [--saves 150] [--every 1.0]
        [--scenario NAME] [--record FILE]

A Checkpointer in a network namespace saves through paced memory to paced local storage and to a
real S3 server (rclone) in another namespace; `tc tbf` limits the link between them, or it is down:

- step: the link is faster than local storage, then slower, then faster again
- drift: it becomes slower all the time
- dead: it is faster, then down, then up again

Each scenario runs with the goal "durable", which chooses by measured rates, and with "capacity",
which is always remote unless that fails. "bandwidth" is always local, and runs once. A run begins
without any measurement.

The oracle knows the rate of the link at any moment. For each save of a run it takes the tier whose
copy is durable first, if it begins when the save began: the bytes at the rates in force, and the
fixed time of a save to that tier, the median that the runs with one tier needed in excess of
their bytes. The total time to durable of all saves is compared with that of the oracle.

`iobench tiers plan` predicts each run with the goal "durable" from the paced rates, those of the
link, and these fixed times as latencies: the stalls, when a save is durable in one of the tiers,
and when in the remote tier, counted from its begin.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
import record
from support.nodes import Node, Nodes, open_nodes

from iobench import Checkpointer, KeepLast, Local, Memory, Paced, Placement, Remote
from iobench.bench.targets.scratch import scratch_directory
from iobench.tiers.journal import DrainJournal
from iobench.tiers.observed import LOCAL, REMOTE
from iobench.tiers.plan import PlannedMemory, Prediction, RateChange, TiersPlan
from iobench.tiers.simulation import simulate
from iobench.units import MIB, parse_size
from iobench.writers.s3 import S3Writer

_BUCKET, _PORT = "checkpoints", 9000
_MOST, _MOST_OFF = 1.05, 0.10
_HEADERS = 1514 / 1448
"""Bytes of a frame on the link for each byte that is sent."""
_TICK_S = 0.5
_ATTEMPTS, _ANSWER_S = 2, 1.0
_KEPT = 2
_SLOTS, _COPIES_PER_S = 2, 32
_FAST, _SLOW = 2.0, 0.6

Rate = Callable[[float], float]
"""The rate of the link, at a part (0 to 1) of a run, in multiples of that of local storage."""


def _dead(part: float) -> float:
    return 0.0 if 0.35 <= part < 0.475 else _FAST


SCENARIOS: dict[str, Rate] = {
    "step": lambda part: _SLOW if 0.35 <= part < 0.65 else _FAST,
    "drift": lambda part: _FAST * (_SLOW / _FAST) ** part,
    "dead": _dead,
}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A save: when it began, by the monotonic clock, and where it went.

    Seconds after that: training went on after `stall_s`, it was durable after `elapsed_s`, and in
    the remote tier after `remote_s`, if it was there before the end of the run.
    """

    began_s: float
    stall_s: float
    elapsed_s: float
    remote_s: float | None
    tier: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """The saves of a run, and the rates of the link in bytes per second, each since a moment."""

    saves: Sequence[Timed]
    rates: Sequence[tuple[float, float]]

    @property
    def total_s(self) -> float:
        return sum(one.elapsed_s for one in self.saves)

    def under(self, other: Run) -> Run:
        """Return this run, which did not depend on the link, with the rates of `other`."""
        offset_s = self.rates[0][0] - other.rates[0][0]
        return replace(self, rates=[(at + offset_s, rate) for at, rate in other.rates])

    def sent_s(self, begin_s: float, size: float) -> float:
        """Return how long `size` bytes take over the link from `begin_s` on."""
        ends = [since_s for since_s, _ in self.rates[1:]] + [float("inf")]
        now_s, left = begin_s, size
        for (_, rate), end_s in zip(self.rates, ends, strict=True):
            if end_s <= now_s:
                continue
            if rate and left / rate <= end_s - now_s:
                return now_s + left / rate - begin_s
            left -= rate * (end_s - now_s) if rate else 0.0
            now_s = end_s
        return float("inf")


def placement(goal: str, every_s: float) -> Placement:
    return Placement(goal=goal, dwell=2 * every_s)  # type: ignore[arg-type]  # one of its goals


# In the node of the Checkpointer.


def saves(
    directory: str, target: str, goal: str, size: int, count: int, every_s: float, local_rate: int
) -> None:
    """Save `count` times, and print a line of JSON for each. "begin" and a line come first."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    # Answers within a fraction of a second here, and a server that does not is dead.
    writer = S3Writer(
        connect_timeout_s=_ANSWER_S / 2, read_timeout_s=_ANSWER_S, max_attempts=_ATTEMPTS
    )
    remote = Remote(target, keep=KeepLast(_KEPT), writer=writer)
    tiers = [
        Paced(Memory(_SLOTS * size + 16 * MIB), _COPIES_PER_S * size),  # in huge pages
        Paced(Local(), local_rate),
        remote,
    ]
    ckpt = Checkpointer(
        directory, keep=KeepLast(_KEPT), tiers=tiers, placement=placement(goal, every_s)
    )
    found = []
    with ckpt:
        ckpt.prepare({"w": data}, wait=True)
        while not ckpt._tier.remote.is_open:
            time.sleep(0.01)
        print("begin", flush=True)
        for step in range(count):
            time.sleep(every_s)
            data[:4096].random_(0, 256)
            began_s = time.monotonic()
            save = ckpt.save_async({"w": data}, step)
            found.append((began_s, time.monotonic() - began_s, save))
        ckpt.wait()
        print("end", flush=True)
        ckpt._tier.drain.stop()  # the rest of the copies is not measured
        for entry in ckpt._tier.drain.queue.pending():
            ckpt._tier.drain.queue.forget(entry.step)

    offset_s = time.time() - time.monotonic()
    events = DrainJournal(Path(directory)).events()
    placed = {one.step: one for one in events if one.event == "placed"}
    there = {one.step: one.at_s - offset_s for one in events if one.event == "durable"}
    for step, (began_s, stall_s, save) in enumerate(found):
        timed = Timed(
            began_s=began_s,
            stall_s=stall_s,
            elapsed_s=save.durable_s,
            remote_s=there[step] - began_s if step in there else None,
            tier=placed[step].where,
            why=placed[step].why,
        )
        print(json.dumps(asdict(timed)))


# The runs.


class Cluster:
    """The node of the Checkpointer, that of the server, and the link between them."""

    def __init__(self, nodes: Nodes, storage: Path) -> None:
        self._client: Node = nodes[0]
        self._nodes, server = nodes, nodes[1]
        self._keys = secrets.token_hex(10).upper(), secrets.token_urlsafe(30)
        server.mount_tmpfs(storage, 4 << 30)
        server.run("mkdir", storage / _BUCKET)
        self._address = f"{server.address}:{_PORT}"
        server.start(
            ["rclone", "serve", "s3", str(storage), "--addr", self._address],
            environ={"RCLONE_AUTH_KEY": f'"{",".join(self._keys)}"', "RCLONE_CONFIG": os.devnull},
        )

    def run(self, rate: Rate, local_rate: int, length_s: float, *arguments: Any) -> Run:
        """Run `saves` while the rate of the link changes."""
        self._shape(rate(0.0) * local_rate)
        process = self._client.start(
            "benchmarks.placement:saves",
            *arguments,
            local_rate,
            environ={
                "AWS_ACCESS_KEY_ID": self._keys[0],
                "AWS_SECRET_ACCESS_KEY": self._keys[1],
                "AWS_ENDPOINT_URL_S3": f"http://{self._address}",
                "AWS_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
            },
        )
        process.wait_for("begin", 60)
        begin_s, rates, now = time.monotonic(), list[tuple[float, float]](), -1.0
        while "end" not in process.stdout().split("\n") and process.code is None:
            part = min(1.0, (time.monotonic() - begin_s) / length_s)
            if (found := rate(part) * local_rate) != now:
                self._shape(found)
                rates.append((time.monotonic() if rates else begin_s, found))
                now = found
            self._nodes.sleep(_TICK_S)
        self._client.link("up")
        if process.wait(60):
            raise SystemExit(process.stderr())
        lines = process.stdout().split("end\n")[1].splitlines()
        return Run(saves=[Timed(**json.loads(line)) for line in lines], rates=rates)

    def _shape(self, rate: float) -> None:
        self._client.link("up" if rate else "down")
        if rate:
            self._client.shape(int(rate * _HEADERS))


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Provide the nodes. At the end nothing of them is left."""
    with ExitStack() as stack:
        storage = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        output = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        preload = ("torch", "boto3", "benchmarks.placement")
        nodes = stack.enter_context(open_nodes(2, directory=output, preload=preload, limit_s=1800))
        yield Cluster(nodes, storage)


def fixed_s(run: Run, tier: str, seconds: Callable[[Run, Timed], float]) -> float:
    """Return what a save to `tier` needs in excess of `seconds`: the median of a run."""
    return statistics.median(
        one.elapsed_s - seconds(run, one) for one in run.saves if one.tier == tier
    )


def oracle_s(run: Run, fixed: dict[str, float], size: int, local_rate: int) -> list[float]:
    """Return the seconds to durable of each save of a run in the better tier."""
    local_s = size / local_rate + fixed[LOCAL]
    return [min(local_s, run.sent_s(one.began_s, size) + fixed[REMOTE]) for one in run.saves]


def predicted(
    run: Run, fixed: dict[str, float], size: int, local_rate: int, every_s: float
) -> Prediction:
    """Return what `iobench tiers plan` says of a run with the goal "durable"."""
    copy_s = 1 / _COPIES_PER_S
    begin_s, (_, rate) = run.saves[0].began_s - every_s, run.rates[0]
    return simulate(
        TiersPlan(
            size_bytes=size,
            every_s=every_s,
            saves=len(run.saves),
            memories=(
                PlannedMemory(
                    name="memory", size_bytes=_SLOTS * size, rate_bytes_per_s=_COPIES_PER_S * size
                ),
            ),
            local_rate=local_rate,
            local_latency_s=max(0.0, fixed[LOCAL] - copy_s),
            remote_rate=round(rate),
            remote_latency_s=max(0.0, fixed[REMOTE] - copy_s),
            remote_changes=tuple(
                RateChange(at_s=at_s - begin_s, rate_bytes_per_s=round(rate))
                for at_s, rate in run.rates[1:]
            ),
            timeout_s=_ATTEMPTS * _ANSWER_S,
            placement=placement("durable", every_s),
            keep_last=_KEPT,
        )
    )


def compare(name: str, run: Run, found: Prediction, samples: record.Record) -> None:
    """Print and record what was predicted of a run, next to what was measured."""
    there = [one.remote_s for one in run.saves if one.remote_s is not None]
    end_s = max(one.durable_s or 0.0 for one in found.saves)  # then the run ended, with its copies
    expected = [
        one.remote_s - one.at_s
        for one in found.saves
        if one.remote_s is not None and one.remote_s <= end_s
    ]
    rows = {
        "stall, sum": (sum(one.stall_s for one in run.saves), sum(found.stalls_s)),
        "durable": (
            statistics.mean(one.elapsed_s for one in run.saves),
            statistics.mean(found.lags_s),
        ),
        "durable remotely": (statistics.mean(there), statistics.mean(expected)),
    }
    for turn, (what, (measured_s, predicted_s)) in enumerate(rows.items()):
        off = predicted_s / measured_s - 1
        verdict = "ok" if abs(off) <= _MOST_OFF else "MISS"
        print(
            f"{verdict:4} plan      {what:17} {measured_s:8.3f} s live, {predicted_s:8.3f} s "
            f"({off:+.1%})"
        )
        samples.sample(f"{name}, plan, {what}", turn, measured_s, predicted_s=predicted_s)
    print(
        f"     plan      {len(there)} saves were in the remote tier, predicted {len(expected)}   "
        f"{shown([one.tier for one in found.saves])}"
    )


def shown(tiers: Sequence[str]) -> str:
    """The tiers in order, such as "3 local, 25 remote"."""
    groups = itertools.groupby(tiers)
    return ", ".join(f"{len(list(some))} {tier}" for tier, some in groups)


def report(
    name: str,
    runs: dict[str, Run],
    size: int,
    local_rate: int,
    every_s: float,
    samples: record.Record,
) -> None:
    """Print and record the saves of a scenario, next to the oracle and to what was predicted."""
    fixed = {
        LOCAL: fixed_s(runs["bandwidth"], LOCAL, lambda _, __: size / local_rate),
        REMOTE: fixed_s(runs["capacity"], REMOTE, lambda run, one: run.sent_s(one.began_s, size)),
    }
    print(
        f"\n{name}: {size / MIB:.0f} MiB, local storage {local_rate / MIB:.0f} MiB/s; fixed times: "
        f"local {1000 * fixed[LOCAL]:.0f} ms, remote {1000 * fixed[REMOTE]:.0f} ms"
    )
    for goal, run in runs.items():
        best = oracle_s(run, fixed, size, local_rate)
        ratio = run.total_s / sum(best)
        verdict = ""
        if goal == "durable":
            verdict = "ok  " if ratio <= _MOST else "MISS"
        print(
            f"{verdict:4} {goal:9} {run.total_s:7.2f} s, oracle {sum(best):7.2f} s, "
            f"ratio {ratio:.3f}   {shown([one.tier for one in run.saves])}"
        )
        for turn, (one, oracle) in enumerate(zip(run.saves, best, strict=True)):
            samples.sample(
                f"{name}, {goal}",
                turn,
                one.elapsed_s,
                bytes=size,
                oracle_s=oracle,
                began_s=one.began_s - run.saves[0].began_s,
                remote=float(one.tier == REMOTE),
            )
    found = predicted(runs["durable"], fixed, size, local_rate, every_s)
    compare(name, runs["durable"], found, samples)
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--size", default="32MiB")
    parser.add_argument("--saves", type=int, default=150)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two saves")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append")
    record.add_option(parser)
    given = parser.parse_args()
    size = parse_size(given.size)
    local_rate = 2 * size  # a save takes half a second
    with (
        record.Record(given.record, target=given.target) as samples,
        scratch_directory(given.target) as scratch,
        cluster() as nodes,
    ):

        def run(name: str, goal: str) -> Run:
            return nodes.run(
                SCENARIOS[name],
                local_rate,
                given.saves * given.every,
                str(scratch / f"{name}-{goal}"),
                f"s3://{_BUCKET}/{name}-{goal}",
                goal,
                size,
                given.saves,
                given.every,
            )

        chosen = given.scenario or list(SCENARIOS)
        local = run(chosen[0], "bandwidth")
        for name in chosen:
            runs = {goal: run(name, goal) for goal in ("capacity", "durable")}
            runs["bandwidth"] = local.under(runs["durable"])
            report(name, runs, size, local_rate, given.every, samples)


if __name__ == "__main__":
    main()
