"""RLIMIT_FSIZE, which a batch system may set, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from iobench.writers.base import Writer

_CHILD = """
import errno, json, resource, sys
import numpy as np
from iobench.errors import TransferError
from iobench.writers import registry
from iobench.writers.image import FileImage

name, fallocate, how, directory, settings = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
writer = registry.make(name, **{**json.loads(settings), "fallocate": fallocate})
data = np.ones((1 << 20) + 70_000, dtype=np.uint8)
try:
    if how == "write":
        writer.write(FileImage.of("model", [data]), directory)
    else:
        with writer.open(f"{directory}/model") as stream:
            stream.write(data)
except TransferError as error:
    assert error.errno == errno.EFBIG, error
else:
    sys.exit("the limit was not met")
writer.write(FileImage.of("small", [data[:5000]]), directory)
"""


@pytest.mark.parametrize("fallocate", ["true", "false"])
@pytest.mark.parametrize("how", ["write", "stream"])
def test_size_limit(
    make: Callable[..., Writer],
    name: str,
    names,
    settings: str,
    tmp_path: Path,
    fallocate: str,
    how: str,
) -> None:
    """The caller gets EFBIG, the earlier file stays, and a smaller file can be written."""
    make(tmp_path)
    (tmp_path / "model").write_bytes(b"the last good one")
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            _CHILD,
            name,
            fallocate,
            how,
            str(tmp_path),
            settings,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert names(tmp_path) == {"model", "small"}
    assert (tmp_path / "model").read_bytes() == b"the last good one"
    assert (tmp_path / "small").read_bytes() == b"\x01" * 5000
