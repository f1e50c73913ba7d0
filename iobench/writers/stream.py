"""Stream: a binary file object over one I/O path, for serializers that stream."""

from __future__ import annotations

import io
import os
import sys
import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, Self

import numpy as np

from iobench.errors import IobenchError, TransferError
from iobench.writers.blocks import interpreter_end
from iobench.writers.image import Bytes
from iobench.writers.transfer import Meter, Transfer

__all__ = ["Stream"]


class _File(Protocol):
    """The interface of a stream's new file; see `iobench.writers.local.new_file.NewFile`."""

    path: str

    def set_size(self, size_bytes: int) -> None: ...
    def sync(self) -> None: ...
    def publish(self, *, sync_names: bool) -> None: ...
    def abandon(self) -> None: ...


class Stream(io.RawIOBase):
    """A new file written from beginning to end. It appears under its name whole or not at all.

    - `with writer.open(path) as f: torch.save(obj, f)` publishes a durable file on a clean exit.
      An exception removes everything written.
    - `f.close()` does the same without a `with`. While an exception is propagating (in a `finally`
      block, for example) it removes the file and warns, as the file may be incomplete.
    - `torch.save(obj, writer.open(path))` works too. torch calls `flush` last, which makes the
      bytes durable or raises the failure. Dropping the flushed object publishes the file.

    A forked child does not own the stream: `close` raises there, and the parent keeps the file.
    An object that is dropped in any other state removes the file and warns. The same happens, with
    exit code 120, when the interpreter ends first. Once the file is published, `transfer` is its
    record.
    """

    def __init__(self, file: _File, writer: str, meter: Meter, *, durable: bool = True) -> None:
        super().__init__()
        self._file, self._writer, self._meter, self._durable = file, writer, meter, durable
        self._opened_under, self._pid = sys.exception(), os.getpid()
        self._failure: BaseException | None = None
        self._flushed = self._done = False
        self._inside_s = meter.elapsed_s()
        self._opened_by = threading.current_thread()
        interpreter_end.at_end(self, Stream._at_end)
        self.transfer: Transfer | None = None
        """The record of the write; None until the file is published."""

    @property
    def failure(self) -> BaseException | None:
        """The first failure; None if there is none."""
        return self._failure

    # Implemented by each I/O path.

    @abstractmethod
    def _append(self, data: Bytes) -> None:
        """Take over `data`; the caller may change it after the return."""

    @abstractmethod
    def _drain(self) -> int:
        """Hand all bytes taken over to the kernel; return the size of the file in bytes."""

    @abstractmethod
    def _release(self) -> None:
        """Release threads and memory in whatever state they are. Called once."""

    def _afterwards(self, call: Callable[[], None]) -> None:
        """Call `call` once no thread uses the file any more; by default at once."""
        call()

    @property
    @abstractmethod
    def _position(self) -> int:
        """Bytes taken over so far."""

    # The interface of a file object.

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

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
            except BaseException as error:
                raise self._failed(error, "writing") from error
        return len(view)

    def flush(self) -> None:
        """Make the bytes durable, still under a temporary name. Raises TransferError."""
        if self.closed or self._done:
            return
        self._check_usable()
        if self._in_trouble():
            return
        with self._inside():
            try:
                size = self._drain()
                self._file.set_size(size)
                if self._durable:
                    self._file.sync()
            except BaseException as error:
                raise self._failed(error, "syncing") from error
        self._flushed = True

    def close(self) -> None:
        """Make the file durable and publish it. On failure remove it and raise TransferError.

        While an exception is propagating or being handled, remove the file instead, with a
        RuntimeWarning.
        """
        if self.closed:
            return
        if self._in_trouble():
            self._discard()
            return
        try:
            self._check_usable()
            if not self._flushed:
                self.flush()
            size = self._position
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

    def _discard(self) -> None:
        path, trouble = self._file.path, type(sys.exception()).__name__
        known = self._failure is not None
        self.abort()
        if not known:
            warnings.warn(
                f"{path}: closed while {trouble} is being raised or handled; nothing was published",
                RuntimeWarning,
                stacklevel=3,
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
                self._afterwards(self._file.abandon)
            finally:
                super().close()

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort()
        else:
            self._opened_under = sys.exception()  # a `with` that ends without an error
            self.close()

    def __del__(self) -> None:
        if self.closed or not hasattr(self, "_flushed"):
            return
        if os.getpid() != self._pid:
            self.abort()
            return
        if self._flushed and self._failure is None:
            self._opened_under = sys.exception()
            self.close()
            return
        path = self._file.path
        self.abort()
        warnings.warn(
            f"{path}: dropped without close(); nothing was published",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def _at_end(self) -> None:
        """Finish at the end of the interpreter, before the threads end that `_release` awaits."""
        if self.closed:
            return
        path, failed = self._file.path, self._failure is not None
        if self._opened_by.daemon and self._opened_by.is_alive():  # it may be inside `write`
            interpreter_end.lost(
                f"{path}: a daemon thread had not closed it when the interpreter ended"
            )
        elif self._flushed and not failed:
            self._opened_under = sys.exception()
            self.close()
        else:
            self.abort()
            if not failed:
                interpreter_end.lost(
                    f"{path}: the interpreter ended before close(); nothing was published"
                )

    # Internals.

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Count the time spent in the stream; all other time is `serialize`."""
        begin = self._meter.elapsed_s()
        try:
            yield
        finally:
            self._inside_s += self._meter.elapsed_s() - begin

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

    def _failed(self, error: BaseException, doing: str) -> BaseException:
        """Remember `error`; return the exception to raise."""
        if isinstance(error, OSError) and not isinstance(error, IobenchError):
            error = TransferError.wrap(error, doing, self._file.path)
        self._failure = error
        return error
