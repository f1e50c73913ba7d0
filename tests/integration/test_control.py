"""Control: real ranks gather, and each failure is told with the rank's name."""

import re
import signal
from dataclasses import replace

import pytest

from iobench.errors import UsageError
from iobench.ranks.control import Control
from iobench.ranks.world import World
from tests.support.ranks import free_port, start_ranks

_BEGIN = """
import os, sys, time
from iobench.ranks.control import Control
from iobench.ranks.world import World
from iobench.errors import RankError
world = World.detect()
control = Control.connect(world)
"""
_WAIT = (
    _BEGIN
    + """
import warnings
warnings.simplefilter("ignore", ResourceWarning)  # nothing is closed: the job is broken
print("connected", flush=True)
if world.rank == 1:
    time.sleep(60)
try:
    control.barrier("write of step 7", deadline_s=60)
except RankError as error:
    print(list(error.ranks), error, flush=True)
"""
)
_IMPATIENT = "import iobench.ranks.control as module; module._PATIENCE_S = 0.5\n"


def test_calls_return_the_values_of_all_ranks() -> None:
    """Each kind of call, a sub, an error that leaves the others usable, and the clock."""
    code = (
        _BEGIN
        + """
with control:
    r = world.rank
    assert control.all_gather("a", {"r": r}, deadline_s=60) == [{"r": 0}, {"r": 1}, {"r": 2}]
    assert control.gather("b", r, deadline_s=60) == ([0, 1, 2] if r == 0 else [])
    assert control.broadcast("c", r, deadline_s=60) == 0
    given = ["x", {"y": 1}, None] if r == 0 else None
    assert control.scatter("s", given, deadline_s=60) == ["x", {"y": 1}, None][r]
    other = control.sub("x").sub("y")
    assert other.all_gather("d", "x" * 300_000, deadline_s=60) == ["x" * 300_000] * 3
    try:
        control.barrier("vote", deadline_s=60, error="disk full" if r == 1 else None)
    except RankError as error:
        assert error.ranks == (1,), error.ranks
        print(error, flush=True)
    control.barrier("after", deadline_s=float("inf"))
    offset = control.clock_offset()
    assert abs(offset.offset_s) <= offset.error_s + 0.001, offset  # one machine, one clock
"""
    )
    with start_ranks(code, 3) as ranks:
        for code_, out, err in ranks.ends():
            assert code_ == 0, err
            assert "rank 1 (host" in out
            assert "'vote': disk full" in out


def test_a_missing_rank_is_named() -> None:
    """A rank that never starts: rank 0 warns of it, and all end at the deadline of connect."""
    code = _BEGIN.replace("control =", f"{_IMPATIENT}if world.rank == 1: sys.exit()\ncontrol =")
    with start_ranks(code, 3, environ={"IOBENCH_CONNECT": "5s"}) as ranks:
        (code_, _, err), _, (other, _, other_err) = ranks.ends()
        assert (code_, other) == (1, 1)
        assert re.search("rank 0 waits for ranks? 1(, 2)?: not connected", err)
        for shown in (err, other_err):
            assert "rank 1 (never connected) did not reach phase 'connect'" in shown
            assert "construct the Checkpointer in every rank, or pass world='alone'" in shown


@pytest.mark.parametrize("name", ["IOBENCH_CONNECT", "IOBENCH_LOST_AFTER"])
@pytest.mark.parametrize("text", ["0", "soon"])
def test_a_deadline_that_is_not_one(name: str, text, monkeypatch) -> None:
    """Both variables are times, above 0."""
    monkeypatch.setenv(name, text)
    world = replace(World.single(), size=2)
    with pytest.raises(UsageError, match=f"{name}.*{text}"):
        Control.connect(world)


def test_silence_that_is_too_long() -> None:
    """IOBENCH_LOST_AFTER says after how long a stopped rank is lost. It leaves no task in rank 0,
    whose end asyncio would report. tests/faults has more ranks that are lost."""
    with start_ranks(_WAIT, 2, environ={"IOBENCH_LOST_AFTER": "2s"}) as ranks:
        for rank in range(2):
            assert ranks.line(rank) == "connected"
        ranks.kill(1, signal.SIGSTOP)
        code_, out, err = ranks.end(0, timeout_s=60)
        assert code_ == 0, err
        assert "rank 1 (" in out
        assert "is silent for" in out
        for told in ("destroyed", "Exception in callback", "client_connected_cb"):
            assert told not in err


def test_only_rank_0_makes_a_checkpointer(tmp_path) -> None:
    """Rank 0 warns soon, and fails at the deadline; the error says what to do."""
    code = f"""
import os, time, warnings
import torch.distributed as dist
import iobench, iobench.ranks.control as module
module._PATIENCE_S = 0.5
os.environ["IOBENCH_CONNECT"] = "2s"
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    try:
        iobench.Checkpointer({str(tmp_path)!r})
    except iobench.errors.RankError as error:
        print(list(error.ranks), error, flush=True)
    with iobench.Checkpointer({str(tmp_path)!r}, world="alone") as ckpt:
        ckpt.save({{"step": 3}}, 3)
        print(ckpt.load(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
    with start_ranks(code, 3) as ranks:
        (code_, out, err), *_ = ranks.ends()
        assert code_ == 0, err
        alone, loaded = out.splitlines()
        remedy = "construct the Checkpointer in every rank, or pass world='alone'"
        assert "rank 0 waits for ranks 1, 2: not connected within 0.5 s" in err
        assert remedy in err
        assert alone.startswith("[1, 2] rank 1 (never connected), rank 2 (never connected) did not")
        assert alone.endswith(remedy)
        assert loaded == "{'step': 3}"


def test_a_second_try_shows_the_cause() -> None:
    """A failed connect leaves nothing behind: the next one fails for the same reason, or works."""
    code = (
        _BEGIN.partition("control =")[0]
        + """
for deadline_s in (1, 1, 20):
    if world.rank and deadline_s == 1:
        continue
    if world.rank:
        sys.stdin.readline()
    try:
        os.environ["IOBENCH_CONNECT"] = f"{deadline_s}s"
        control = Control.connect(world)
    except RankError as error:
        print(error, flush=True)
assert control.all_gather("a", world.rank, deadline_s=60) == [0, 1]
control.close()
"""
    )
    environ = {"IOBENCH_STORE": f"tcp://127.0.0.1:{free_port()}", "IOBENCH_TOKEN": "secret"}
    with start_ranks(code, 2, environ=environ, stdin=True) as ranks:
        shown = [ranks.line(0), ranks.line(0)]
        ranks.tell(1, "go")
        (code_, _, err), (other, _, other_err) = ranks.ends()
        assert (code_, other) == (0, 0), err + other_err
        for line in shown:
            assert "rank 1 (never connected) did not reach phase 'connect'" in line


def test_different_calls_are_refused() -> None:
    """Ranks that do different things at the same time would mix their data."""
    code = (
        _BEGIN
        + """
try:
    control.barrier("save" if world.rank else "load", deadline_s=60)
except RankError as error:
    print(error, flush=True)
"""
    )
    with start_ranks(code, 2) as ranks:
        for _, out, err in ranks.ends():
            assert "all ranks must make the same calls" in out, err
