"""PartSink: uploads the blocks of a stream as the parts of an object; `publish` completes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from iobench.errors import TransferError
from iobench.writers.blocks.channel import Channel, Lease
from iobench.writers.image import Bytes
from iobench.writers.s3_store.parts import MOST_PARTS, StreamParts
from iobench.writers.s3_store.upload import S3Upload
from iobench.writers.stream import Sink
from iobench.writers.transfer import Meter

__all__ = ["PartSink"]

_LEAST = 1 << 16


@dataclass(frozen=True, kw_only=True)
class _Part:
    number: int
    block: Bytes


class PartSink(Sink):
    """One object as the sink and as the new file of a stream. A block is a part.

    `threads` threads upload parts, and at most one part for each is submitted and not yet sent. The
    stream uses the memory of at most (threads + 1) parts. A small object is one request, without an
    upload. When the stream is drained before its end, the last part is sent. If more bytes follow,
    it is sent again, which only rclone's server refuses.
    """

    keeps_last = True

    def __init__(
        self, upload: S3Upload, path: str, meter: Meter, *, parts: StreamParts, threads: int
    ) -> None:
        self.path = path
        self._upload, self._meter, self._parts = upload, meter, parts
        self._pid, self._number = os.getpid(), 1
        self.block_size = parts.size(1)
        self._sent_bytes = 0  # of the last part
        self._small: list[Bytes] = []
        self._meters: list[Meter] = []
        self._spare: list[Bytes] = []
        self._channel: Channel[_Part] = Channel(
            self._work,
            name="iobench-s3",
            workers=threads,
            limit=threads,
            release=lambda part: self._spare.append(part.block),
        )

    # The sink.

    def block(self, at_least: int) -> Bytes:
        """Return a block that is larger than `at_least`: a small object allocates no full part."""
        size = self.block_size
        if at_least > size // 2 and self._spare:
            block = self._spare.pop()
            if len(block) == size:
                return block
        return np.empty(min(size, max(2 * at_least, _LEAST)), dtype=np.uint8)

    def put(self, block: Bytes, offset: int) -> None:  # noqa: ARG002 -- the number says it
        if self._number == MOST_PARTS:
            raise TransferError(
                f"{self.path}: more than {MOST_PARTS:,} parts of {self._parts.first_bytes} bytes; "
                "choose a larger part_size, or 0"
            )
        self._begin()
        with self._meter.phase("upload"):
            self._channel.submit(Lease(_Part(number=self._number, block=block)))
        self._number += 1
        self._sent_bytes, self.block_size = 0, self._parts.size(self._number)

    def drain(self, block: Bytes, filled: int, offset: int, *, last: bool) -> None:  # noqa: ARG002
        with self._meter.phase("upload"):
            self._channel.drain()
        view = block[:filled]
        if last and not self._upload.begun:
            self._small = [view]  # one PutObject publishes it
        elif filled and filled != self._sent_bytes:
            self._begin()
            self._upload.send(self._number, [view], self._meter)
            self._sent_bytes = filled

    def release(self, block: Bytes, *, failed: bool) -> None:  # noqa: ARG002
        """End the threads and add their counts to the meter of the stream.

        Interrupts are raised only after all threads have ended: S3 may keep a part that is in
        flight while its upload is aborted.
        """
        if failed:
            self._upload.stop.set()
        self._small = []
        try:
            self._channel.close()
        finally:
            self._spare.clear()
        # The stream's own meter counts the time that it waits for these threads.
        for one in self._meters:
            self._meter.add(one, {})

    def afterwards(self, call: Callable[[], None]) -> None:
        self._channel.afterwards(call)

    def _begin(self) -> None:
        if not self._upload.begun:
            self._upload.begin(self._meter)

    def _work(self) -> None:
        meter = Meter()
        self._meters.append(meter)

        def send(part: _Part) -> None:
            if self._upload.stop.is_set():
                return
            try:
                self._upload.send(part.number, [part.block], meter)
            except BaseException as error:
                self._channel.fail(error)  # before `stop`, which makes the other parts fail too
                self._upload.stop.set()
                raise

        self._channel.serve(send)

    # The new file.

    def set_size(self, size_bytes: int) -> None:
        """Do nothing: an object is as long as its parts."""

    def sync(self) -> None:
        """Do nothing: a part is durable once the store has answered."""

    def publish(self, *, sync_names: bool) -> None:  # noqa: ARG002 -- a key is always durable
        if self._upload.begun:
            self._upload.complete(self._meter)
        else:
            self._upload.put(self._small, self._meter)

    def abandon(self) -> None:
        if os.getpid() == self._pid:  # in a forked child, the parent still owns the upload
            self._upload.abort()
