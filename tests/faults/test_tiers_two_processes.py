"""Two real processes drain one directory: one works, the other gets one clear error or waits."""

from __future__ import annotations

import signal
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.preloaded import Preloaded
from support.tiers import events, settled, state, until

from iobench import Checkpointer, Remote, load_checkpoint
from iobench.errors import TargetError
from iobench.remote.source_file import BLOCK_BYTES

pytestmark = pytest.mark.usefixtures("importing")

_FIRST = """
import sys
from support import kill_points, tiers
from iobench import Checkpointer, Remote, load_writer

local, remote = sys.argv[1:]
writer = load_writer("buffered", block_size="8MiB")
ckpt = Checkpointer(local, tiers=[Remote(remote, writer=writer)])
kill_points.arm("iobench.remote.source_file.SourceFile.fill:before:3:hang")
kill_points.arm("iobench.remote.source_file.SourceFile.fill:before:3:note")
ckpt.save(tiers.state(1), 1)
tiers.until(lambda: False)
"""
_SIZE = 20 * 10**6


@contextmanager
def _first(local: Path, remote: Path) -> Iterator[Preloaded]:
    """Run a process that has copied two blocks of its checkpoint, and hangs in the third."""
    with Preloaded(["-c", _FIRST, local, remote], stdout=subprocess.PIPE) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline().endswith(":note note\n")
            yield first
        finally:
            first.kill()


def test_the_same_local_directory(tmp_path: Path) -> None:
    """The second process gets an error that names the first one, at once. After a kill -9 of the
    first one it sends only the rest."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    with _first(local, remote) as first:
        for _ in range(2):
            with pytest.raises(TargetError, match=f"in use: process {first.pid} on host"):
                Checkpointer(local, tiers=[Remote(remote)])
        assert not list(remote.glob("step-*"))
        assert load_checkpoint(local)["step"] == 1
        first.send_signal(signal.SIGKILL)
        first.wait()
        with Checkpointer(local, tiers=[Remote(remote)]) as second:
            until(lambda: settled(second))
    (durable,) = events(local, "durable")
    assert durable.sent_bytes <= durable.size_bytes - 2 * BLOCK_BYTES
    assert load_checkpoint(remote)["w"].unique().tolist() == [1]
    assert {path.name for path in remote.iterdir()} == {"step-1", ".iobench-lock"}


def test_the_same_remote_directory(tmp_path: Path) -> None:
    """The second process saves locally and waits; after a kill -9 of the first it copies.

    It removes what the first one has left unfinished, which is sent anew by its next start.
    """
    one, other, remote = (tmp_path / name for name in ("one", "other", "remote"))
    with _first(one, remote) as first, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the drain says it in its own thread
        with Checkpointer(other, tiers=[Remote(remote)]) as second:
            save = second.save(state(2), 2)
            with pytest.raises(TargetError, match=f"in use: process {first.pid} on host"):
                second.wait(until="remote")
            assert [copy.state for copy in save.copies] == ["durable", "waiting"]
            assert not list(remote.glob("step-*"))
            first.send_signal(signal.SIGKILL)
            first.wait()
            until(lambda: settled(second))
            assert [copy.state for copy in save.copies] == ["durable", "verified"]
    (durable,) = events(other, "durable")
    assert durable.sent_bytes > _SIZE
    with Checkpointer(one, tiers=[Remote(remote)]) as again:
        until(lambda: settled(again))
    (durable,) = events(one, "durable")
    assert durable.sent_bytes > _SIZE  # the second one had tidied up
    assert load_checkpoint(remote, 1)["w"].unique().tolist() == [1]
    assert load_checkpoint(remote, 2)["w"].unique().tolist() == [2]
    assert {path.name for path in remote.iterdir()} == {"step-1", "step-2", ".iobench-lock"}
