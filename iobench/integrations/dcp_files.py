"""DcpFiles: the files of one DCP checkpoint. DcpStorage: base class of StorageWriter and Reader."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager

from iobench.errors import TransferError
from iobench.integrations.default_writer import chosen_writer
from iobench.writers.base import Source
from iobench.writers.config import WriterLike
from iobench.writers.removal import remove_file
from iobench.writers.transfer import Transfer

DcpLocation = str | os.PathLike[str]


class DcpFiles:
    """The files in a checkpoint's directory, or under its prefix `s3://bucket/prefix`."""

    def __init__(self, location: DcpLocation, writer: WriterLike) -> None:
        self.writer = chosen_writer(writer)
        self.move_to(location)

    def move_to(self, location: DcpLocation) -> None:
        """Switch to another checkpoint. Raises UsageError if the writer cannot use the location."""
        self.writer.check_scheme(os.fspath(location))
        self.location = os.fspath(location)

    def path(self, name: str) -> str:
        return f"{self.location.rstrip('/')}/{name}"

    @contextmanager
    def source(self, name: str) -> Iterator[Source]:
        """Open the file `name` for reading parts of it. Raises TransferError."""
        with closing(self.writer.open_source(self.path(name))) as opened:
            yield opened

    def exists(self, name: str) -> bool:
        try:
            with self.source(name):
                return True
        except TransferError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return False
            raise

    def remove(self, name: str) -> None:
        """Remove the file `name` durably."""
        remove_file(self.path(name), self.writer)


class DcpStorage:
    """Base class of StorageWriter and StorageReader: location, writer and transfers."""

    def __init__(self, path: DcpLocation, writer: WriterLike) -> None:
        self.transfers: list[Transfer] = []
        """One Transfer for each file of the saves or loads since the last `reset`."""
        self._files = DcpFiles(path, writer)

    @property
    def checkpoint_id(self) -> str:
        """The location of the checkpoint."""
        return self._files.location

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: DcpLocation) -> bool:
        """Return False: DCP must not choose this class for a bare path, since it needs a writer."""
        del checkpoint_id
        return False

    def _begin_at(self, checkpoint_id: DcpLocation | None) -> None:
        """Begin a new save or load, at `checkpoint_id` if it is given."""
        if checkpoint_id:
            self._files.move_to(checkpoint_id)
        self.transfers = []
