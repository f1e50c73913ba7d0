"""S3Stream: collects writes in parts and uploads them in the background; `close` completes it."""

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
    """A stream to one object. It uses the memory of at most (threads + 1) parts.

    See Stream for when the object becomes visible. In a with-block, `close` sends the last part and
    raises its errors; a small object is then one request. Without a with-block, the garbage
    collector may call `close`, and it swallows errors. `flush` therefore sends everything and
    leaves only the completion. A write after `flush` sends the last part again, which only
    rclone's server refuses.
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
        self._filled = self._sent = self._flushed_bytes = 0
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
            self._flushed = False  # in a with-block, flush leaves the last part to close
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
        """Grow the block to at least `wanted` bytes. A small object never allocates a full part."""
        if len(self._block) >= wanted:
            return
        block = self._uploads.spare(size) if wanted > size // 2 else None
        if block is None:
            block = np.empty(min(size, max(2 * wanted, 1 << 16)), dtype=np.uint8)
        block[: self._filled] = self._block[: self._filled]
        self._block = block

    def _hand_over(self) -> None:
        """Submit the full part and start the next one."""
        if self._number == MOST_PARTS:
            raise TransferError(
                f"{self._object.path}: more than {MOST_PARTS:,} parts of "
                f"{self._parts.first_bytes} bytes; choose a larger part_size, or 0"
            )
        self._begin()
        block, self._block = self._block, self._block[:0]
        with self._meter.phase("upload"):
            self._uploads.submit(self._number, block, self._filled)
        self._sent += self._filled
        self._filled = self._flushed_bytes = 0
        self._number += 1

    def _begin(self) -> None:
        if not self._upload.begun:
            self._upload.begin(self._meter)

    def _drain(self) -> int:
        with self._meter.phase("upload"):
            self._uploads.drain()
        view = self._block[: self._filled]
        if self._closing and not self._upload.begun:
            self._object.small = [view]  # one PutObject publishes it
        elif self._entered and not self._closing:
            pass
        elif self._flushed_bytes != self._filled or not self._upload.begun:
            self._begin()
            self._upload.send(self._number, [view], self._meter)
            self._flushed_bytes = self._filled
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
    """The object of a stream, with the interface of the new file of a stream over files."""

    def __init__(self, upload: S3Upload, path: str, meter: Meter) -> None:
        self.path = path
        self._upload, self._meter, self._pid = upload, meter, os.getpid()
        self.small: list[Bytes] | None = None

    def set_size(self, size_bytes: int) -> None:
        """Do nothing: an object is as long as its parts."""

    def sync(self) -> None:
        """Do nothing: a part is durable once the store has answered."""

    def publish(self, *, sync_names: bool) -> None:  # noqa: ARG002 -- a key is always durable
        if self.small is not None:
            self._upload.put(self.small, self._meter)
        else:
            self._upload.complete(self._meter)

    def abandon(self) -> None:
        if os.getpid() == self._pid:  # in a forked child, the parent still owns the upload
            self._upload.abort()


@dataclass(frozen=True, kw_only=True)
class _Part:
    number: int
    block: Bytes
    size_bytes: int


class _BackgroundUploads:
    """Threads that upload parts. At most one part per thread is submitted and not yet sent."""

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
        """Take ownership of `block` and upload its first `size_bytes`.

        Raises the error of an earlier part.
        """
        self._channel.submit(Lease(_Part(number=number, block=block, size_bytes=size_bytes)))

    def drain(self) -> None:
        """Wait until no part is in flight. Raises the error of a part."""
        self._channel.drain()

    def spare(self, size_bytes: int) -> Bytes | None:
        """Return a free block of `size_bytes`, or None."""
        try:
            block = self._spare.pop()
        except IndexError:
            return None
        return block if len(block) == size_bytes else None

    def shutdown(self, meter: Meter) -> None:
        """Finish the submitted parts, end the threads and add their counts to `meter`.

        Interrupts are raised only after all threads have ended: S3 may keep a part that is in
        flight while its upload is aborted.
        """
        try:
            self._channel.close()
        finally:
            self._spare.clear()
        # The stream's own meter counts the time that it waits for these threads.
        for one in self._meters:
            meter.add(one, {})

    def afterwards(self, call: Callable[[], None]) -> None:
        """Run `call` once no thread uploads any more: now, or in the last thread."""
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
                self._channel.fail(error)  # before `stop`, which makes the other parts fail too
                self._upload.stop.set()
                raise

        self._channel.serve(send)
