"""Slices and restore modes on four nodes with limited links. Needs root.

    python benchmarks/ranks.py [--size 64MiB] [--repeat 3] [--best] [-o record.json]

Nodes are network namespaces on this machine. Each has a link to the other nodes and a link to a
storage network, in which `rclone serve s3` runs; `tc tbf` limits the links. Rates are low, so that
the links and not the processors are the limit. Every restored byte is compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.nodes import Node, Nodes, open_nodes

from iobench.units import parse_size

NODES = 4
MB = 1_000_000
BUCKET, OBJECT = "checkpoints", "file"
PORT = 9000
PRELOAD = ("boto3", "torch.distributed.checkpoint", "iobench.dist.restore_mode", "benchmarks.ranks")
ALONE, MODES = "one node", ("all", "broadcast", "all-gather", "auto")


@dataclasses.dataclass(frozen=True)
class Shaping:
    """Rates in MB/s: of the nodes' links to storage, of the server, and between the nodes."""

    nodes: tuple[float, ...]
    server: float
    network: float


FREE = 200.0  # more than the processors move
SHAPINGS = {
    "one server": Shaping((FREE,) * NODES, 10, FREE),
    "links of nodes": Shaping((10,) * NODES, FREE, FREE),
    "slow network": Shaping((20,) * NODES, FREE, 5),
    "one fast node": Shaping((40, 5, 5, 5), FREE, FREE),
    "all limited": Shaping((10,) * NODES, 20, 10),
}
BEST = dict(
    zip(SHAPINGS, ("all-gather", "all-gather", "all", "broadcast", "all-gather"), strict=True)
)
"""The fastest mode of each, as measured without --best."""


# What runs in the ranks.


def restores(arms: list[str], size: int, digest: str) -> None:
    """Read the object by each mode, or by rank 0 alone; rank 0 prints what each one took."""
    from iobench.dist.control import Control
    from iobench.dist.restore_mode import Reader
    from iobench.dist.slices import Range
    from iobench.dist.transport import Transport
    from iobench.dist.world import World
    from iobench.writers.image import FileImage
    from iobench.writers.s3 import S3Writer

    world, results = World.detect(), []
    alone = Transport(Control(World.single()))
    with Control.connect(world) as control, Transport(control) as transport:
        writer, location = S3Writer(), f"s3://{BUCKET}"
        memory = np.ones(size, np.uint8)  # with its pages
        image = FileImage.of(OBJECT, [memory])
        writer.read(image, location, start=0, stop=1)  # connects
        for arm in arms:
            memory[:] = 0
            control.barrier("ready", deadline_s=60)
            began_s = time.monotonic()
            if arm != ALONE:
                reader = Reader(writer, transport, arm)
            elif world.rank == 0:
                reader = Reader(writer, alone, "all")
            else:
                continue
            done = reader.read({0: image}, location, [Range(0, 0, size)])
            spent_s = time.monotonic() - began_s
            if xxhash.xxh3_64_hexdigest(memory) != digest:
                raise SystemExit("wrong bytes")
            if arm != ALONE:
                spent_s = max(control.all_gather("spent", spent_s, deadline_s=60))
            result = {"arm": arm, "s": spent_s, "amplification": done.read_amplification}
            results.append({**result, "chosen": reader.mode, "measured": reader.measured})
    if world.rank == 0:
        print(json.dumps(results), flush=True)


def save(kind: str, size: int) -> None:
    """Save one replicated tensor by DCP, by one writer or in slices; rank 0 prints the seconds."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from iobench.dist.slice_planner import SlicePlanner
    from iobench.integrations.dcp import StorageWriter

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    state = {"model": torch.randn(size // 4096, 1024)}

    def once(name: str, saved: Mapping[str, Any]) -> float:
        planner = (
            SlicePlanner(nodes=list(range(dist.get_world_size())))
            if kind == "slices"
            else DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        )
        dist.barrier()
        began_s = time.monotonic()
        dcp.save(
            saved, storage_writer=StorageWriter(f"s3://{BUCKET}/{name}", "s3"), planner=planner
        )
        spent = torch.tensor([time.monotonic() - began_s])
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return float(spent)

    once("warm", {"t": torch.zeros(4)})
    spent_s = once(kind, state)
    if dist.get_rank() == 0:
        print(json.dumps({"s": spent_s}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the interpreter


# What drives them.


class Cluster:
    """Four nodes and a server of objects, and the links between them."""

    def __init__(self, nodes: Nodes, directory: Path) -> None:
        self.nodes, self._directory = nodes, directory
        self._keys = secrets.token_hex(10).upper(), secrets.token_urlsafe(30)
        self._switch = nodes[0]._switch
        _in(self._switch, "ip link add storage type bridge")
        _in(self._switch, "ip link set storage up")
        for node in nodes:
            self._join(node)
        (directory / BUCKET).mkdir()
        server: Node = nodes[NODES]
        server.start(
            ["rclone", "serve", "s3", str(directory), "--addr", f"{_storage(NODES)}:{PORT}"],
            environ={"RCLONE_AUTH_KEY": f'"{",".join(self._keys)}"', "RCLONE_CONFIG": os.devnull},
        )

    def _join(self, node: Node) -> None:
        port = f"storage{node.number}"
        for command in (
            f"ip link add {port} type veth peer name eth1 netns {node.pid}",
            f"ip link set {port} master storage up",
        ):
            _in(self._switch, command)
        _in(node.pid, f"ip address add {_storage(node.number)}/24 dev eth1")
        _in(node.pid, "ip link set eth1 up")

    def shape(self, shaping: Shaping) -> None:
        """Limit the links in both directions."""
        for node in self.nodes[:NODES]:
            node.shape(int(shaping.network * MB))
        for number, rate in enumerate((*shaping.nodes, shaping.server)):
            node = self.nodes[number]
            bits = int(rate * MB * 8)
            burst = max(bits // 8 // 200, 16_384)  # small: a sample must not pass at full speed
            limit = f"root tbf rate {bits}bit burst {burst} limit 1mb"
            _in(node.pid, f"tc qdisc replace dev eth1 {limit}")
            _in(self._switch, f"tc qdisc replace dev storage{number} {limit}")

    def run(self, function: str, *arguments: Any) -> Any:
        """Run a function of this file in one rank on each node; return what rank 0 printed."""
        started = self.nodes.ranks(
            f"benchmarks.ranks:{function}",
            *arguments,
            order=range(NODES),
            environ={
                "AWS_ACCESS_KEY_ID": self._keys[0],
                "AWS_SECRET_ACCESS_KEY": self._keys[1],
                "AWS_ENDPOINT_URL_S3": f"http://{_storage(NODES)}:{PORT}",
                "AWS_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
                "GLOO_SOCKET_IFNAME": "eth0",
            },
        )
        codes = self.nodes.wait(started, 300)
        if any(codes):
            raise SystemExit("\n".join(f"{one}: {one.stderr()}" for one in started))
        return json.loads(started[0].stdout())


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Provide the nodes. At the end nothing of them is left."""
    with ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory())
        output = stack.enter_context(tempfile.TemporaryDirectory())
        directory = Path(made)
        nodes = stack.enter_context(
            open_nodes(NODES + 1, directory=Path(output), preload=PRELOAD, limit_s=300)
        )
        yield Cluster(nodes, directory)


def _storage(number: int) -> str:
    return f"10.88.0.{number + 1}"


def _in(pid: int, command: str) -> None:
    subprocess.run(["nsenter", "-t", str(pid), "-n", *command.split()], check=True)


def measured(size: int, repeat: int, *, only_best: bool) -> list[dict[str, Any]]:
    """Measure everything, in random order within each repetition."""
    samples = []
    with cluster() as made:
        directory = made._directory / BUCKET
        data = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
        (directory / OBJECT).write_bytes(data.tobytes())
        digest = xxhash.xxh3_64_hexdigest(data)
        time.sleep(1)  # the server starts
        for number in range(repeat):
            for name in random.sample(list(SHAPINGS), len(SHAPINGS)):
                made.shape(SHAPINGS[name])
                arms = [BEST[name], "auto"] if only_best else [ALONE, *MODES]
                random.shuffle(arms)
                for found in made.run("restores", arms, size, digest):
                    samples.append({"shaping": name, "repeat": number, **found})
                    print(samples[-1], file=sys.stderr, flush=True)
            made.shape(SHAPINGS["links of nodes"])
            for kind in random.sample(["one writer", "slices"], 2):
                found = made.run("save", kind, size)
                samples.append({"shaping": "save", "arm": kind, "repeat": number, **found})
                print(samples[-1], file=sys.stderr, flush=True)
    return samples


def table(samples: list[dict[str, Any]]) -> str:
    """Return the medians as a table of Markdown."""
    lines = ["| links | " + " | ".join([ALONE, *MODES]) + " | auto / best | chosen |"]
    lines.append("| --- |" + " ---: |" * 6 + " --- |")
    for name in SHAPINGS:
        spent = {arm: _median(samples, name, arm) for arm in (ALONE, *MODES)}
        best = min(spent[mode] for mode in MODES[:3] if spent[mode])
        chosen = {s["chosen"] for s in samples if (s["shaping"], s["arm"]) == (name, "auto")}
        cells = [f"{spent[arm]:.2f} s" if spent[arm] else "-" for arm in spent]
        lines.append(
            f"| {name} | {' | '.join(cells)} | {spent['auto'] / best:.2f} | "
            f"{', '.join(sorted(chosen))} |"
        )
    one, cut = (_median(samples, "save", kind) for kind in ("one writer", "slices"))
    lines.append(
        f"\nSave: one writer {one:.2f} s, slices {cut:.2f} s, "
        f"{cut / one * NODES:.2f} of 1/{NODES} of it"
    )
    return "\n".join(lines)


def _median(samples: list[dict[str, Any]], shaping: str, arm: str) -> float:
    found = [s["s"] for s in samples if (s["shaping"], s["arm"]) == (shaping, arm)]
    return statistics.median(found) if found else 0.0


def main() -> None:
    """Measure, print the tables, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=parse_size("64MiB"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--best", action="store_true", help="only `auto` and the best mode")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    samples = measured(given.size, given.repeat, only_best=given.best)
    if given.output:
        record = {
            "size_bytes": given.size,
            "shapings": {name: dataclasses.asdict(one) for name, one in SHAPINGS.items()},
            "samples": samples,
        }
        given.output.write_text(json.dumps(record, indent=1) + "\n")
    print(table(samples))


if __name__ == "__main__":
    main()
