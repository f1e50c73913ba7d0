"""A local S3 server that does not start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from iobench.bench.targets.local_s3 import run_server
from iobench.errors import UnavailableError
from iobench.testing import Footprint


def test_a_server_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again, on other ports. The error has its last output, and no file is left."""
    ports: list[int] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def command(port: int, _directory: Path) -> list[str]:
        ports.append(port)
        return [sys.executable, "-c", "raise SystemExit('no such flag')"]

    with (
        Footprint.unchanged(),
        pytest.raises(UnavailableError, match=r"does not answer .*no such flag"),
        run_server(command),
    ):
        pytest.fail("it answers")
    assert len(ports) == 3
    assert not list(tmp_path.iterdir())
