"""DeviceCopies: copies between host memory and devices, and the wait for them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any, Self, cast

import numpy as np

from iobench.writers.blocks.interrupt_safe import uninterrupted
from iobench.writers.device.base import CopyStream, Device, DeviceBytes
from iobench.writers.image import AnyMemory, Bytes

__all__ = ["DeviceCopies"]


class DeviceCopies:
    """One stream per device, ordered after everything that the calling thread has queued there.

    Make it in the thread whose work the copies follow: the current stream belongs to the thread.
    After that it is safe to use from many threads. On exit of a `with`, also after an error, no
    copy is in flight: their memory may be freed or used again.
    """

    def __init__(self, devices: Iterable[Device]) -> None:
        self._streams: dict[Device, CopyStream] = {}
        for device in devices:
            self.on(device)

    def on(self, device: Device) -> CopyStream:
        """Return the stream of `device`. If it is new, it is ordered after this thread's work."""
        found = self._streams.get(device)
        return found or self._streams.setdefault(device, device.stream())

    def make(self, pairs: Iterable[tuple[AnyMemory, AnyMemory]]) -> None:
        """Copy each (source, destination) of equal length, and wait for these copies.

        None is in flight afterwards, also after an error. Raises TransferError.
        """
        used: dict[CopyStream, None] = {}
        try:
            for source, destination in pairs:
                memory = next(
                    (m for m in (source, destination) if isinstance(m, DeviceBytes)), None
                )
                if memory is None:
                    np.copyto(cast(Bytes, destination), cast(Bytes, source))
                    continue
                stream = self.on(memory.device)
                used[stream] = None
                stream.copy(source, destination)
        finally:
            _wait_for_all(used)

    def wait(self) -> None:
        """Wait until all copies queued so far are done, also after Ctrl-C. Raises TransferError."""
        _wait_for_all(tuple(self._streams.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.wait()


def _wait_for_all(streams: Iterable[CopyStream]) -> None:
    with contextlib.ExitStack() as waits:  # goes on with the others after one that failed
        for stream in streams:
            waits.callback(uninterrupted, functools.partial(_wait_for, stream))


def _wait_for(stream: CopyStream) -> None:
    stream.mark()()
