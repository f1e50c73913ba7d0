"""Export of a DCP checkpoint to Hugging Face shards, and what else does it on the same machine.

    python benchmarks/export.py /mnt/nvme --size 8GiB --memory 1GiB

Arms, in random order, each in a process of its own, without its imports, from cold files to a sync:
`export` and `export --verify` with `--memory`, in a control group that allows 512 MiB more (needs
root); `writer`, a stream of the same bytes without a source; torch's `dcp_to_torch_save` and its
consolidation of a Hugging Face shard that torch has saved.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import _consolidate_hf_safetensors as consolidation
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

import iobench
from iobench.units import MIB, format_rate, format_seconds, parse_size

_ARMS = ("writer", "export", "export --verify", "dcp_to_torch_save", "consolidate")
_ROWS = 4096
"""Of a square tensor of fp32: 64 MiB."""
_PYTHON = 512 * MIB


def _names(size: int) -> list[str]:
    return [f"layers.{number}.weight" for number in range(max(1, size // (4 * _ROWS**2)))]


def make(at: Path, size: int) -> None:
    """Save the same tensors as DCP and as a Hugging Face shard of torch."""
    state = {name: torch.rand(_ROWS, _ROWS) for name in _names(size)}
    dcp.save(state, checkpoint_id=str(at / "dcp"), no_dist=True)
    stock = HuggingFaceStorageWriter(str(at / "hf"), save_distributed=True)
    dcp.save(state, storage_writer=stock, no_dist=True)


def work(arm: str, at: Path, size: int, memory: str) -> None:
    """Do what an arm measures, to `at/out`."""
    out = at / "out"
    if arm.startswith("export"):
        iobench.export(at / "dcp", out, memory=memory, verify="--verify" in arm)
    elif arm == "writer":
        data = torch.randint(256, (32 * MIB,), dtype=torch.uint8).numpy()
        with iobench.load_writer("hybrid").open(out, size) as stream:
            for _ in range(0, size, len(data)):
                stream.write(data)
    elif arm == "dcp_to_torch_save":
        dcp_to_torch_save(at / "dcp", out)
    else:
        files = dict.fromkeys(_names(size), 1)
        out.mkdir()
        consolidation.consolidate_safetensors_files(str(at / "hf"), str(out), files)
    os.sync()


@contextlib.contextmanager
def control_group(limit: int) -> Iterator[str]:
    """Make a group with this limit of memory. Needs root."""
    old = Path("/sys/fs/cgroup/memory")
    group, name = old, "memory.limit_in_bytes"
    if not old.is_dir():
        group, name = old.parent, "memory.max"
    group = group / f"iobench-export-{os.getpid()}"
    group.mkdir()
    try:
        (group / name).write_text(str(limit))
        yield str(group)
    finally:
        group.rmdir()


def timed(arm: str, arguments: argparse.Namespace, at: Path, group: str) -> float:
    """Return the seconds that an arm takes."""
    os.sync()
    for file in (file for file in at.rglob("*") if file.is_file()):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, __file__, str(at), "--arm", arm]
    command += ["--group", group if arm.startswith("export") else ""]
    command += ["--size", arguments.size, "--memory", arguments.memory]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    out = at / "out"
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", default="8GiB")
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--group", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = 4 * _ROWS**2 * len(_names(parse_size(arguments.size)))
    if arguments.arm:
        if arguments.group:
            Path(arguments.group, "cgroup.procs").write_text(str(os.getpid()))
        began = time.perf_counter()
        work(arguments.arm, arguments.directory, size, arguments.memory)
        print(time.perf_counter() - began)
        return
    seconds: dict[str, list[float]] = {arm: [] for arm in _ARMS}
    limit = parse_size(arguments.memory) + _PYTHON
    with tempfile.TemporaryDirectory(dir=arguments.directory) as at, control_group(limit) as group:
        make(Path(at), size)
        for _ in range(arguments.repeat):
            for arm in random.sample(_ARMS, len(_ARMS)):
                seconds[arm].append(timed(arm, arguments, Path(at), group))
    writer = statistics.median(seconds["writer"])
    for arm, found in seconds.items():
        rate = format_rate(size / statistics.median(found))
        each = ", ".join(map(format_seconds, found))
        part = writer / statistics.median(found)
        print(f"{arm:18} {rate:28} {part:.2f} of the writer; {each}")


if __name__ == "__main__":
    main()
