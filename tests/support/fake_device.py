"""FakeDevice: device memory without a device. It copies as late as possible.

    make = functools.partial(on_device(MyWriter, FakeDevice()), threads=3)
    iobench.testing.check_writer(make, "/mnt/scratch")

This first moves the memory of every image to the device. A copy is made only when a caller waits
for it: code that forgets to wait always moves wrong bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import pytest
import torch

from iobench import linux
from iobench.checkpoint import persister, serialized, slots, snapshot
from iobench.checkpoint.ranked import plan
from iobench.checkpoint.ranked.plan import RankContent
from iobench.checkpoint.serialized import Serialized
from iobench.errors import TransferError
from iobench.formats.tensors import tensor_bytes
from iobench.testing.content import BrokenImage
from iobench.writers.base import Writer
from iobench.writers.image import AnyMemory, Bytes, DeviceBytes, FileImage, Segment
from iobench.writers.transfer import Transfer

_NOT_YET = 0xDB  # the content of memory until the copy to it is made


class FakeBytes(DeviceBytes):
    """Memory of a FakeDevice. Only streams, `upload` and `download` read and write it."""

    def __init__(self, device: FakeDevice, memory: Bytes, breaks_at: int | None = None) -> None:
        self.device, self.memory, self.breaks_at = device, memory, breaks_at

    @property
    def address(self) -> int:
        return self.memory.ctypes.data

    @property
    def tensor(self) -> Any:
        """A CPU tensor that shares the memory, for restores into tensors of this device."""
        return torch.from_numpy(self.memory)

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, part: slice) -> Self:
        breaks = None
        if self.breaks_at is not None:
            breaks = self.breaks_at - part.indices(len(self))[0]
        return type(self)(self.device, self.memory[part], breaks)

    def check(self) -> None:
        """Raise TransferError when these bytes include the broken one."""
        if self.breaks_at is not None and 0 <= self.breaks_at < len(self):
            raise TransferError("a byte of the device is broken")


class _Queue:
    """Operations in order. Each is executed when a caller waits for it or for a later one."""

    def __init__(self) -> None:
        self._operations: list[Callable[[], None]] = []
        self._failed: dict[int, str] = {}  # no exceptions: their frames would live on
        self._done = 0
        self._lock = threading.RLock()

    def add(self, operation: Callable[[], None]) -> None:
        with self._lock:
            self._operations.append(operation)

    def __len__(self) -> int:
        with self._lock:
            return len(self._operations)

    @property
    def pending(self) -> int:
        return len(self) - self._done

    def run_to(self, position: int) -> None:
        """Execute the operations before `position`. Raises their failure, to every caller."""
        with self._lock:
            while self._done < position:
                self._done += 1
                try:
                    self._operations[self._done - 1]()
                except TransferError as error:
                    self._failed[self._done] = str(error)
                self._operations[self._done - 1] = _nothing
            for failed, why in self._failed.items():
                if failed <= position:
                    raise TransferError(why)


def _nothing() -> None:
    pass


class FakeDevice:
    """A device whose memory is host memory that code under test must not access.

    It counts `copies`, memory of copies that was not pinned (`pageable`), and the most operations
    that were ever queued at once (`most_pending`). With `pinnable=False` it refuses to pin.
    """

    def __init__(self, name: str = "fake:0", *, pinnable: bool = True) -> None:
        self.name, self.pinnable = name, pinnable
        self.copies = self.pageable = self.most_pending = 0
        self.streams: list[_FakeStream] = []
        self.pinned: dict[int, int] = {}
        self._here = threading.local()

    def __hash__(self) -> int:
        return id(self)

    @property
    def own(self) -> _Queue:
        """The operations that the calling thread has queued, like a trainer's kernels."""
        if not hasattr(self._here, "own"):
            self._here.own = _Queue()
        return cast(_Queue, self._here.own)

    @property
    def pending(self) -> int:
        """The number of operations of all streams that are not executed yet."""
        return sum(stream.queue.pending for stream in self.streams)

    @property
    def is_current(self) -> bool:
        """Whether it is the current device of the calling thread."""
        return getattr(self._here, "depth", 0) > 0

    @contextmanager
    def current(self) -> Iterator[None]:
        self._here.depth = getattr(self._here, "depth", 0) + 1
        try:
            yield
        finally:
            self._here.depth -= 1

    def stream(self) -> _FakeStream:
        self.streams = [stream for stream in self.streams if stream.queue.pending]
        stream = _FakeStream(self)
        self.streams.append(stream)
        return stream

    def pin(self, block: Bytes) -> str | None:
        if not self.pinnable:
            return "the fake device pins nothing"
        root = block
        while isinstance(root.base, np.ndarray):
            root = root.base
        self.pinned[root.ctypes.data] = root.nbytes
        return None

    def allocate(self, size_bytes: int) -> FakeBytes:
        room = np.full(size_bytes + linux.PAGE, _NOT_YET, dtype=np.uint8)
        begin = -room.ctypes.data % linux.PAGE
        return FakeBytes(self, room[begin : begin + size_bytes])

    def upload(self, data: Bytes) -> FakeBytes:
        """Return device memory that holds `data` after the calling thread's queued operations."""
        memory = np.full(len(data), _NOT_YET, dtype=np.uint8)
        kept = data.copy()
        self.own.add(lambda: np.copyto(memory, kept))
        return FakeBytes(self, memory)

    def download(self, memory: FakeBytes) -> Bytes:
        """Return the content of `memory` after all operations that the calling thread queued."""
        self.own.run_to(len(self.own))
        return memory.memory.copy()

    def is_pinned(self, block: Bytes) -> bool:
        """Return whether all of `block` is in pinned memory."""
        at, length = block.ctypes.data, len(block)
        known = self.pinned.copy()  # other workers may pin at the same time
        return any(s <= at and at + length <= s + size for s, size in known.items())


class _FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        self.device, self.queue = device, _Queue()
        caller, position = device.own, len(device.own)
        self.queue.add(lambda: caller.run_to(position))

    def copy(self, source: Any, destination: AnyMemory) -> None:
        within = [m for m in (source, destination) if isinstance(m, FakeBytes)]
        assert within, "no copy between host memories"
        for memory in (source, destination):
            if isinstance(memory, np.ndarray) and not self.device.is_pinned(memory):
                self.device.pageable += 1
        to, out = _raw(destination), _raw(source)
        assert len(to) == len(out)
        to[:] = _NOT_YET

        def move() -> None:
            for memory in within:
                memory.check()
            np.copyto(to, out)

        self.queue.add(move)
        self.device.copies += 1
        self.device.most_pending = max(self.device.most_pending, self.queue.pending)

    def wait(self) -> None:
        self.queue.run_to(len(self.queue))


def _raw(memory: Any) -> Bytes:
    return cast(Bytes, memory.memory if isinstance(memory, FakeBytes) else memory)


def states_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Let every tensor of a state that is saved count as one on a GPU, which is returned."""
    fake = FakeDevice()

    def memory_of(tensor: torch.Tensor) -> FakeBytes:
        return FakeBytes(fake, tensor_bytes(tensor))

    for kind in (Serialized, RankContent):
        monkeypatch.setattr(kind, "on_cpu", False)
    for module in (serialized, plan):
        monkeypatch.setattr(module, "tensor_memory", memory_of)
    monkeypatch.setattr(snapshot, "gpus_of", lambda _: [fake])
    for module in (snapshot, slots, persister):
        monkeypatch.setattr(module, "cuda_device", lambda _: fake)
    return fake


def on_device(writer_class: type[Writer], device: Any, *, mixed: bool = False) -> type[Writer]:
    """Return a subclass of `writer_class` that moves the memory of its images to `device`.

    A write uploads the image first, and a read downloads it afterwards. With `mixed`, every second
    segment stays on the host. `device` has `upload` and `download` like FakeDevice.
    """

    class OnDevice(writer_class):
        def write(self, image: FileImage, target: str | Path, **how: bool) -> Transfer:
            return cast(Transfer, super().write(_lifted(image, device, mixed), target, **how))

        def write_many(
            self, images: Iterable[FileImage], target: str | Path, **how: bool
        ) -> Transfer:
            lifted = [_lifted(image, device, mixed) for image in images]
            return cast(Transfer, super().write_many(lifted, target, **how))

        def read(self, image: FileImage, target: str | Path, **where: Any) -> Transfer:
            if not image.writable:
                return cast(Transfer, super().read(image, target, **where))
            lifted = _lifted(image, device, mixed)
            try:
                return cast(Transfer, super().read(lifted, target, **where))
            finally:
                for ours, theirs in zip(image.segments, lifted.segments, strict=True):
                    if isinstance(theirs.memory, DeviceBytes):
                        np.copyto(cast(Bytes, ours.memory), device.download(theirs.memory))

    OnDevice.__name__ = writer_class.__name__
    return OnDevice


def _lifted(image: FileImage, device: Any, mixed: bool) -> FileImage:
    """Return the image with its memory on the device; unchanged if some of it is there already."""
    if image.on_device:
        return image
    segments = []
    for number, segment in enumerate(image.segments):
        memory = segment.memory
        if not (mixed and number % 2):
            memory = device.upload(memory)
            if isinstance(image, BrokenImage):
                memory.breaks_at = image.breaks_at - segment.offset
        segments.append(Segment(offset=segment.offset, length=segment.length, memory=memory))
    return FileImage(path=image.path, segments=tuple(segments))
