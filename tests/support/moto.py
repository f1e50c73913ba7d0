"""moto's S3 server as a child process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from iobench.bench.targets.local_s3 import LocalS3, run_server
from iobench.errors import UnavailableError

# The server writes the headers and the body of an answer on their own. Nagle's algorithm would hold
# each body back until the client acknowledges the headers, which takes 40 ms.
_MOTO = """
from socketserver import StreamRequestHandler
StreamRequestHandler.disable_nagle_algorithm = True
from moto.server import main
main()
"""


@contextmanager
def moto_s3() -> Iterator[LocalS3]:
    """Run moto's S3 server, like `iobench.testing.local_s3` runs rclone's.

    It does not check access keys and keeps everything in memory. Raises UnavailableError without
    moto (extra `dev`).
    """
    if find_spec("moto") is None or find_spec("flask") is None:
        raise UnavailableError("moto", "it is not installed.", "Type: pip install 'moto[server]'.")

    def command(port: int, directory: Path) -> list[str]:
        return [sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", str(port)]

    with run_server(command) as server:
        yield server
