"""A process that saves checkpoints, each in a child process that it may kill during the save.

It is run by path, with one argument, a JSON object:

- `writer`, `options`: the registered writer and its options;
- `factory`: empty, or `module:function`, which returns the writer's class;
- `path`: added to sys.path for the factory;
- `target`, `how` (write, stream or checkpoint) and `size` (bytes, a multiple of 64).

Each line of standard input is a JSON object. `number` is the checkpoint to save; every 8 bytes of
it are that number. The child is killed `after_s` seconds after it enters `phase` for the `entry`-th
time, counted from 0; with `after_s` null it stands there until it is killed. Without a `phase` the
save runs to its end. The answer is one line: the phases that were entered with their times, and the
exit status of the child as returned by waitpid.

Everything is imported once, and each save is a fork, so that a kill costs only a few milliseconds.
The process has one thread when it forks; threads, rings and connections belong to the child.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy would start threads, which a fork does not copy

import numpy as np

from iobench.checkpoint.object_store import StagedObjects
from iobench.checkpoint.store import StagedCheckpoint
from iobench.writers import registry
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.target import is_s3
from iobench.writers.transfer import Meter

STARTED, DONE = "start", "done"
_PF_IO_WORKER = 0x10  # linux/sched.h

Note = Callable[[str], None]


def _memory(number: int, size_bytes: int) -> Bytes:
    return np.full(size_bytes // 8, number, dtype=np.uint64).view(np.uint8)


def _save(writer: Writer, order: dict[str, Any], number: int, note: Note) -> None:
    """Save once. `note` is called with each phase that begins."""
    target, size = order["target"], order["size"]
    if order["how"] == "write":
        writer.write(FileImage.of("model", [_memory(number, size)]), target)
    elif order["how"] == "stream":
        with writer.open(f"{target}/model") as stream:
            stream.write(_memory(number, size))
    else:
        with _staged(writer, f"{target}/step-{number}") as staged:
            small = [FileImage.of(f"shards/{n}", [_memory(number, size // 8)]) for n in range(2)]
            writer.write_many(small, staged.directory)
            with writer.open(f"{staged.directory}/model") as stream:
                stream.write(_memory(number, size - size // 4))
            note("publish")
            staged.publish([json.dumps({"step": number}).encode()])


def _staged(writer: Writer, final: str) -> StagedCheckpoint | StagedObjects:
    return StagedObjects(final, writer) if is_s3(final) else StagedCheckpoint(final)


_Timed = Callable[[Meter, str], AbstractContextManager[None]]


def _report_phases(note: Note) -> None:
    """Call `note` at each phase of every Meter."""

    def noted(real: _Timed) -> _Timed:
        @contextmanager
        def timed(self: Meter, name: str) -> Iterator[None]:
            note(name)
            with real(self, name):
                yield

        return timed

    for name in ("phase", "operation"):  # in this child only
        setattr(Meter, name, noted(getattr(Meter, name)))


def _child(writer: Writer, order: dict[str, Any], request: dict[str, Any], pipe: int) -> None:
    """Save, and wait to be killed. Never returns."""
    stands = Counter[str]()
    if "phase" in request and request["after_s"] is None:
        stands[request["phase"]] = request["entry"] + 1

    def note(name: str) -> None:
        os.write(pipe, f"{name} {time.monotonic()}\n".encode())
        stands[name] -= 1
        while stands[name] == 0:
            signal.pause()

    try:
        note(STARTED)
        _report_phases(note)
        _save(writer, order, request["number"], note)
        note(DONE)
        os.close(pipe)
        while True:
            signal.pause()
    except BaseException:  # noqa: BLE001 -- the exit status reports any error to the parent
        traceback.print_exc()
    finally:
        os._exit(1)


def _threads() -> int:
    """Return the number of threads, without the kernel's own for an io_uring.

    These do operations that would wait, and stay for some seconds after the ring was closed.
    """
    count = 0
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            stat = Path(f"/proc/self/task/{task}/stat").read_text()
            flags = int(stat.rpartition(")")[2].split()[6])
            count += not flags & _PF_IO_WORKER
    return count


def _serve(writer: Writer, order: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    patience = time.monotonic() + 10
    while _threads() > 1:  # the kernel ends a thread after Python has joined it
        assert time.monotonic() < patience, "a fork would lose threads"
        time.sleep(0.001)
    reading, writing = os.pipe()
    begun = time.monotonic()
    child = os.fork()
    if not child:
        os.close(reading)
        _child(writer, order, request, writing)
    os.close(writing)
    left = request.get("entry", 0)
    entered: list[tuple[str, float]] = []
    with open(reading) as lines:
        for line in lines:
            name, at = line.rsplit(maxsplit=1)
            entered.append((name, float(at) - begun))
            if name == request.get("phase"):
                if not left:
                    time.sleep(request["after_s"] or 0)
                    os.kill(child, signal.SIGKILL)
                left -= 1
        os.kill(child, signal.SIGKILL)  # a child that has finished its save waits for this
    _, status = os.waitpid(child, 0)
    return {"entered": entered, "status": status}


def main() -> None:
    order = json.loads(sys.argv[1])
    if order["factory"]:
        sys.path[:0] = order["path"]
        module, _, function = order["factory"].partition(":")
        writer = getattr(import_module(module), function)()(**order["options"])
    else:
        writer = registry.make(order["writer"], **order["options"])
    if isinstance(writer, S3Writer):
        _ = writer.client.boto3  # creating it costs more than a save; it opens no connection yet
    else:
        writer.require(order["target"])  # imports what a save needs
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_serve(writer, order, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
