"""Content: what a rank writes in a save.

Streamed: the file of a snapshot that is larger than its slot, which has only the end of it.
"""

from __future__ import annotations

import bisect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch

from iobench.checkpoint.state_tree import Template
from iobench.errors import TransferError
from iobench.formats.tensor_layouts import Located
from iobench.writers.device.cuda import Device
from iobench.writers.image import AnyMemory, FileImage, HostBytes


@dataclass(frozen=True, kw_only=True)
class Content(ABC):
    """What this rank writes in a save: a file of tensors, and JSON around them, `skeleton`.

    `tensors` are those of the state, and then its arrays: the trainer's memory, before the copy.
    `number` is its number among the saves of all ranks, 0 in a job of one rank. `processes` of this
    machine copy at the same time. `streamed` has what is not copied.
    """

    structure: Template = field(repr=False)
    skeleton: str = field(repr=False)
    tensors: list[torch.Tensor] = field(repr=False)
    located: Located = field(repr=False)
    number: int = 0
    processes: int = 1
    streamed: Streamed | None = field(default=None, repr=False)

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of the tensors in the file of this rank."""

    @property
    def job_bytes(self) -> int:
        """Bytes of the tensors of all ranks, in rank 0."""
        return self.size_bytes

    @property
    def on_cpu(self) -> bool:
        """Whether all tensors are in host memory."""
        return self.structure.on_cpu

    @property
    def names(self) -> list[str]:
        """The names of `tensors`."""
        return self.structure.names

    @abstractmethod
    def image(self) -> FileImage:
        """Return the file on the trainer's own memory, which must not change.

        Only tensors that are not contiguous are copied.
        """

    def whole_image(self) -> FileImage:
        """Like `image`, with the checksums that the format has in the file."""
        return self.image()

    def piece_end(self, position: int) -> int:
        """Return the first byte, from `position` on, whose checksum depends on none before it."""
        return position

    def to_be_copied_later(self) -> Self:
        """Return the same for a copy while the trainer goes on: arrays are copied at once."""
        structure = self.structure
        tensors, located = structure.layouts.held(self.tensors, structure.tensor_count)
        return replace(self, tensors=tensors, located=located)

    def without_memory(self, streamed: Streamed | None = None) -> Self:
        """Return what is needed after the copy: it keeps no tensor and no array alive."""
        return replace(self, tensors=[], located=Located.nowhere(), streamed=streamed)


class Contents(Protocol):
    """What a save writes of a state: all of it, or the part of this rank."""

    def local(self, state: Any) -> Any:
        """Look at the state of this rank, and ask no other one.

        Raises StateError with the path of what cannot be saved.
        """

    def facts(self, local: Any) -> Mapping[str, Any]:
        """Return what the other ranks must know of it: nothing where there are none."""
        del local
        return {}

    def content(self, number: int, local: Any, every: list[Any]) -> Any:
        """Return what this rank writes; `every` has the facts of each rank.

        Raises StateError, in all ranks alike.
        """
        del number, every
        return local

    def content_ahead(self, local: Any) -> Any:
        """Return what this rank will write if no rank has a new structure, without a number.

        None if it must ask the others, and if there are none.
        """
        del local
        return None


class Streamed:
    """A file whose bytes before `begin` a writer takes from the memory of the state.

    The rest is copied to the slot at the same time. `taken` is set when the state may change: the
    rest is in the slot, and the writer and the checksums have read the bytes before it; or the save
    has ended. Thread-safe. No method waits for another thread to begin something: at the end of the
    interpreter, one thread does all of it.
    """

    def __init__(
        self,
        begin: int,
        head: FileImage,
        copy: Callable[[FileImage], None],
        check: Callable[[], None],
    ) -> None:
        """`head` is the file in the memory of the state, with all of its checksums.

        `copy(head)` copies the rest. `check` raises StateError if the state has changed before
        `taken`.
        """
        self.begin, self.devices = begin, head.devices()
        self.taken = threading.Event()
        self._head: FileImage | None = head
        self._copy: Callable[[FileImage], None] | None = copy
        self._check: Callable[[], None] | None = check
        self._error: BaseException | None = None
        self._lock = threading.RLock()

    def image(self, rest: FileImage) -> FileImage:
        """Return the file for one write. `rest` has its bytes from `begin` on."""
        return StreamedImage(rest, self)

    def head(self) -> FileImage:
        """Return the file in the memory of the state. Raises what failed.

        Raises TransferError after `taken`: the state may have changed.
        """
        self.raise_failure()
        head = self._head
        if head is None:
            raise TransferError(
                "a state larger than the budget cannot be written again: it may have changed"
            )
        return head

    def copy_rest(self) -> None:
        """Copy the bytes from `begin` on, unless that was done. Raises what failed."""
        with self._lock:
            self.raise_failure()
            head, copy = self._head, self._copy
            if head is None or copy is None:
                return
            try:
                copy(head)
            except BaseException as error:
                self.fail(error)
                raise
            self._copy = None

    def finish(self) -> None:
        """Note that the bytes before `begin` were read. What fails here is raised later."""
        with self._lock:
            try:
                self.copy_rest()
                check = self._check
                if check is not None:
                    check()
            except BaseException as error:  # noqa: BLE001 -- raised by `raise_failure`
                self.fail(error)
            self.end()

    def fail(self, error: BaseException) -> None:
        """Let the save fail with `error`, unless it has ended; the state may change."""
        self._error = self._error or error
        self.end()

    def end(self) -> None:
        """Give the memory of the state back."""
        self._head = self._copy = self._check = None
        self.taken.set()

    @property
    def failed(self) -> bool:
        """Whether the save fails."""
        return self._error is not None

    def raise_failure(self) -> None:
        """Raise what failed."""
        if self._error is not None:
            raise self._error


class StreamedImage(FileImage):
    """The whole file of a Streamed, for one write. See FileImage."""

    def __init__(self, rest: FileImage, streamed: Streamed) -> None:
        on_device = bool(streamed.devices)
        self._describe(rest.path, [0], rest.size_bytes, on_device=on_device)
        self.begin, self._rest, self._streamed = streamed.begin, rest, streamed
        self._ranges: list[tuple[int, int]] = []
        self._position, self._hashed = 0, False
        self._lock = threading.Lock()

    def _cut(self, first: int, last: int, begin: int, end: int) -> list[AnyMemory]:
        del first, last  # there is one part
        found: list[AnyMemory] = []
        if begin < self.begin:
            found += self._streamed.head().pieces(begin, min(end, self.begin))
        if end > self.begin:
            self._streamed.copy_rest()
            found += self._rest.pieces(max(begin, self.begin), end)
        return found

    def devices(self) -> list[Device]:
        return self._streamed.devices

    def parts(self) -> Iterator[tuple[int, AnyMemory]]:
        return FileImage.of_parts(self.path, self.pieces(0, self.size_bytes)).parts()

    def in_one_piece(self, start: int, stop: int) -> bool:
        """Whether they are in the slot. Memory of the state is copied, so that it is released."""
        return start >= self.begin and self._rest.in_one_piece(start, stop)

    def taken(self, start: int, stop: int, host_bytes: HostBytes) -> None:
        if start < self.begin:
            self._streamed.head().taken(start, min(stop, self.begin), host_bytes)

    def released(self, start: int, stop: int) -> None:
        if start >= self.begin:
            return
        with self._lock:
            bisect.insort(self._ranges, (start, stop))
            while self._ranges and self._ranges[0][0] <= self._position:
                self._position = max(self._position, self._ranges.pop(0)[1])
        self._finish_if_read()

    def hashed(self) -> None:
        """Note that the checksums of all pieces that begin before `begin` were computed."""
        self._hashed = True
        self._finish_if_read()

    def written(self) -> None:
        """Note that it was written, also by a writer that releases nothing. Raises what failed."""
        self._streamed.finish()
        self._streamed.raise_failure()

    def _finish_if_read(self) -> None:
        if self._hashed and self._position >= self.begin:
            self._streamed.finish()
