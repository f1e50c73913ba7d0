"""Export of a DCP checkpoint to Hugging Face shards, and what else does it on the same machine.

    python benchmarks/export.py /mnt/nvme [--source /dev/shm] [--size 8GiB] [--memory 1GiB]
        [--record FILE]

Arms, in random order, each in a process of its own, without its imports, from cold files to a sync:

- `reader` and `writer`: the same bytes, read from the source or written to a file, and no more
- `both`: these two at once; on one disk, no copy of its files is faster
- `verify`: of the source
- `export --no-verify` and `export`, with `--memory`, in a control group that allows 512 MiB more
  (needs root); `export` reads all it has written once more
- torch's `dcp_to_torch_save`, and its consolidation of Hugging Face shards that torch has saved;
  the latter only if the source is where the export is

All bytes of the source are in the rates. `--source` is another disk, or a file system in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import arms
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import _consolidate_hf_safetensors as consolidation
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

import iobench
from iobench.exports.export import export
from iobench.units import MIB, parse_size
from iobench.verification.inventory import FileTree
from iobench.verification.reading import FileRange, read_ahead
from iobench.verification.verify import verify

_ARMS = (
    *("reader", "writer", "both", "verify", "export --no-verify", "export"),
    *("dcp_to_torch_save", "consolidate"),
)
_ROWS = 4096
"""Of a square tensor of fp32: 64 MiB."""
_IN_MEMORY = 8
"""Tensors with bytes of their own, and those in a Hugging Face shard."""
_WINDOW = 32 * MIB
_PYTHON = 512 * MIB


def _names(size: int) -> list[str]:
    return [f"layers.{number}.weight" for number in range(max(1, size // (4 * _ROWS**2)))]


def make(size: int, source: Path, shards: Path | None) -> None:
    """Save tensors as DCP and, with `shards`, as Hugging Face shards, both with torch.

    A few tensors are saved again and again: the state needs no memory of its size.
    """
    names = _names(size)
    tensors = [torch.rand(_ROWS, _ROWS) for _ in range(_IN_MEMORY)]
    state = {name: tensors[number % _IN_MEMORY] for number, name in enumerate(names)}
    dcp.save(state, checkpoint_id=str(source), no_dist=True)
    if shards is not None:
        stock = HuggingFaceStorageWriter(
            str(shards),
            fqn_to_index_mapping={name: at // _IN_MEMORY + 1 for at, name in enumerate(names)},
            save_distributed=True,
        )
        dcp.save(state, storage_writer=stock, no_dist=True)


def _read(source: Path) -> None:
    location = FileTree(source, iobench.load_writer("hybrid"))
    ranges = (
        FileRange(path, start, min(start + _WINDOW, size))
        for path, size in location.sizes.items()
        for start in range(0, size, _WINDOW)
    )
    for _ in read_ahead(location, ranges, largest_bytes=_WINDOW):
        pass


def _write(out: Path, size: int) -> None:
    data = torch.randint(256, (_WINDOW,), dtype=torch.uint8).numpy()
    with iobench.load_writer("hybrid").open(out, size) as stream:
        for _ in range(0, size, len(data)):
            stream.write(data)


def work(arm: str, source: Path, at: Path, size: int, memory: str) -> None:
    """Do what an arm measures, from `source` to `at/out`."""
    out = at / "out"
    if arm.startswith("export"):
        export(source, out, memory=memory, verify="--no-verify" not in arm)
    elif arm == "verify":
        assert verify(source).ok
    elif arm == "dcp_to_torch_save":
        dcp_to_torch_save(source, out)
    elif arm == "consolidate":
        out.mkdir()
        files = dict.fromkeys(_names(size), 1)
        consolidation.consolidate_safetensors_files(str(at / "hf"), str(out), files)
    else:
        reader = threading.Thread(target=_read, args=(source,))
        if arm != "writer":
            reader.start()
        if arm != "reader":
            _write(out, size)
        if arm != "writer":
            reader.join()
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


def timed(arm: str, arguments: argparse.Namespace, source: Path, at: Path, group: str) -> float:
    """Return the seconds that an arm takes."""
    os.sync()
    for file in (file for top in (source, at) for file in top.rglob("*") if file.is_file()):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, __file__, str(at), "--arm", arm, "--source", str(source)]
    command += ["--group", group if arm.startswith("export") else ""]
    command += ["--size", arguments.size, "--memory", arguments.memory]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    out = at / "out"
    if out.is_dir():
        shutil.rmtree(out)
    out.unlink(missing_ok=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--source", type=Path, help="by default the same directory")
    parser.add_argument("--size", default="8GiB")
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--group", default="", help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, metavar="FILE", help="a new file for every sample")
    arguments = parser.parse_args()
    size = 4 * _ROWS**2 * len(_names(parse_size(arguments.size)))
    if arguments.arm:
        if arguments.group:
            Path(arguments.group, "cgroup.procs").write_text(str(os.getpid()))
        began = time.perf_counter()
        work(arguments.arm, arguments.source, arguments.directory, size, arguments.memory)
        print(time.perf_counter() - began)
        return
    every = _ARMS if arguments.source is None else _ARMS[:-1]
    limit = parse_size(arguments.memory) + _PYTHON
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory) as made,
        tempfile.TemporaryDirectory(dir=arguments.source or made) as source,
        control_group(limit) as group,
        arms.Record(arguments.record, target=arguments.directory) as kept,
    ):
        at = Path(made)
        make(size, Path(source), None if arguments.source else at / "hf")
        for turn, arm in arms.in_rounds(every, arguments.repeat):
            kept.sample(arm, turn, timed(arm, arguments, Path(source), at, group), bytes=size)
    kept.print_table()
    taken = {arm: statistics.median(kept.seconds(arm)) for arm in every}
    for arm in every:
        parts = (f"{taken[base] / taken[arm]:.2f} of {base}" for base in ("writer", "both"))
        print(f"{arm:18} {', '.join(parts)}")


if __name__ == "__main__":
    main()
