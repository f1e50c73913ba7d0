"""The engine process: a ThreadEngine that a trainer drives over a socket.

`python -m iobench.offload.child SOCKET MEMORY LOCK`: three inherited descriptors. It ends when the
trainer closes its end of the socket, however that happens. Commits and pins that were submitted
become durable before; a step without all its gradients never existed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from iobench import linux
from iobench.dist.messages import Message
from iobench.errors import TransferError
from iobench.offload.engine import EngineOptions, ThreadEngine
from iobench.offload.files import read_layout
from iobench.offload.layout import ParameterPiece, StateLayout
from iobench.offload.link import EngineLink, described
from iobench.offload.store import GenerationStore
from iobench.offload.windows import SharedWindows

__all__ = ["main"]

_NICE = 5


class _InheritedLock:
    """The trainer's lock of the directory: held until both processes have closed it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        os.close(self._fd)


class _TrainerEndedError(TransferError):
    """The trainer is gone in the middle of a step."""


class _WindowModel:
    """The trainer's parameters in one step, chunk by chunk through shared memory. A StepModel."""

    def __init__(self, link: EngineLink, windows: SharedWindows, due: Collection[int]) -> None:
        """`due`: the parameters that have a gradient, as far as it is known by now."""
        self._link, self._windows = link, windows
        self._due, self._written = set(due), set[int]()
        self._window = 0

    def plan(self, chunks: Sequence[int]) -> None:
        self._link.send({"chunks": list(chunks)})

    def ready(self, chunk: int) -> bool:
        found = self._link.receive()
        if found is None:
            raise _TrainerEndedError("the trainer has ended")
        message = found[0]
        if "end" in message:
            return False
        assert message["chunk"] == chunk
        self._window = message["window"]
        self._due, self._written = set(message["due"]), set(message["written"])
        return True

    def has_gradient(self, parameter: int) -> bool:
        return parameter in self._due

    def was_written(self, parameter: int) -> bool:
        return parameter in self._written

    def gradient(self, piece: ParameterPiece) -> torch.Tensor:
        return self._windows.gradient(self._window, piece)

    def value(self, piece: ParameterPiece) -> torch.Tensor:
        return self._windows.value(self._window, piece)

    def put(self, piece: ParameterPiece, values: torch.Tensor) -> None:
        self._windows.value(self._window, piece).copy_(values)

    def end(self, chunk: int) -> None:
        self._link.send({"done": chunk})


class _Child:
    """Answers the trainer: each request gets one answer, and a step one more for each chunk."""

    def __init__(self, link: EngineLink, engine: ThreadEngine, windows: SharedWindows) -> None:
        self._link, self._engine, self._windows = link, engine, windows

    def serve(self) -> None:
        """Answer until the trainer closes its end."""
        while (found := self._link.receive()) is not None:
            message, payload = found
            try:
                self._do(message, payload)
                answer: dict[str, Any] = {"progress": asdict(self._engine.progress())}
            except _TrainerEndedError:
                return
            except Exception as error:  # noqa: BLE001 -- raised in the trainer
                answer = {"error": described(error)}
            self._link.send(answer)

    def _do(self, message: Message, payload: bytes) -> None:
        what = message.get("do")
        if what == "step":
            model = _WindowModel(self._link, self._windows, message["due"])
            early, then = message["early"], message["then"]
            self._engine.step(model, message["groups"], early=early, then=then)
        elif what == "early":
            model = _WindowModel(self._link, self._windows, ())
            self._engine.early(model, message["groups"], message["order"])
        elif what == "pin":
            extra = payload if message["extra"] else None
            self._engine.pin(message["step"], extra, message["groups"], held=message["held"])
        elif what == "unpin":
            self._engine.unpin(message["extras"])
        elif what == "history":
            self._engine.begin_history(message["name"])
        elif what == "wait":
            self._engine.wait()


def _engine(message: Message, layout: StateLayout, lock: int) -> ThreadEngine:
    store = GenerationStore(Path(message["directory"]), _InheritedLock(lock), layout)
    store.continue_from_generation(message["generation"])
    engine = ThreadEngine(store, EngineOptions(**message["options"]))
    engine.begin_history(message["history"])
    return engine


def main() -> None:
    """Serve one trainer; see the module."""
    end, memory, lock = map(int, sys.argv[1:])
    link = EngineLink(socket.socket(fileno=end))
    first = link.receive()
    if first is None:
        return
    message = first[0]
    linux.yield_to_others(_NICE)
    torch.set_num_threads(message["threads"])
    try:
        layout = read_layout(Path(message["directory"]))
        engine = _engine(message, layout, lock)
        windows = SharedWindows(memory, layout)
    except Exception as error:  # noqa: BLE001 -- raised in the trainer
        link.send({"error": described(error)})
        return
    link.send({"progress": asdict(engine.progress())})
    try:
        with contextlib.suppress(OSError):  # the trainer is gone and reads no answers
            _Child(link, engine, windows).serve()
    finally:
        engine.abandon()


if __name__ == "__main__":
    main()
