"""s3fs (FUSE) mounts a server's bucket as a directory, to test writers of files on it."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from iobench.bench.targets.local_s3 import LocalS3
from iobench.errors import UnavailableError

_PATIENCE_S, _INTERVAL_S = 15.0, 0.02


@contextmanager
def mounted_s3fs(server: LocalS3) -> Iterator[Path]:
    """Mount the bucket of `server` for one with-block. Requires root and s3fs.

    Use the server of `moto_s3`. rclone's, `local_s3`, does not work: it stores the object that
    marks an s3fs directory as a file, so nothing can be created in it. Raises UnavailableError.
    """
    program = shutil.which("s3fs")
    if program is None:
        raise UnavailableError("s3fs", "it is not installed.", "Type: apt install s3fs.")
    with tempfile.TemporaryDirectory(prefix="iobench-s3fs-") as name:
        base = Path(name)
        at, login = base / "at", base / "login"
        at.mkdir()
        login.touch(0o600)
        login.write_text(f"{server.access_key}:{server.secret_key}")
        options = f"url={server.endpoint_url},use_path_request_style,passwd_file={login}"
        with (base / "log").open("wb") as log, subprocess.Popen(
            [program, "-f", server.bucket, at, "-o", f"{options},tmpdir={base}"],
            stdout=log,
            stderr=log,
            env={k: v for k, v in os.environ.items() if not k.startswith("AWS_")},
        ) as process:  # fmt: skip
            try:
                _wait(process, at, base / "log")
                yield at
            finally:
                subprocess.run(["umount", "--lazy", at], check=False, capture_output=True)
                process.terminate()


def _wait(process: subprocess.Popen[bytes], at: Path, log: Path) -> None:
    """Wait until the bucket is mounted."""
    deadline = time.monotonic() + _PATIENCE_S
    while not at.is_mount():
        if process.poll() is not None or time.monotonic() > deadline:
            output = " ".join(log.read_text(errors="replace").split())[-300:]
            raise UnavailableError("s3fs", f"it does not mount the bucket ({output}).")
        time.sleep(_INTERVAL_S)
