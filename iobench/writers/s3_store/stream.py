"""S3Stream: what is written fills parts, uploaded in the background; closing completes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from iobench.errors import TransferError
from iobench.writers.blocks.channel import Channel, Lease
from iobench.writers.image import Bytes
from iobench.writers.s3_store.parts import MOST_PARTS, StreamParts
from iobench.writers.s3_store.upload import S3Upload
from iobench.writers.stream import Stream
from iobench.writers.transfer import Meter

__all__ = ["S3Stream"]


class S3Stream(Stream):
    """Memory is bounded by (threads + 1) parts. See Stream for when the object becomes visible.

    In a with-block the last part goes with `close`, which raises what goes wrong; a small object
    is then one request. Elsewhere `close` may be left to the collector, which swallows errors, so
    `flush` sends everything and leaves only the completion to do. What is written after it sends
    the last part once more; rclone's server alone refuses that.
    """

    def __init__(
        self,
        upload: S3Upload,
        path: str,
        writer: str,
        meter: Meter,
        *,
        parts: StreamParts,
        threads: int,
    ) -> None:
        self._object = _NewObject(upload, path, meter)
        super().__init__(self._object, writer, meter)
        self._upload, self._parts = upload, parts
        self._uploads = _BackgroundUploads(upload, threads)
        self._number = 1
        self._block: Bytes = np.empty(0, dtype=np.uint8)
        self._filled = self._sent = self._settled = 0
        self._entered = self._closing = False

    @property
    def _position(self) -> int:
        return self._sent + self._filled

    def __enter__(self) -> Self:
        self._entered = True
        return super().__enter__()

    def close(self) -> None:
        self._closing = True
        if self._entered and not self.closed:
            self._flushed = False  # flush has left the last part to us
        super().close()

    def _append(self, data: Bytes) -> None:
        taken = 0
        while taken < len(data):
            size = self._parts.size(self._number)
            if self._filled == size:
                self._hand_over()
                continue
            self._make_room(min(size, self._filled + len(data) - taken), size)
            count = min(len(data) - taken, len(self._block) - self._filled)
            with self._meter.phase("gather"):
                np.copyto(
                    self._block[self._filled : self._filled + count], data[taken : taken + count]
                )
            self._filled += count
            taken += count

    def _make_room(self, wanted: int, size: int) -> None:
        """Have at least `wanted` bytes of block; small objects never pay for a whole part."""
        if len(self._block) >= wanted:
            return
        block = self._uploads.spare(size) if wanted > size // 2 else None
        if block is None:
            block = np.empty(min(size, max(2 * wanted, 1 << 16)), dtype=np.uint8)
        block[: self._filled] = self._block[: self._filled]
        self._block = block

    def _hand_over(self) -> None:
        """Hand the full part over and go on with the next."""
        if self._number == MOST_PARTS:
            raise TransferError(
                f"{self._object.path}: more than {MOST_PARTS:,} parts of "
                f"{self._parts.first_bytes} bytes; choose a larger part_size, or 0"
            )
        self._begin()
        block, self._block = self._block, self._block[:0]
        with self._meter.phase("wait"):
            self._uploads.submit(self._number, block, self._filled)
        self._sent += self._filled
        self._filled = self._settled = 0
        self._number += 1

    def _begin(self) -> None:
        if not self._upload.begun:
            self._upload.begin(self._meter)

    def _drain(self) -> int:
        with self._meter.phase("wait"):
            self._uploads.drain()
        view = self._block[: self._filled]
        if self._closing and not self._upload.begun:
            self._object.small = [view]  # to be published by one request
        elif self._entered and not self._closing:
            pass
        elif self._settled != self._filled or not self._upload.begun:
            self._begin()
            self._upload.send(self._number, [view], self._meter)
            self._settled = self._filled
        return self._position

    def _release(self) -> None:
        if self._failure is not None:
            self._upload.stop.set()
        self._block = self._block[:0]
        self._object.small = None
        self._uploads.shutdown(self._meter)

    def _afterwards(self, call: Callable[[], None]) -> None:
        self._uploads.afterwards(call)


class _NewObject:
    """Stands where a stream over files has its new file."""

    def __init__(self, upload: S3Upload, path: str, meter: Meter) -> None:
        self.path = path
        self._upload, self._meter, self._pid = upload, meter, os.getpid()
        self.small: list[Bytes] | None = None

    def set_size(self, size_bytes: int) -> None:
        """An object is as long as its parts."""

    def sync(self) -> None:
        """A part is durable once it is answered for."""

    def publish(self, *, sync_names: bool) -> None:  # noqa: ARG002 -- a name is never not durable
        if self.small is not None:
            self._upload.put(self.small, self._meter)
        else:
            self._upload.complete(self._meter)

    def abandon(self) -> None:
        if os.getpid() == self._pid:  # a forked child's parent goes on with the upload
            self._upload.abort()


@dataclass(frozen=True, kw_only=True)
class _Part:
    number: int
    block: Bytes
    size_bytes: int


class _BackgroundUploads:
    """Threads that upload parts; at most as many parts are submitted and not sent as threads."""

    def __init__(self, upload: S3Upload, threads: int) -> None:
        self._upload = upload
        self._meters: list[Meter] = []
        self._spare: list[Bytes] = []
        self._channel: Channel[_Part] = Channel(
            self._work,
            name="iobench-s3",
            workers=threads,
            limit=threads,
            release=lambda part: self._spare.append(part.block),
        )

    def submit(self, number: int, block: Bytes, size_bytes: int) -> None:
        """Take `block` over and upload its first bytes. Raises what an earlier part raised."""
        self._channel.submit(Lease(_Part(number=number, block=block, size_bytes=size_bytes)))

    def drain(self) -> None:
        """Wait until no part is on its way. Raises what a part raised."""
        self._channel.drain()

    def spare(self, size_bytes: int) -> Bytes | None:
        """A block of `size_bytes` that a part is done with, if there is one."""
        try:
            block = self._spare.pop()
        except IndexError:
            return None
        return block if len(block) == size_bytes else None

    def shutdown(self, meter: Meter) -> None:
        """End the threads, once they have finished what was submitted; count it in `meter`.

        Interrupts are raised when all have ended: an aborted upload that still gets parts keeps
        them.
        """
        try:
            self._channel.close()
        finally:
            self._spare.clear()
        if self._meters:
            meter.absorb(self._meters)

    def afterwards(self, call: Callable[[], None]) -> None:
        """`call` once no thread uploads any more: now, or in the last thread."""
        self._channel.afterwards(call)

    def _work(self) -> None:
        meter = Meter()
        self._meters.append(meter)

        def send(part: _Part) -> None:
            if self._upload.stop.is_set():
                return
            try:
                self._upload.send(part.number, [part.block[: part.size_bytes]], meter)
            except BaseException as error:
                self._channel.fail(error)  # first: stopped, others fail of that
                self._upload.stop.set()
                raise

        self._channel.serve(send)
