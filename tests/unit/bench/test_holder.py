"""Holder: a process is reported dead only if that is certain."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from iobench.bench.targets.bucket import Holder


def test_ourselves() -> None:
    """This process is alive, and its holder is equal after a round trip."""
    holder = Holder.ourselves()
    assert not holder.dead
    assert Holder.parse(holder.to_bytes()) == holder


@pytest.mark.slow
def test_a_process_that_has_ended() -> None:
    """A killed process is dead, both before and after it is reaped."""
    code = (
        "from iobench.bench.targets.bucket import Holder; "
        "print(Holder.ourselves().to_bytes().decode())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; import sys; sys.stdout.flush(); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        holder = Holder.parse(child.stdout.readline())
        assert holder is not None
        assert not holder.dead
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert holder.dead
    assert holder.dead


def test_another_of_the_same_number() -> None:
    """A process that got the same number later is another process."""
    ours = Holder.ourselves()
    assert replace(ours, started=ours.started - 1).dead


@pytest.mark.parametrize("field", ["boot", "pids"])
def test_elsewhere(field: str) -> None:
    """A process of another machine or container is unknown, so it is not reported dead."""
    assert not replace(Holder.ourselves(), pid=2**22 + 1, **{field: "another"}).dead


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b"\xff", b'{"boot": 1}'])
def test_no_holder(text: bytes) -> None:
    """Text that is not a holder belongs to no process."""
    assert Holder.parse(text) is None
