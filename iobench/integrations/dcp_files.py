"""DcpStorage: the files of one DCP checkpoint, base class of StorageWriter and StorageReader."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager

from iobench.errors import TransferError
from iobench.integrations.default_writer import chosen_writer
from iobench.writers.base import Source
from iobench.writers.config import WriterLike
from iobench.writers.transfer import Transfer

DcpLocation = str | os.PathLike[str]


class DcpStorage:
    """The files in a checkpoint's directory, or under its prefix `s3://bucket/prefix`."""

    def __init__(self, path: DcpLocation, writer: WriterLike) -> None:
        self.transfers: list[Transfer] = []
        """One Transfer for each file of the saves or loads since the last `reset`."""
        self._writer, self._location = chosen_writer(writer), ""
        self._begin_at(path)

    @property
    def checkpoint_id(self) -> str:
        """The location of the checkpoint."""
        return self._location

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: DcpLocation) -> bool:
        """Return False: DCP must not choose this class for a bare path, since it needs a writer."""
        del checkpoint_id
        return False

    def _begin_at(self, checkpoint_id: DcpLocation | None) -> None:
        """Begin a new save or load, at `checkpoint_id` if it is given.

        Raises UsageError if the writer cannot use the location.
        """
        if checkpoint_id:
            self._writer.check_scheme(os.fspath(checkpoint_id))
            self._location = os.fspath(checkpoint_id)
        self.transfers = []

    def _path(self, name: str) -> str:
        return f"{self._location.rstrip('/')}/{name}"

    @contextmanager
    def _source(self, name: str) -> Iterator[Source]:
        """Open the file `name` for reading parts of it. Raises TransferError."""
        with closing(self._writer.open_source(self._path(name))) as opened:
            yield opened

    def _exists(self, name: str) -> bool:
        try:
            with self._source(name):
                return True
        except TransferError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return False
            raise
