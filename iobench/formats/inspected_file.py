"""InspectedFile: a Source that remembers what it gave, to be compared with what is read later."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Self

from iobench.errors import DataMismatchError, IobenchError, TransferError
from iobench.writers.base import Writer
from iobench.writers.device.base import DeviceBytes
from iobench.writers.image import FileImage
from iobench.writers.source import LocalSource, Source

__all__ = ["InspectedFile"]


class InspectedFile(io.RawIOBase):
    """What a format looks at in a file before it knows how to restore it: headers, an index.

    The restore opens the file by its name once more. Where that was given to another file in
    between, the bytes would be taken for what they are not; `check` tells.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self._given: dict[int, bytes] = {}
        self._failure: BaseException | None = None

    @classmethod
    @contextmanager
    def opened(cls, file: str, writer: Writer | None) -> Iterator[Self]:
        """`file` as `writer` opens it, or as one of a mounted file system. Raises TransferError."""
        try:
            source: Source = LocalSource(file) if writer is None else writer.open_source(file)
        except IobenchError:
            raise
        except OSError as error:
            raise TransferError.wrap(error, "opening", file) from error
        with closing(source):
            yield cls(source)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # Of a damaged directory: EINVAL and OverflowError, for a range that no file has.
            asked = isinstance(error, OSError) and error.errno == errno.EINVAL
            if not asked and not isinstance(error, OverflowError):
                self._failure = self._failure or error
            raise

    def raise_failure(self, file: str) -> None:
        """Raise what the first failed read did, an OSError as TransferError.

        zipfile takes an OSError for a file that is no zip, torch's reader any error for an object
        that cannot be read.
        """
        failure, self._failure = self._failure, None  # its traceback has this source in it
        if failure is None:
            return
        if isinstance(failure, OSError) and not isinstance(failure, IobenchError):
            raise TransferError.wrap(failure, "opening", file) from failure
        raise failure

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")
        position = self._source.tell()
        with self._noted():
            data = self._source.read(len(room))
        room[: len(data)] = data
        self._remember(position, data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._source.seek(offset, whence)

    def tell(self) -> int:
        return self._source.tell()

    def read_at(self, offsets: Iterable[int], size: int) -> list[bytes]:
        listed = list(offsets)
        with self._noted():
            found = self._source.read_at(listed, size)
        for offset, data in zip(listed, found, strict=True):
            self._remember(offset, data)
        return found

    def _remember(self, offset: int, data: bytes) -> None:
        if len(data) > len(self._given.get(offset, b"")):
            self._given[offset] = data

    def check(self, file: str, image: FileImage) -> None:
        """Raise DataMismatchError unless the filled `image` has the bytes that were looked at.

        Bytes that it keeps on a device are not compared: they are tensors' data, which no format
        looks at for its own sake.
        """
        for offset, data in self._given.items():
            position = 0
            for piece in image.pieces(offset, offset + len(data)):
                wanted = data[position : position + len(piece)]
                position += len(piece)
                if not isinstance(piece, DeviceBytes) and piece.tobytes() != wanted:
                    raise DataMismatchError(
                        f"{file}: was changed while it was read (bytes near {offset} are others "
                        "now); restore it again"
                    )
