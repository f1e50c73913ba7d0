"""EarlyUpdates: updates chunks while backward still makes the gradients of others.

Nothing can be wrong with a chunk that was updated early: it counts only if `step` finds what it was
made of unchanged, by content. Its new values reach the parameters in `step`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from iobench.offload.chunks import digest_of
from iobench.offload.engine import Engine
from iobench.offload.layout import ParameterPiece, StateLayout
from iobench.offload.parameters import kept_values
from iobench.offload.update import (
    ParameterMark,
    PinnedTransfer,
    TrainerModel,
    flat_view,
    gradient_of,
    in_fp32,
    marks_of,
    value_of,
)
from iobench.writers.blocks.interrupt_safe import Worker, uninterrupted

_LONGEST_PAUSE = 63


class _EarlyModel(TrainerModel):
    """The gradients that backward has made so far; new values go to memory of their own."""

    def __init__(
        self,
        layout: StateLayout,
        parameters: Sequence[torch.Tensor],
        marks: Sequence[ParameterMark],
        transfer: PinnedTransfer,
        staged: dict[int, torch.Tensor],
    ) -> None:
        super().__init__(parameters, marks, transfer)
        self._layout, self._staged = layout, staged
        self._seen = marks_of(parameters)
        self.gradients: dict[int, torch.Tensor] = {}
        """Given by the hooks: backward may replace `parameter.grad` at any time, without the GIL,
        so no other thread may look at it."""
        self.events: dict[int, torch.cuda.Event] = {}
        """When the gradients of CUDA parameters are complete."""
        self._prints: dict[ParameterPiece, int] = {}

    def has_gradient(self, parameter: int) -> bool:
        return parameter in self.gradients

    def gradient(self, piece: ParameterPiece, scratch: torch.Tensor) -> torch.Tensor:
        gradient = self.gradients[piece.parameter].detach().contiguous().view(-1)
        event = self.events.get(piece.parameter)
        here = self.transfer.to_host(gradient[piece.begin : piece.end], event)
        # Before the update reads it: a change between the two makes them differ.
        self._prints[piece] = _fingerprint(here)
        return in_fp32(here, scratch, self._parameters[piece.parameter])

    def put(self, piece: ParameterPiece, values: torch.Tensor) -> None:
        parameter = self._parameters[piece.parameter]
        if piece.parameter not in self._staged:
            self._staged[piece.parameter] = torch.empty(
                parameter.numel(),
                dtype=parameter.dtype,
                device="cpu",
                pin_memory=parameter.is_cuda,
            )
        self._staged[piece.parameter][piece.begin : piece.end].copy_(values)

    def still_right(self, chunk: int) -> bool:
        """Whether the parameters and gradients of `chunk` are what it was updated with."""
        return all(map(self._unchanged, self._layout.pieces(chunk)))

    def _unchanged(self, piece: ParameterPiece) -> bool:
        parameter = self._parameters[piece.parameter]
        if marks_of([parameter]) != [self._seen[piece.parameter]]:
            return False
        if parameter.grad is None or not self.has_gradient(piece.parameter):
            return parameter.grad is None and not self.has_gradient(piece.parameter)
        gradient = self.transfer.to_host(gradient_of(parameter, piece))
        return _fingerprint(gradient) == self._prints[piece]

    def install(self, chunk: int) -> None:
        """Give the new values of `chunk` to the parameters."""
        for piece in self._layout.pieces(chunk):
            if self.has_gradient(piece.parameter):
                values = self._staged[piece.parameter][piece.begin : piece.end]
                self.transfer.to_device(values, value_of(self._parameters[piece.parameter], piece))


class EarlyUpdates:
    """Runs `Engine.early` in a thread while backward runs.

    A chunk is updated when all its parameters have their gradients, in the order in which that
    happened in the last step. Holds no reference to the optimizer.
    """

    def __init__(
        self,
        engine: Engine,
        groups: Sequence[Mapping[str, Any]],
        marks: Sequence[ParameterMark],
        transfer: PinnedTransfer,
    ) -> None:
        """`transfer` is used by one thread at a time: by this one only before `finish`."""
        self._transfer = transfer
        self._engine, self._layout, self._groups = engine, engine.layout, groups
        self._parameters = [one for group in groups for one in group["params"]]
        self._chunks: list[list[int]] = [[] for _ in self._parameters]
        for chunk in range(self._layout.chunks):
            for piece in self._layout.pieces(chunk):
                self._chunks[piece.parameter].append(chunk)
        self._order = list(reversed(range(self._layout.chunks)))
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._changed = threading.Condition()
        self._staged: dict[int, torch.Tensor] = {}
        self._thread: Worker | None = None
        self._error: BaseException | None = None
        self._ignoring = self._warned = False
        self._pause = self._skip = 0
        self._begin(marks)

    def _begin(self, marks: Sequence[ParameterMark]) -> None:
        """Wait for the gradients of the next step."""
        self._marks = marks
        self._model: _EarlyModel | None = None
        self._values: Any = None
        self._arrived: set[int] = set()
        self._complete: list[int] = []
        self._done: list[int] = []
        self._missing = [0] * self._layout.chunks
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                self._watch(index, parameter)
                for chunk in self._chunks[index]:
                    self._missing[chunk] += 1
        self._stopped = self._skip > 0
        self._skip = max(self._skip - 1, 0)

    def _watch(self, index: int, parameter: torch.Tensor) -> None:
        if index not in self._hooks:
            self._hooks[index] = parameter.register_post_accumulate_grad_hook(
                lambda parameter: self._arrive(index, parameter)
            )

    # Called by backward.

    def _arrive(self, index: int, parameter: torch.Tensor) -> None:
        """Hook of a parameter: its gradient of this backward is complete."""
        if self._ignoring:
            return
        with self._changed:
            if self._stopped:
                return
            if index in self._arrived:  # a further backward: what came before was not final
                self._stopped = True
            elif parameter.grad is not None and parameter.grad.layout == torch.strided:
                self._arrived.add(index)
                model = self._started()
                model.gradients[index] = parameter.grad
                if parameter.is_cuda:
                    stream = torch.cuda.current_stream(parameter.device)
                    model.events[index] = stream.record_event()
                for chunk in self._chunks[index]:
                    self._missing[chunk] -= 1
                    if not self._missing[chunk]:
                        self._complete.append(chunk)
            self._changed.notify_all()

    def _started(self) -> _EarlyModel:
        if self._model is None:
            self._values = kept_values(self._groups)
            self._model = _EarlyModel(
                self._layout, self._parameters, self._marks, self._transfer, self._staged
            )
            self._thread = Worker(target=self._run, name="iobench-offload-early", daemon=True)
            self._thread.start()
        return self._model

    # The thread.

    def _run(self) -> None:
        assert self._model is not None
        try:
            self._engine.early(self._model, self._values, self._order, self._ready)
        except BaseException as error:  # noqa: BLE001 -- raised in the trainer's thread
            self._error = error

    def _ready(self, chunk: int) -> bool:
        """Wait until the gradients of `chunk` are there; False: the pass stops before it."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._missing[chunk] == 0)
            return not self._stopped

    # Called by the optimizer.

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Gradients that arrive inside are not final."""
        before, self._ignoring = self._ignoring, True
        try:
            yield
        finally:
            self._ignoring = before

    def stop(self) -> None:
        """Let the engine end the early part of its pass, if it has begun one. Raises its failure,
        once."""
        if self._model is None:
            return
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            uninterrupted(self._thread.join)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def forget(self) -> None:
        """Stop, and let nothing count that was updated early."""
        self.stop()
        self._model = None

    def finish(self, values: Any) -> list[int]:
        """Stop; return the chunks that are done, with these values of the groups."""
        self.stop()
        model, self._done = self._model, list(self._engine.updated_early)
        if model is None or values != self._values:
            return []
        return [chunk for chunk in self._done if model.still_right(chunk)]

    @property
    def order(self) -> list[int]:
        """The order in which chunks can be updated in the next step, as far as it is known."""
        if self._complete:
            others = set(self._complete)
            late = [chunk for chunk in self._order if chunk not in others]
            self._order = [*self._complete, *late]
        return self._order

    def install(self, chunks: Sequence[int]) -> None:
        """Give the new values of these chunks to the parameters."""
        for chunk in chunks:
            assert self._model is not None
            self._model.install(chunk)

    def next(self, marks: Sequence[ParameterMark], counted: Sequence[int]) -> None:
        """The step is over, and these chunks of it were done early: prepare the next one."""
        done = 0 if self._model is None else len(self._done)
        again = done - len(counted)
        if again:
            self._pause = min(2 * self._pause + 1, _LONGEST_PAUSE)
            self._skip = self._pause
            self._warn(again)
        elif done:
            self._pause = 0
        self._begin(marks)

    def _warn(self, again: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{again} of {self._layout.chunks} chunks were updated during backward and again "
                "in step(): gradients, parameters or values of the groups have changed in between. "
                "Results are right, but these chunks were written twice; now and after each such "
                "step, the next steps have no overlap, up to 63. With gradient accumulation, put "
                "all backward calls but the last into `with optimizer.accumulate():`",
                RuntimeWarning,
                stacklevel=4,
            )

    def close(self) -> None:
        """Remove the hooks and end the thread. The garbage collector may call it in any thread."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            uninterrupted(thread.join)


def _fingerprint(tensor: torch.Tensor) -> int:
    return digest_of(flat_view(tensor).view(torch.uint8).numpy())
