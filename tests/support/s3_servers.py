"""The real S3 servers of the tests, by name. A test is skipped where its server cannot start."""

import secrets
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import iobench
from iobench.errors import UnavailableError
from iobench.testing import LocalS3, local_s3
from iobench.writers.s3 import S3Writer
from support.moto import moto_s3

SERVERS = {"rclone": local_s3, "moto": moto_s3}

_running: dict[str, LocalS3] = {}
_ends = ExitStack()


@contextmanager
def s3_server(name: str) -> Iterator[LocalS3]:
    """Yield the server `name` of SERVERS, with a bucket that nobody else uses.

    A start takes seconds, so the server runs on for the next user, until `end_servers`.
    """
    if name not in _running:
        try:
            _running[name] = _ends.enter_context(SERVERS[name]())
        except UnavailableError as error:
            pytest.skip(str(error))
    server = replace(_running[name], bucket=f"iobench-{secrets.token_hex(4)}")
    with server.active(), closing(S3Writer().client) as client:
        client.boto3.create_bucket(Bucket=server.bucket)
    yield server
    if name == "moto":  # which keeps all objects in memory
        urllib.request.urlopen(f"{server.endpoint_url}/moto-api/reset", b"").close()
    else:
        shutil.rmtree(server.directory / server.bucket)


def end_servers() -> None:
    """End the servers that run."""
    _running.clear()
    _ends.close()


def put_tree(directory: Path, target: str) -> None:
    """Put each file of a checkpoint below `directory` into the bucket at `target`."""
    writer = iobench.load_writer("s3")
    for file in sorted(directory.rglob("*")):
        if file.is_file() and file.name != ".iobench-lock":
            image = iobench.FileImage.of(str(file.relative_to(directory)), [file.read_bytes()])
            writer.write(image, target)
