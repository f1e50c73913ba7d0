"""Ranks that end at once after their last call, as many training scripts do.

`close` returns in a rank only when all others can end without it, and so does `wait`.
"""

import pytest
from support.ranks import start_ranks

import iobench

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

pytestmark = pytest.mark.usefixtures("importing")


@pytest.mark.parametrize(
    "call", ["ckpt.close()", "ckpt.wait()", "ckpt.wait(); ckpt.load()", "ckpt.save({'a': 1}, 2)"]
)
def test_a_rank_ends_after_its_last_call(tmp_path, call: str) -> None:
    """No rank gets an error after a save that is complete."""
    directory = tmp_path / "a"
    script = _SCRIPT.format(directory=str(directory), call=call)
    with start_ranks(script, 4) as ranks:
        ends = ranks.ends()
    assert [(code, out) for code, out, _ in ends] == [(0, "done\n")] * 4, ends
    assert iobench.load_checkpoint(directory) is not None
