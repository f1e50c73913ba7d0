"""DcpFiles: the files of one DCP checkpoint, through a writer; what its two classes share."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from iobench.errors import TransferError
from iobench.writers.base import Writer
from iobench.writers.config import load_writer
from iobench.writers.files import sync_directory
from iobench.writers.s3_target import S3Target, is_s3
from iobench.writers.source import Source

__all__ = ["DcpFiles", "Location"]

Location = str | os.PathLike[str]


class DcpFiles:
    """The files in a checkpoint's directory, or under its prefix `s3://bucket/prefix`."""

    def __init__(self, location: Location, writer: Writer | str) -> None:
        """`writer`, or what `iobench.load_writer` takes."""
        self.writer = load_writer(writer) if isinstance(writer, str) else writer
        self.move_to(location)

    def move_to(self, location: Location) -> None:
        """Turn to another checkpoint. Raises UsageError for a place that is not the writer's."""
        self.writer.check_scheme(os.fspath(location))
        self.location = os.fspath(location)

    def path(self, name: str) -> str:
        """Where the file `name` is."""
        return f"{self.location.rstrip('/')}/{name}"

    @contextmanager
    def source(self, name: str) -> Iterator[Source]:
        """The file `name`, opened for looking into it. Raises TransferError."""
        with closing(self.writer.open_source(self.path(name))) as opened:
            yield opened

    def exists(self, name: str) -> bool:
        """Whether there is a file `name`."""
        try:
            with self.source(name):
                return True
        except TransferError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return False
            raise

    def remove(self, name: str) -> None:
        """Remove the file `name`, durably."""
        if not is_s3(self.location):
            Path(self.path(name)).unlink()
            sync_directory(self.location)
            return
        from iobench.writers.s3 import S3Writer
        from iobench.writers.s3_objects import S3Objects

        assert isinstance(self.writer, S3Writer)  # no other takes such a location
        where = S3Target.parse(self.path(name))
        S3Objects(self.writer.client, where).delete([where.key])
