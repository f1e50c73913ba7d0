"""The stream that DCP writes one file to, through the writer. The bytes are those of stock DCP."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from iobench.integrations.redirect.call_counts import CallCounts, Count
from iobench.integrations.redirect.redirect import fallbacks_of, reason_of
from iobench.integrations.replacing import bypass, bypassed
from iobench.integrations.stock_path import StockPath, Unsupported, path_of
from iobench.writers.base import Writer
from iobench.writers.stream import BlockStream

_NAME = "torch.distributed.checkpoint.FileSystemWriter"


@contextmanager
def dcp_stream(
    stock: Callable[..., Any],
    system: Any,
    path: str | os.PathLike[str],
    mode: str,
    writer: Callable[[], Writer],
    counts: CallCounts,
) -> Iterator[Any]:
    """Replace the context manager `stock(system, path, mode)`: files are written by the writer."""
    if mode != "wb" or bypassed():
        with stock(system, path, mode) as stream:
            yield stream
        return
    began = time.perf_counter()
    opened: BlockStream | None = None
    try:
        with bypass():
            chosen = writer()
            target = StockPath.of(path_of(path), chosen, stock_renames=False)
            opened = chosen.open(target.path)
    except Exception as why:  # noqa: BLE001 -- reported, and stock writes the file
        reason = reason_of(why)
        if not isinstance(why, Unsupported):
            counts.say(f"{_NAME}: {path} is written by the stock class: {why}")

    def count(size_bytes: int = 0) -> Count:
        seconds = time.perf_counter() - began
        return Count(calls=1, bytes=size_bytes, seconds=seconds, example=os.fspath(path))

    with bypass():  # DCP calls torch.save with this stream
        if opened is None:
            try:
                with stock(system, path, mode) as stream:
                    yield stream
            finally:
                counts.stock(_NAME, reason, count())
            return
        try:
            with _DcpStream(opened, target.directory) as stream:
                yield stream
        except BaseException:
            counts.failed(_NAME, count())
            raise
    moved = opened.transfer
    assert moved is not None
    counts.redirected(_NAME, count(moved.bytes), fallbacks_of(moved))


class _DcpStream(io.RawIOBase):
    """A BlockStream with the file methods that DCP calls: flush after each tensor, fsync by fileno.

    Both have no effect: closing the stream makes the file durable and publishes it. `fileno` is the
    directory's descriptor, because without one DCP calls os.sync(), which syncs all file systems.
    """

    def __init__(self, stream: BlockStream, directory: str) -> None:
        super().__init__()
        self._stream, self._directory = stream, directory
        self._fd = -1

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return self._stream.write(data)

    def tell(self) -> int:
        return self._stream.tell()

    def fileno(self) -> int:
        if self._fd < 0:
            self._fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self._fd

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._stream.close()
        finally:
            if self._fd >= 0:
                os.close(self._fd)
            super().close()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._stream.abort()
        self.close()
