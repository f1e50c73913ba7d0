"""Removing a stored file."""

from __future__ import annotations

import os

from iobench.writers.base import Writer
from iobench.writers.local.deferred_free import freed_later
from iobench.writers.local.new_file import sync_directory
from iobench.writers.s3_store.target import S3Target, is_s3

__all__ = ["remove_file"]


def remove_file(path: str, writer: Writer) -> None:
    """Remove the file at `path`, in a directory or a bucket, durably. Raises OSError."""
    writer.check_scheme(path)
    if not is_s3(path):
        with freed_later(path):
            os.unlink(path)
            sync_directory(os.path.dirname(path) or ".")
        return
    writer.objects(path).delete([S3Target.parse(path).key])
