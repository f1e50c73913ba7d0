"""DirectStream: collects bytes in aligned blocks and writes these in the background."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import numpy as np

from iobench.errors import TransferError
from iobench.units import GIB
from iobench.writers.direct.background import BackgroundWriter
from iobench.writers.image import Bytes
from iobench.writers.local.new_file import NewFile
from iobench.writers.stream import Stream
from iobench.writers.transfer import Meter

__all__ = ["DirectStream"]

_RESERVE_STEP = GIB
_RESERVE_ROOM = 4 * _RESERVE_STEP  # with less free space, nothing is reserved ahead


class DirectStream(Stream):
    """A stream past the page cache. It uses one block more than `background` has in flight."""

    def __init__(
        self,
        file: NewFile,
        writer: str,
        meter: Meter,
        *,
        background: BackgroundWriter,
        alignment: int,
        reserve_ahead: bool,
        rest: Callable[[Bytes, int], None] | None = None,
        close: Callable[[], None],
    ) -> None:
        """`rest` writes what fills no block, at a flush or the end; by default with padding."""
        self._rest, self._close_file = rest, close
        super().__init__(file, writer, meter)
        self._new_file, self._alignment = file, alignment
        self._reserve_ahead, self._reserved_to = reserve_ahead, 0
        self._background, self._pool = background, background.pool
        self._block: Bytes = self._pool.take()
        self._filled = 0
        self._offset = 0

    @property
    def _position(self) -> int:
        return self._offset + self._filled

    def _append(self, data: Bytes) -> None:
        taken = 0
        while taken < len(data):
            count = min(len(data) - taken, len(self._block) - self._filled)
            with self._meter.phase("gather"):
                np.copyto(
                    self._block[self._filled : self._filled + count], data[taken : taken + count]
                )
            self._filled += count
            taken += count
            if self._filled == len(self._block):
                self._hand_over()

    def _hand_over(self) -> None:
        """Submit the full block and continue with another one."""
        self._reserve()
        # Drop our reference first, in case of an interrupt: a block that is given back twice would
        # be used by two owners at once.
        block, self._block = self._block, self._block[:0]
        with self._meter.phase("write"):
            self._background.submit(block, self._offset)
        self._offset += self._filled
        self._filled = 0
        self._block = self._pool.take()

    def _reserve(self) -> None:
        end = self._offset + len(self._block)
        if not self._reserve_ahead or end <= self._reserved_to:
            return
        # A fallocate that fails has taken all free space until then, also from other processes.
        room = os.fstatvfs(self._new_file.fd)
        if room.f_bavail * room.f_frsize < _RESERVE_ROOM:
            self._reserve_ahead = False
            return
        try:
            self._new_file.reserve(self._reserved_to, self._reserved_to + _RESERVE_STEP)
        except TransferError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            self._reserve_ahead = False  # less than a step is free; the writes may still succeed
            os.ftruncate(self._new_file.fd, self._reserved_to)
            return
        self._reserved_to += _RESERVE_STEP

    def _drain(self) -> int:
        with self._meter.phase("write"):
            self._background.drain()
        if self._filled and self._rest is not None:
            self._rest(self._block[: self._filled], self._offset)
        elif self._filled:
            # O_DIRECT needs whole units of the alignment; `set_size` cuts off the padding.
            padded = -(-self._filled // self._alignment) * self._alignment
            # After a failure the kernel may still use the block: it does not return to the pool.
            block, self._block = self._block, self._block[:0]
            self._background.put(block[:padded], self._offset, self._meter)
            self._block = block
        return self._position

    def _release(self) -> None:
        try:
            self._background.shutdown(self._meter, drop=self._failure is not None)
        finally:
            if len(self._block):
                self._pool.give(self._block)
            self._afterwards(self._close_file)

    def _afterwards(self, call: Callable[[], None]) -> None:
        self._background.afterwards(call)
