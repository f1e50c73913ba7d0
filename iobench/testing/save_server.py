"""Saves checkpoint after checkpoint, each in a process of its own that may be killed in the middle.

Run by path, with one argument: a JSON object with `writer`, `options`, `factory` (empty, or
`module:function`, which returns the writer's class), `path` (added to sys.path for it), `target`,
`how` (write, stream or checkpoint) and `size` (bytes of a checkpoint, a multiple of 64).

On standard input it takes one JSON object a line:
`number`, the checkpoint to save, of which every 8 bytes are that
number; and the moment to kill at: `after_s` seconds after the phase `phase` was entered for the
`entry`-th time, counted from 0; without a `phase` the save is let be. It answers with one line: the
phases that were entered, each with its time, and the process's exit status as of waitpid.

What a save needs is imported once, and a save begins with a fork; there is but one thread then, and
threads, rings and connections are the child's own. A kill costs a few milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy would start threads, which no fork takes along

import numpy as np

from iobench.checkpoint.staged import StagedCheckpoint
from iobench.checkpoint.staged_objects import StagedObjects
from iobench.writers import registry
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage
from iobench.writers.s3 import S3Writer
from iobench.writers.transfer import Meter

STARTED, DONE = "start", "done"

Note = Callable[[str], None]


def _memory(number: int, size_bytes: int) -> Bytes:
    return np.full(size_bytes // 8, number, dtype=np.uint64).view(np.uint8)


def _save(writer: Writer, order: dict[str, Any], number: int, note: Note) -> None:
    """One save; `note` is told of every phase that begins."""
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
            staged.publish({"step": number})


def _staged(writer: Writer, final: str) -> StagedCheckpoint | StagedObjects:
    return StagedObjects(final, writer) if isinstance(writer, S3Writer) else StagedCheckpoint(final)


def _watched(note: Note) -> None:
    """Have every phase of every Meter told."""
    real = Meter.phase

    @contextmanager
    def phase(self: Meter, name: str) -> Iterator[None]:
        note(name)
        with real(self, name):
            yield

    Meter.phase = phase  # type: ignore[method-assign]


def _child(writer: Writer, order: dict[str, Any], number: int, told: int) -> None:
    """Save, and wait to be killed; never returns."""

    def note(name: str) -> None:
        os.write(told, f"{name} {time.monotonic()}\n".encode())

    try:
        note(STARTED)
        _watched(note)
        _save(writer, order, number, note)
        note(DONE)
        os.close(told)
        while True:
            signal.pause()
    except BaseException:  # noqa: BLE001 -- whatever it is, the parent is told by the exit status
        traceback.print_exc()
    finally:
        os._exit(1)


def _serve(writer: Writer, order: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    told, tell = os.pipe()
    begun = time.monotonic()
    child = os.fork()
    if not child:
        os.close(told)
        _child(writer, order, request["number"], tell)
    os.close(tell)
    left = request.get("entry", 0)
    entered: list[tuple[str, float]] = []
    with open(told) as lines:
        for line in lines:
            name, at = line.split()
            entered.append((name, float(at) - begun))
            if name == request.get("phase"):
                if not left:
                    time.sleep(request["after_s"])
                    os.kill(child, signal.SIGKILL)
                left -= 1
        os.kill(child, signal.SIGKILL)  # of one that is done; the others have been
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
        _ = writer.client.boto3  # costs more than a save; it opens no connection yet
    else:
        writer.require(order["target"])  # imports the rest
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_serve(writer, order, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
