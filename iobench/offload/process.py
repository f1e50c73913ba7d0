"""ProcessEngine: the engine in a process of its own, with less priority than the trainer."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict

import torch

from iobench.dist.messages import Message
from iobench.errors import TransferError, UsageError
from iobench.offload.engine import EngineOptions, EngineProgress, Groups, ThreadEngine
from iobench.offload.link import EngineLink, raise_described
from iobench.offload.model import TrainerModel
from iobench.offload.store import GenerationStore
from iobench.offload.windows import WINDOWS, SharedWindows

__all__ = ["ProcessEngine"]

_END_S = 60.0


class _Borrowed:
    """The lock of the directory for a store that must not release it."""

    def release(self) -> None:
        """Keep it."""


class ProcessEngine:
    """A ThreadEngine in a child process, which reads, updates and writes. An Engine.

    Gradients go there and values come back through shared memory, a few chunks at a time. The child
    holds the trainer's lock of the directory too: the child of a dead trainer ends by itself, and a
    new trainer gets the lock after that.
    """

    def __init__(self, store: GenerationStore, options: EngineOptions) -> None:
        """Hand the directory of `store` over to the child; close `store` also if that fails."""
        self.options, self.layout, self._directory = options, store.layout, store.directory
        base = store.base
        self._fresh = base is None
        self._base = None if base is None else base.generation
        """The generation to go on from; None: the newest one."""
        self._history = secrets.token_hex(8)
        self._failure: BaseException | None = None
        self._lock = store.hand_over()
        self._memory = -1
        self._link: EngineLink | None = None
        self._child: subprocess.Popen[bytes] | None = None
        try:
            self._windows, self._memory = SharedWindows.create(store.layout)
            self._start()
        except BaseException:
            self.abandon()
            raise

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno(), self._memory, self._lock.fileno()]
            self._link = EngineLink(ours)
            self._child = subprocess.Popen(
                [sys.executable, "-m", "iobench.offload.child", *map(str, fds)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C reaches the trainer alone
                # Threads of OpenMP that spin between two chunks took two thirds of its CPU time
                # (0.66 and 0.20 s a step of 60 million parameters, two cores).
                env={"OMP_WAIT_POLICY": "passive", **os.environ},
            )
        self._ask(
            {
                "directory": str(self._directory),
                "generation": self._base,
                "history": self._history,
                "options": asdict(self.options),
                "threads": torch.get_num_threads(),
            }
        )

    # An Engine.

    @property
    def reported(self) -> bool:
        """See Engine: only methods find a failure."""
        return self._failure is not None

    @property
    def ended(self) -> bool:
        """See Engine."""
        child = self._child  # None while the child is started again: all was durable before
        return self._failure is not None or child is None or child.poll() is not None

    def early(self, model: TrainerModel, groups: Groups, order: Sequence[int]) -> None:
        """See Engine."""
        self._pass({"do": "early", "groups": groups, "order": list(order)}, model)

    def step(
        self,
        model: TrainerModel,
        groups: Groups,
        *,
        early: Collection[int] = (),
        then: Sequence[int] | None = None,
    ) -> None:
        """See Engine."""
        due = [n for n in range(len(self.layout.parameters)) if model.has_gradient(n)]
        order = None if then is None else list(then)
        step = {"do": "step", "groups": groups, "due": due, "early": list(early), "then": order}
        self._pass(step, model)
        self._fresh, self._base = False, None

    def _pass(self, message: Message, model: TrainerModel) -> None:
        """Let the child update chunks, in its order, as long as `model` is ready for them."""
        link = self._running()
        try:
            _send(link, message)
            chunks = self._message(link)["chunks"]
            sent = taken = 0
            with torch.no_grad():
                for chunk in chunks:
                    if not model.ready(chunk):
                        _send(link, {"end": True})
                        break
                    if sent - taken == WINDOWS:
                        self._take_values(link, chunks[taken], taken % WINDOWS, model)
                        taken += 1
                    _send(link, self._put_chunk(chunk, sent % WINDOWS, model))
                    sent += 1
                for number in range(taken, sent):
                    self._take_values(link, chunks[number], number % WINDOWS, model)
            self._progress = self._answer(link)
        except BaseException as error:
            self._fail(error)
            raise

    def pin(self, step: int, extra: bytes | None, groups: Groups, *, held: bool = False) -> None:
        """See Engine."""
        given = extra is not None
        message = {"do": "pin", "step": step, "extra": given, "groups": groups, "held": held}
        self._ask(message, extra or b"")
        self._base = None

    def unpin(self, extras: Sequence[str]) -> None:
        """See Engine."""
        self._ask({"do": "unpin", "extras": list(extras)})

    def begin_history(self, name: str) -> None:
        """See Engine."""
        self._ask({"do": "history", "name": name})
        self._history = name

    def wait(self) -> None:
        """See Engine."""
        self._ask({"do": "wait"})

    def progress(self) -> EngineProgress:
        """See Engine."""
        self._ask({"do": "progress"})
        return self._progress

    @contextmanager
    def local(self) -> Iterator[ThreadEngine]:
        """Provide an engine in this process on the same state; the child ends and starts again."""
        self.wait()
        self._end_child()
        store = GenerationStore(self._directory, _Borrowed(), self.layout)
        store.continue_from_generation(self._base)
        engine = ThreadEngine(store, self.options)
        engine.begin_history(self._history)
        try:
            yield engine
            engine.wait()
            self._fresh = self._fresh and store.base is None
        finally:
            engine.abandon()
            self._base = None if store.base is store.newest else self._base
            self._start()

    def close(self) -> None:
        """See Engine."""
        try:
            self.wait()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """See Engine."""
        self._failure = self._failure or TransferError("the engine is closed")
        try:
            self._end_child()
        finally:
            self._release()

    # Chunks.

    def _put_chunk(self, chunk: int, window: int, model: TrainerModel) -> Message:
        """Put the gradients into the window, and the values that the child does not compute.

        Returns what the child must know of the chunk.
        """
        pieces = self.layout.pieces(chunk)
        due = [one.parameter for one in pieces if model.has_gradient(one.parameter)]
        written = [one.parameter for one in pieces if model.was_written(one.parameter)]
        for piece in pieces:
            if piece.parameter in due:
                self._windows.gradient(window, piece).copy_(model.gradient(piece))
            if self._fresh or piece.parameter in written or piece.parameter not in due:
                self._windows.value(window, piece).copy_(model.value(piece))
        return {"chunk": chunk, "window": window, "due": due, "written": written}

    def _take_values(self, link: EngineLink, chunk: int, window: int, model: TrainerModel) -> None:
        message = self._message(link)
        assert message == {"done": chunk}
        for piece in self.layout.pieces(chunk):
            if model.has_gradient(piece.parameter):
                model.put(piece, self._windows.value(window, piece))
        model.end(chunk)

    # The child.

    def _running(self) -> EngineLink:
        if self._failure is not None or self._link is None:
            raise TransferError(
                f"the offload engine has failed: {self._failure}. What is durable is intact: "
                "continue with resume"
            ) from self._failure
        return self._link

    def _ask(self, message: Message, payload: bytes = b"") -> None:
        link = self._running()
        try:
            _send(link, message, payload)
            self._progress = self._answer(link)
        except UsageError:  # of this request alone
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def _answer(self, link: EngineLink) -> EngineProgress:
        found = self._message(link)["progress"]
        return EngineProgress(**{**found, "pinned": tuple(found["pinned"])})

    def _message(self, link: EngineLink) -> Message:
        """Return the next message. Raises its error, or TransferError when the child has ended."""
        try:
            found = link.receive()
        except OSError:
            found = None
        if found is None:
            assert self._child is not None
            code = self._child.wait(_END_S)
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise TransferError(f"the engine process {self._child.pid} has ended {how}")
        if "error" in found[0]:
            raise_described(found[0]["error"])
        return found[0]

    def _fail(self, error: BaseException) -> None:
        """Keep the first failure and end the child: it may be in the middle of a step."""
        self._failure = self._failure or error
        self._end_child()

    def _end_child(self) -> None:
        """Close our end; wait until the child has finished what was submitted, and has ended."""
        link, self._link = self._link, None
        child, self._child = self._child, None
        if link is not None:
            link.close()
        if child is None:
            return
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:  # storage hangs, or it was stopped
            child.kill()
            child.wait()

    def _release(self) -> None:
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1
        self._lock.release()


def _send(link: EngineLink, message: Message, payload: bytes = b"") -> None:
    """Send to the child. If it has ended, the wait for its answer says how."""
    with suppress(ConnectionError):
        link.send(message, payload)
