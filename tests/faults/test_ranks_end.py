"""Ranks that end at once after their last call, as many training scripts do.

`close` returns in a rank only when all others can end without it, and so does `wait`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.preloaded import run_preloaded
from support.ranks import start_ranks

import iobench


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Start the process that ranks are forked from; it stays."""
    run_preloaded(["-c", ""], env=os.environ, timeout=120)


_SCRIPT = """
import os, warnings
import torch
import iobench
warnings.simplefilter("error")
ckpt = iobench.Checkpointer({directory!r}, keep=iobench.KeepLast(1))
rank = int(os.environ["RANK"])
ckpt.save_async({{"w": torch.ones(1000), "own": iobench.PerRank(rank)}}, 1)
{call}
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "call", ["ckpt.close()", "ckpt.wait()", "ckpt.wait(); ckpt.load()", "ckpt.save({'a': 1}, 2)"]
)
def test_a_rank_ends_after_its_last_call(tmp_path: Path, size: int, call: str) -> None:
    """No rank gets an error after a save that is complete."""
    directory = tmp_path / "a"
    script = _SCRIPT.format(directory=str(directory), call=call)
    with start_ranks(script, size) as ranks:
        ends = ranks.ends()
    assert [(code, out) for code, out, _ in ends] == [(0, "done\n")] * size, ends
    assert iobench.load_checkpoint(directory) is not None


@pytest.mark.parametrize("call", ["all_gather", "broadcast", "scatter"])
def test_rank_0_ends_before_the_others_read(call: str) -> None:
    """The others have their answers when a call returns in rank 0, although they are slow. The
    answers are larger than the buffers of a socket, so the hub of rank 0 still sends them."""
    code = f"""
import os, time
from iobench.ranks.control import Control
from iobench.ranks.wire import Wire
from iobench.ranks.world import World
take = Wire.take
def slowly(wire, size):
    if size > 1_000_000:
        time.sleep(0.5)
    return take(wire, size)
world = World.detect()
if world.rank:
    Wire.take = slowly
control = Control.connect(world, deadline_s=30)
values = ["x", "y" * 30_000_000] if {call!r} == "scatter" else "x" * 30_000_000
control.{call}("last", None if world.rank else values, deadline_s=30)
print("done", flush=True)
os._exit(0)
"""
    with start_ranks(code, 2) as ranks:
        ends = ranks.ends()
    assert [(code, out) for code, out, _ in ends] == [(0, "done\n")] * 2, ends
