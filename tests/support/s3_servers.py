"""The real S3 servers of the tests, by name. A test is skipped where its server cannot start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import iobench
from iobench.errors import UnavailableError
from iobench.testing import LocalS3, local_s3, moto_s3

__all__ = ["SERVERS", "put_tree", "s3_server"]

SERVERS = {"rclone": local_s3, "moto": moto_s3}


@contextmanager
def s3_server(name: str) -> Iterator[LocalS3]:
    """Yield the running server `name` of SERVERS."""
    try:
        with SERVERS[name]() as running:
            yield running
    except UnavailableError as error:
        pytest.skip(str(error))


def put_tree(directory: Path, target: str) -> None:
    """Put each file of a checkpoint below `directory` into the bucket at `target`."""
    writer = iobench.load_writer("s3")
    for file in sorted(directory.rglob("*")):
        if file.is_file() and file.name != ".iobench-lock":
            image = iobench.FileImage.of(str(file.relative_to(directory)), [file.read_bytes()])
            writer.write(image, target)
