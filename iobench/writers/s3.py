"""The `s3` writer: parallel multipart uploads and ranged GETs with end-to-end checksums."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import numpy as np

from iobench.errors import DataMismatchError, IobenchError, TransferError, UnavailableError
from iobench.writers.base import Availability, Writer, check_ranges
from iobench.writers.blocks.channel import Channel, Lease
from iobench.writers.blocks.workers import Blocks, run_workers
from iobench.writers.device.staging import staged
from iobench.writers.image import Bytes, FileImage, Ranges
from iobench.writers.options import S3Values
from iobench.writers.s3_store.client import INSTALL, S3Client, S3Options, boto3_missing
from iobench.writers.s3_store.download import S3Download, S3Source
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.parts import (
    MOST_BYTES,
    MOST_PARTS,
    Checksum,
    StreamParts,
    part_size_for,
)
from iobench.writers.s3_store.target import S3Target
from iobench.writers.s3_store.upload import ResumedUpload, S3Upload
from iobench.writers.stream import BlockStream, Sink
from iobench.writers.transfer import Meter, Transfer

_PROBE = ".iobench-probe"


class S3Writer(Writer):
    """Writes and reads objects in an S3 store.

    Targets are `s3://bucket/prefix`, or `s3://bucket/key` for `open`. A durable write has three
    proofs: the store answers 200 to CompleteMultipartUpload (or PutObject), the answer has an ETag,
    and the checksum that the store returns is ours. A store that returns no checksum is a recorded
    fallback. `durable=False` changes only the label of the Transfer. A failed or interrupted write
    is aborted: the key keeps its old object, and no upload is left behind. Only after a failure
    that follows the completion the new object stays (see docs/s3.md).
    """

    name = "s3"
    summary = "object store: multipart uploads, ranged GETs, checksums end to end (boto3)"
    schemes = ("s3",)
    Options = S3Options
    options: S3Options

    def __init__(self, options: S3Options | None = None, **values: Unpack[S3Values]) -> None:
        super().__init__(options, **values)
        self.client = S3Client(self.options)
        """For requests that a writer does not make: lists, deletions."""

    def write(
        self,
        image: FileImage,
        target: str | Path,
        *,
        durable: bool = True,
        sync_directory: bool = True,  # noqa: ARG002 -- a store has no directories to sync
    ) -> Transfer:
        return self._write(image, target, S3Upload, durable=durable)

    def resume(self, image: FileImage, target: str | Path) -> Transfer:
        """Write like `write`, and send only the parts that no earlier attempt has sent.

        A failed or interrupted write leaves its parts in the store for the next attempt.
        """
        return self._write(image, target, ResumedUpload, durable=True)

    def _write(
        self, image: FileImage, target: str | Path, kind: type[S3Upload], *, durable: bool
    ) -> Transfer:
        meter = Meter()
        place = S3Target.parse(target).below(image.path)
        options, size = self.options, image.size_bytes
        part_size = part_size_for(size, fixed_bytes=options.part_size, threads=options.threads)
        upload = kind(self.client, place, Checksum.named(options.checksum))
        try:
            with staged(image, meter) as within:
                if size <= part_size:
                    with within.outgoing(0, size, meter) as views:
                        upload.put(views, meter)
                else:
                    upload.begin(meter)
                    self._send(upload, within, part_size, meter)
            if upload.begun:
                upload.complete(meter)
        except BaseException:
            upload.fail()
            raise
        return meter.transfer(self.name, "write", size, durable=durable)

    def read(
        self, image: FileImage, target: str | Path, *, start: int = 0, stop: int | None = None
    ) -> Transfer:
        stop = image.size_bytes if stop is None else stop
        return self.read_ranges(image, target, [(start, stop)])

    def read_ranges(self, image: FileImage, target: str | Path, ranges: Ranges) -> Transfer:
        meter = Meter()
        check_ranges(image, ranges)
        size = sum(stop - start for start, stop in ranges)
        place = S3Target.parse(target).below(image.path)
        verify = size == image.size_bytes and self.options.checksum != "none"
        download = S3Download(self.client, place, meter, verify=verify)
        if download.size_bytes != image.size_bytes:
            raise DataMismatchError(
                f"{place}: has {download.size_bytes} bytes, its image has {image.size_bytes}"
            )
        if size:
            with staged(image, meter) as within:
                self._receive(download, within, ranges, size, meter)
        if verify and size:
            download.verify(meter)
        return meter.transfer(self.name, "read", size, durable=True)

    def open(self, target: str | Path, size: int | None = None) -> BlockStream:
        meter = Meter()
        place = S3Target.object(target)
        options = self.options
        first = options.part_size or part_size_for(
            min(size or 0, MOST_BYTES), threads=options.threads
        )
        parts = StreamParts(first_bytes=first, fixed=options.part_size > 0)
        upload = S3Upload(self.client, place, Checksum.named(options.checksum))
        sink = PartSink(upload, str(place), meter, parts=parts, threads=options.threads)
        return BlockStream(sink, self.name, meter, sink)

    def open_source(self, target: str | Path) -> S3Source:
        return S3Source(self.client, S3Target.object(target))

    def objects(self, target: str | Path) -> S3Objects:
        return S3Objects(self.client, S3Target.parse(target))

    def close(self) -> None:
        self.client.close()

    def available(self, target: str | Path = ".") -> Availability:
        try:
            self._probe(target)
        except IobenchError as error:
            reason = getattr(error, "reason", "") or f"{error}."
            return Availability(ok=False, reason=reason, remedy=getattr(error, "remedy", ""))
        return Availability(ok=True)

    def require(self, target: str | Path) -> None:
        """Probe the target like `available`. Raises TargetError if the bucket does not exist."""
        self.check_scheme(target)
        try:
            self._probe(target)
        except TransferError as error:
            raise UnavailableError(self.name, f"{error}.") from error

    def _probe(self, target: str | Path) -> None:
        if reason := boto3_missing():
            raise UnavailableError(self.name, reason, INSTALL)
        Checksum.named(self.options.checksum)
        S3Objects(self.client, S3Target.parse(target)).try_writing(_PROBE)

    def _send(self, upload: S3Upload, image: FileImage, part_size: int, meter: Meter) -> None:
        def work(blocks: Blocks, own: Meter) -> None:
            for start, stop in blocks:
                with image.outgoing(start, stop, own) as views:
                    upload.send(start // part_size + 1, views, own)

        parts = _Parts([(0, image.size_bytes)], part_size, upload.stop)
        run_workers(self.options.threads, parts, work, meter)

    def _receive(
        self, download: S3Download, image: FileImage, ranges: Ranges, size: int, meter: Meter
    ) -> None:
        options = self.options
        part = part_size_for(size, fixed_bytes=options.part_size, threads=options.threads)

        def work(blocks: Blocks, own: Meter) -> None:
            for begin, end in blocks:
                with image.incoming(begin, end, own) as views:
                    download.fill(views, begin, end, own)
                image.filled(begin, end)

        run_workers(options.threads, _Parts(ranges, part, download.stop), work, meter)


class _Parts(Blocks):
    """Parts of one transfer. Cancelling them also ends the waits between attempts.

    `run_workers` records a failure before it cancels. The errors of workers whose waits end early
    therefore follow the first failure.
    """

    def __init__(self, ranges: Ranges, size: int, given_up: threading.Event) -> None:
        super().__init__(ranges, size)
        self._given_up = given_up

    def cancel(self) -> None:
        super().cancel()
        self._given_up.set()


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

    def block(self) -> Bytes:
        while self._spare:
            block = self._spare.pop()
            if len(block) == self.block_size:
                return block
        return np.empty(self.block_size, dtype=np.uint8)  # its pages are made when it is filled

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
        self.block_size = self._parts.size(self._number)

    def drain(self, block: Bytes, filled: int, offset: int, *, last: bool) -> None:  # noqa: ARG002
        with self._meter.phase("upload"):
            self._channel.drain()
        view = block[:filled]
        if last and not self._upload.begun:
            self._small = [view]  # one PutObject publishes it
        elif filled:
            self._begin()
            self._upload.send(self._number, [view], self._meter)

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
        if self._channel.idle:  # else the collector runs this in one of them: they are counting
            for one in self._meters:  # without seconds: the stream counts its waits for them
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
