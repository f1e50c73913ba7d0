"""S3Stream: what is written fills parts, which a crew uploads; closing completes the upload."""

from __future__ import annotations

import queue
import threading
from typing import Self

import numpy as np

from iobench.errors import TransferError
from iobench.writers.image import Bytes
from iobench.writers.s3_parts import MOST_PARTS, StreamParts
from iobench.writers.s3_upload import S3Upload
from iobench.writers.stream import Stream
from iobench.writers.transfer import Meter
from iobench.writers.waiting import Worker, end_workers

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
        self._crew = _Crew(upload, threads)
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
        block = self._crew.spare(size) if wanted > size // 2 else None
        if block is None:
            block = np.empty(min(size, max(2 * wanted, 1 << 16)), dtype=np.uint8)
        block[: self._filled] = self._block[: self._filled]
        self._block = block

    def _hand_over(self) -> None:
        """Let the crew have the full part and go on with the next."""
        if self._number == MOST_PARTS:
            raise TransferError(
                f"{self._object.path}: more than {MOST_PARTS:,} parts of "
                f"{self._parts.first_bytes} bytes; choose a larger part_size, or 0"
            )
        self._begin()
        block, self._block = self._block, self._block[:0]
        with self._meter.phase("wait"):
            self._crew.submit(self._number, block, self._filled)
        self._sent += self._filled
        self._filled = self._settled = 0
        self._number += 1

    def _begin(self) -> None:
        if not self._upload.begun:
            self._upload.begin(self._meter)

    def _drain(self) -> int:
        with self._meter.phase("wait"):
            self._crew.settle()
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
        self._crew.dismiss(self._meter)


class _NewObject:
    """Stands where a stream over files has its new file."""

    def __init__(self, upload: S3Upload, path: str, meter: Meter) -> None:
        self.path = path
        self._upload, self._meter = upload, meter
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
        self._upload.abort()


class _Crew:
    """Threads that upload parts; at most as many parts are with them as there are threads.

    The threads know the upload, not the stream: an abandoned stream is collected although its crew
    still waits for work.
    """

    def __init__(self, upload: S3Upload, threads: int) -> None:
        self._upload, self._limit = upload, threads
        self._meters = [Meter() for _ in range(threads)]
        self._threads: list[Worker] = []
        self._queue: queue.SimpleQueue[tuple[int, Bytes, int] | None] = queue.SimpleQueue()
        self._permits = threading.Semaphore(threads)
        self._spare: list[Bytes] = []
        self._failure: BaseException | None = None

    def submit(self, number: int, block: Bytes, size: int) -> None:
        """Take `block` over and upload its first `size` bytes. Raises what an earlier part did."""
        if len(self._threads) < self._limit:
            meter = self._meters[len(self._threads)]
            thread = Worker(target=self._work, args=(meter,), name="iobench-s3", daemon=True)
            self._threads.append(thread)  # first: an interrupt may come when it has started
            thread.start()
        self._permits.acquire()
        if self._failure is not None:
            self._permits.release()
            raise self._failure
        self._queue.put((number, block, size))

    def settle(self) -> None:
        """Wait until no part is on its way. Raises what a part raised."""
        for _ in range(self._limit):
            self._permits.acquire()
        self._permits.release(self._limit)
        if self._failure is not None:
            raise self._failure

    def spare(self, size: int) -> Bytes | None:
        """A block of `size` bytes that a part is done with, if there is one."""
        try:
            block = self._spare.pop()
        except IndexError:
            return None
        return block if len(block) == size else None

    def dismiss(self, meter: Meter) -> None:
        """End the threads, once they have finished what was submitted; count it in `meter`.

        KeyboardInterrupt is raised when all have ended: an aborted upload that still gets parts
        keeps them.
        """
        try:
            end_workers(self._threads, self._queue)
        finally:
            self._spare.clear()
        if self._threads:
            meter.absorb(self._meters[: len(self._threads)])

    def _work(self, meter: Meter) -> None:
        while (item := self._queue.get()) is not None:
            number, block, size = item
            try:
                if self._failure is None and not self._upload.stop.is_set():
                    self._upload.send(number, [block[:size]], meter)
            except BaseException as error:  # noqa: BLE001 -- raised by submit and settle
                self._failure = error
                self._upload.stop.set()
            finally:
                self._spare.append(block)
                self._permits.release()
