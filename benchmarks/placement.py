"""Placement next to an oracle, in live runs with a link whose rate changes. Needs root.

    python benchmarks/placement.py --target DIRECTORY [--size 32MiB] [--saves 150] [--every 1.0]
        [--scenario NAME] [--record FILE]

A Checkpointer in a network namespace saves through memory to slow local storage and to a
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
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
import record
from placement_runs import Run, Timed, fixed_s, oracle_s, shown
from support.nodes import Node, Nodes, open_nodes
from support.slow_writer import SlowWriter

from iobench import Checkpointer, KeepLast, Memory, Placement, Remote
from iobench.bench.targets.scratch import scratch_directory
from iobench.remote.journal import DrainJournal
from iobench.remote.observed import LOCAL, REMOTE
from iobench.units import MIB, parse_size
from iobench.writers.s3 import S3Writer

_ATTEMPTS, _ANSWER_S = 2, 1.0
_KEPT = 2
_SLOTS = 2
_BUCKET, _PORT = "checkpoints", 9000
_MOST = 1.05
_HEADERS = 1514 / 1448
"""Bytes of a frame on the link for each byte that is sent."""
_TICK_S = 0.5
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
    ckpt = Checkpointer(
        directory,
        keep=KeepLast(_KEPT),
        writer=SlowWriter(local_rate),
        tiers=[Memory(_SLOTS * size + 16 * MIB), remote],  # in huge pages
        placement=placement(goal, every_s),
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
        remote_s = there[step] - began_s if step in there else None
        if placed[step].where == REMOTE:  # not the removal of older ones after it
            remote_s = save.durable_s
        timed = Timed(
            began_s=began_s,
            stall_s=stall_s,
            elapsed_s=save.durable_s,
            remote_s=remote_s,
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


def report(
    name: str,
    runs: dict[str, Run],
    size: int,
    local_rate: int,
    samples: record.Record,
) -> None:
    """Print and record the saves of a scenario, next to the oracle."""
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
                round(one.elapsed_s, 6),
                bytes=size,
                oracle_s=round(oracle, 6),
                began_s=round(one.began_s - run.saves[0].began_s, 6),
                remote=float(one.tier == REMOTE),
                **({} if one.remote_s is None else {"remote_s": round(one.remote_s, 6)}),
            )
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
            report(name, runs, size, local_rate, samples)


if __name__ == "__main__":
    main()
