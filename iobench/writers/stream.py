"""BlockStream: a binary file object over one I/O path, for serializers that stream.

write ─> block ─ when it is full ─> Sink.put ──┬─> PlainSink: the writing thread, at once
flush, close ─> what fills no block ─> drain ──┼─> BackgroundSink: threads, or one io_uring
                                               └─> PartSink: parts of an S3 upload
"""

from __future__ import annotations

import io
import os
import struct
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol, Self

import numpy as np

from iobench.errors import IobenchError, TransferError
from iobench.units import KIB, MIB
from iobench.writers.blocks import interpreter_end
from iobench.writers.image import Bytes
from iobench.writers.transfer import Meter, Transfer

_END = struct.Struct("<4sQ2H2L4Q4sLQL4s4H2LH")
"""What torch writes last: zip64 end of directory, its locator, end of directory."""
_LAST_RECORD = b"/.data/serialization_id"
_EXTRA = 28  # most bytes of the zip64 field between a record's name and the end of the directory
_SMALL = 16 * KIB
"""Smaller copies are not timed: serializers make thousands of them, and a timer costs 1 us."""
_TAIL = len(_LAST_RECORD) + _EXTRA + _END.size


class _File(Protocol):
    """The interface of a stream's new file; see `iobench.writers.local.new_file.NewFile`."""

    path: str

    def set_size(self, size_bytes: int) -> None: ...
    def sync(self) -> None: ...
    def publish(self, *, sync_names: bool) -> None: ...
    def abandon(self) -> None: ...


class Sink(ABC):
    """Where the blocks of one stream go. One thread calls it, or the garbage collector."""

    block_size: int
    """Bytes of the block that is filled now. `put` may change it."""
    in_place = False
    """Whether `put` has written the bytes when it returns: it takes large data of any length."""
    keeps_last = False
    """Whether the last block is for `drain`, even if it is full. In a `with`, close stores it."""

    @abstractmethod
    def block(self) -> Bytes:
        """Return `block_size` bytes of memory for the next block."""

    @abstractmethod
    def put(self, block: Bytes, offset: int) -> None:
        """Take over a full block and write it at `offset` of the file, now or later.

        Raises the failure of this block or an earlier one; `block` is lost then.
        """

    @abstractmethod
    def drain(self, block: Bytes, filled: int, offset: int, *, last: bool) -> None:
        """Write the first `filled` bytes of `block` at `offset`, and wait until all is written.

        They may be written again, with more bytes behind them. `last` says that nothing follows.
        Raises the first failure.
        """

    @abstractmethod
    def release(self, block: Bytes, *, failed: bool) -> None:
        """Release `block`, threads and memory. After a failure, drop what is not begun."""

    def afterwards(self, call: Callable[[], None]) -> None:
        """Call `call` once no thread uses the file any more; by default at once."""
        call()


class PlainSink(Sink):
    """Writes in the calling thread. Large data is not copied, small data is collected first."""

    in_place = True
    block_size = MIB

    def __init__(
        self,
        write: Callable[[list[Bytes], int], None],
        largest: int,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """`write` writes consecutive views, together at most `largest` bytes, at an offset."""
        self._write, self._largest, self._finish = write, largest, finish
        self._block = np.empty(self.block_size, dtype=np.uint8)

    def block(self) -> Bytes:
        return self._block

    def put(self, block: Bytes, offset: int) -> None:
        for start in range(0, len(block), self._largest):
            self._write([block[start : start + self._largest]], offset + start)

    def drain(self, block: Bytes, filled: int, offset: int, *, last: bool) -> None:  # noqa: ARG002
        if self._finish is not None:
            self._finish()

    def release(self, block: Bytes, *, failed: bool) -> None:
        pass


class BlockStream(io.RawIOBase):
    """A new file written from beginning to end. It appears under its name whole or not at all.

    - `with writer.open(path) as f: torch.save(obj, f)` publishes a durable file on a clean exit.
      An exception removes everything written.
    - `f.close()` does the same without a `with`. While an exception is propagating (in a `finally`
      block, for example) it removes the file and warns, as the file may be incomplete.
    - `torch.save(obj, writer.open(path))` works too. torch writes the end of its zip and calls
      `flush`, which makes the bytes durable or raises the failure. The end of the zip proves that
      the file is complete, so dropping the object publishes it.

    An object that is dropped in any other state removes the file and warns, also after a `flush`: a
    serializer may flush between two parts. The same happens, with exit code 120, when the
    interpreter ends first. A forked child does not own the stream: `close` raises there, and the
    parent keeps the file. Once the file is published, `transfer` is its record.
    """

    def __init__(
        self, file: _File, writer: str, meter: Meter, sink: Sink, *, durable: bool = True
    ) -> None:
        super().__init__()
        self._file, self._writer, self._meter, self._durable = file, writer, meter, durable
        self._sink = sink
        self._block: Bytes = np.empty(0, dtype=np.uint8)
        self._filled = self._offset = 0
        self._opened_under, self._pid = sys.exception(), os.getpid()
        self._failure: BaseException | None = None
        self._flushed = self._done = self._dropped = self._entered = False
        self._tail = b""
        self._inside_s = meter.elapsed_s()
        self._opened_by = threading.current_thread()
        interpreter_end.at_end(self, BlockStream._at_end)
        self.transfer: Transfer | None = None
        """The record of the write; None until the file is published."""

    @property
    def failure(self) -> BaseException | None:
        """The first failure; None if there is none."""
        return self._failure

    # The interface of a file object.

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset + self._filled

    def write(self, data: Any, /) -> int:
        """Take over all of `data` (any buffer); return its length in bytes.

        Raises TransferError.
        """
        self._check_usable()
        self._flushed = False
        view = np.frombuffer(data, dtype=np.uint8)
        with self._inside():
            try:
                self._append(view)
            except BaseException as error:  # noqa: BLE001 -- raised by `_fail`
                self._fail(error, "writing")
        # A save that fails ends its zip too: that end proves nothing.
        self._tail = b"" if self._in_trouble() else (self._tail + view[-_TAIL:].tobytes())[-_TAIL:]
        return len(view)

    def flush(self) -> None:
        """Make the bytes durable, still under a temporary name. Raises TransferError.

        In a `with`, `close` stores the last part of an S3 object: a small one is one request then.
        """
        if self.closed or self._done:
            return
        self._check_usable()
        if not self._flushed and not self._in_trouble():
            self._store(last=False)

    def close(self) -> None:
        """Make the file durable and publish it. On failure remove it and raise TransferError.

        While an exception is propagating or being handled, remove the file instead, with a
        RuntimeWarning.
        """
        if self.closed:
            return
        if self._dropped:
            if not self._is_complete():
                self._discard("dropped without close()")
                return
        elif self._in_trouble():
            trouble = type(sys.exception()).__name__
            self._discard(f"closed while {trouble} is being raised or handled")
            return
        try:
            self._check_usable()
            if not self._flushed:
                self._store(last=True)
            size = self.tell()
            with self._inside():
                self._file.publish(sync_names=self._durable)
        except BaseException:
            self.abort()
            raise
        self._done = True
        serialize_s = self._meter.elapsed_s() - self._inside_s
        try:
            self._release()
        finally:
            self._meter.seconds["serialize"] = serialize_s
            self.transfer = self._meter.transfer(self._writer, "write", size, durable=self._durable)
            super().close()

    def _discard(self, why: str) -> None:
        """Remove the file, and warn unless the caller knows: of a failure, or as a forked child."""
        known = self._failure is not None or os.getpid() != self._pid
        self.abort()
        if not known:
            warnings.warn(
                f"{self._file.path}: {why}; nothing was published",
                RuntimeWarning,
                stacklevel=3,
                source=self,
            )

    def abort(self) -> None:
        """Remove the new file; the name keeps what it held before."""
        if self.closed:
            return
        self._failure = self._failure or TransferError(f"{self._file.path}: aborted")
        self._done = True  # nothing is left for IOBase.close to flush
        try:
            if os.getpid() == self._pid:
                self._release()
        finally:
            try:
                self._sink.afterwards(self._file.abandon)
            finally:
                super().close()

    def __enter__(self) -> Self:
        self._check_usable()
        self._entered = True
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort()
        else:
            self._opened_under = sys.exception()  # a `with` that ends without an error
            self.close()

    def __del__(self) -> None:
        if hasattr(self, "_dropped") and not self.closed:
            self._dropped = True
            self.close()

    def _dealloc_warn(self, wrapper: object) -> None:  # noqa: ARG002
        """Called by io before `close` when a BufferedWriter over this stream is dropped unclosed.

        `close` alone would look like a call by the user.
        """
        self._dropped = True

    def _at_end(self) -> None:
        """Finish at the end of the interpreter, before the threads end that `_release` awaits."""
        if self.closed:
            return
        path, failed = self._file.path, self._failure is not None
        if self._opened_by.daemon and self._opened_by.is_alive():  # it may be inside `write`
            interpreter_end.lost(
                f"{path}: a daemon thread had not closed it when the interpreter ended"
            )
        elif self._is_complete():
            self._dropped = True
            self.close()
        else:
            self.abort()
            if not failed:
                interpreter_end.lost(
                    f"{path}: the interpreter ended before close(); nothing was published"
                )

    # Internals.

    def _append(self, data: Bytes) -> None:
        """Take over `data`; the caller may change it after the return."""
        sink, taken, end = self._sink, 0, self._filled + len(data)
        if end < len(self._block) and len(data) < _SMALL:
            self._block[self._filled : end] = data
            self._filled = end
            return
        if sink.in_place and end > sink.block_size:
            self._put(self._block[: self._filled])
            self._put(data)
            return
        while True:
            if self._filled == sink.block_size and (taken < len(data) or not sink.keeps_last):
                self._put(self._block)
            if taken == len(data):
                return
            if not len(self._block):
                self._block = sink.block()
            count = min(len(data) - taken, len(self._block) - self._filled)
            with self._meter.phase("gather"):
                np.copyto(
                    self._block[self._filled : self._filled + count], data[taken : taken + count]
                )
            self._filled += count
            taken += count

    def _put(self, data: Bytes) -> None:
        """Pass on a block, or data that the sink takes in place."""
        # Drop our reference first, in case of an interrupt: a block that is given back twice would
        # be used by two owners at once.
        self._block, self._filled = self._block[:0], 0
        self._sink.put(data, self._offset)
        self._offset += len(data)

    def _store(self, *, last: bool) -> None:
        """Write everything and make it durable."""
        # In a `with`, close follows and raises its errors. Without, the garbage collector may call
        # it, and it swallows errors.
        later = self._sink.keeps_last and self._entered and not last
        with self._inside():
            try:
                if self._sink.in_place:
                    self._put(self._block[: self._filled])
                filled = 0 if later else self._filled
                self._sink.drain(self._block, filled, self._offset, last=last)
                self._file.set_size(self.tell())
                if self._durable:
                    self._file.sync()
            except BaseException as error:  # noqa: BLE001 -- raised by `_fail`
                self._fail(error, "syncing")
        self._flushed = not later

    def _release(self) -> None:
        """Release threads and memory in whatever state they are. Called once."""
        block, self._block = self._block, self._block[:0]
        self._sink.release(block, failed=self._failure is not None)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Count the time spent in the stream; all other time is `serialize`."""
        begin = self._meter.elapsed_s()
        try:
            yield
        finally:
            self._inside_s += self._meter.elapsed_s() - begin

    def _is_complete(self) -> bool:
        """Whether the file is complete and durable without a `close` that says so."""
        return self._flushed and self._failure is None and _ends_torch_zip(self._tail, self.tell())

    def _in_trouble(self) -> bool:
        """Whether an exception is propagating now that was not when the stream was opened."""
        return sys.exception() not in (None, self._opened_under)

    def _check_usable(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed stream")
        if os.getpid() != self._pid:
            raise TransferError(f"{self._file.path}: opened in another process, this one's parent")
        if self._failure is not None:
            raise TransferError(
                f"{self._file.path}: failed before; nothing is published"
            ) from self._failure

    def _fail(self, error: BaseException, doing: str) -> NoReturn:
        """Remember and raise `error`; one of the kernel as a TransferError."""
        self._failure = error
        if isinstance(error, OSError) and not isinstance(error, IobenchError):
            self._failure = TransferError.wrap(error, doing, self._file.path)
            raise self._failure from error
        raise error


def _ends_torch_zip(tail: bytes, size_bytes: int) -> bool:
    """Whether a file of `size_bytes` that ends with `tail` is a complete zip of torch.save.

    The end must say where its directory is, and this must be right for the size. A directory alone
    proves nothing: a ZipFile that is dropped writes one for the members so far. torch adds the
    record of the serialization id only when all others are written.
    """
    if len(tail) < _END.size:
        return False
    rest, end = tail[: -_END.size], tail[-_END.size :]
    _, _, made_by, needed, _, _, _, count, length, start, *_ = _END.unpack(end)
    stop = size_bytes - _END.size
    few, short, first = min(count, 0xFFFF), min(length, 0xFFFFFFFF), min(start, 0xFFFFFFFF)
    wanted = (
        *(b"PK\x06\x06", 44, made_by, needed, 0, 0, count, count, length, start),
        *(b"PK\x06\x07", 0, stop, 1),
        *(b"PK\x05\x06", 0, 0, few, few, short, first, 0),
    )
    return start + length == stop and _LAST_RECORD in rest and end == _END.pack(*wanted)
