"""The stream that DCP writes one file to, through the writer. The bytes are those of stock DCP."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from iobench.integrations.redirect.redirect import Redirect, RedirectedCall
from iobench.integrations.replacing import bypass, bypassed
from iobench.integrations.stock_path import StockPath, path_of
from iobench.writers.base import Writer
from iobench.writers.stream import BlockStream


@contextmanager
def dcp_stream(
    redirect: Redirect,
    system: Any,
    path: str | os.PathLike[str],
    mode: str,
    writer: Callable[[], Writer],
) -> Iterator[Any]:
    """Replace the context manager `stock(system, path, mode)`: files are written by the writer."""
    if mode != "wb" or bypassed():
        with redirect.stock(system, path, mode) as stream:
            yield stream
        return
    call = RedirectedCall(redirect, (system, path, mode), {})
    opened: BlockStream | None = None
    try:
        with bypass():
            chosen = writer()
            target = StockPath.of(path_of(path), chosen, stock_renames=False)
            opened = chosen.open(target.path)
    except Exception as why:  # noqa: BLE001 -- reported, and stock writes the file
        refused = why
        call.report(why)
    with bypass():  # DCP calls torch.save with this stream
        if opened is None:
            try:
                with redirect.stock(system, path, mode) as stream:
                    yield stream
            finally:
                call.was_stock(refused)
            return
        try:
            with _DcpStream(opened, target.directory) as stream:
                yield stream
        except BaseException:
            call.failed()
            raise
    assert opened.transfer is not None
    call.redirected(opened.transfer)


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
