"""The Checkpointer of several ranks: replicated state in slices, loads by every restore mode."""

from __future__ import annotations

from pathlib import Path

from support.ranks import start_ranks

_CODE = """
import glob, os, sys, warnings
import torch
import iobench
from iobench.ranks.control import shared_control
from iobench.ranks.world import World
from iobench.errors import DataMismatchError, OptionError

warnings.simplefilter("ignore")
torch.manual_seed(3)
world, here = World.detect(), sys.argv[1] if len(sys.argv) > 1 else "{here}"
control = shared_control(world).sub("test")
state = {"model": {"rows": torch.randn(1000, 1003), "few": torch.randn(3, 700_000),
                   "scalar": torch.tensor(2.0), "large": torch.randn(6_000_000)},
         "step": 5, "own": iobench.PerRank(torch.full((10,), float(world.rank)))}

def equal(state, found):
    return all(torch.equal(state["model"][name], found["model"][name]) for name in state["model"])

ckpt = iobench.Checkpointer(here, writer="odirect", deadline_s=60)
ckpt.save(state, 1)
state["model"]["scalar"] += 1
ckpt.save(state, 2)
files = sorted(glob.glob(here + "/step-2/*.distcp"))
shares = [os.path.getsize(file) for file in files]
assert len(shares) == 2 and max(shares) <= 1.01 * sum(shares) / 2, shares
for mode in ("all", "broadcast", "all-gather", "auto"):
    found = ckpt.load(2, restore_mode=mode)
    assert equal(state, found) and found["step"] == 5, mode
    done = ckpt.loaded.transfer
    received = done.paths.get("network")
    if mode == "broadcast":
        # Rank 1 reads what only it needs, and receives all else.
        assert (received is None) == (world.rank == 0), done
    if mode == "all-gather":
        assert received is not None and done.read_amplification < 1.01, done

def in_rank_0(work):
    control.barrier("before", deadline_s=60)
    if world.rank == 0:
        work()
    control.barrier("after", deadline_s=60)

def flip():
    with open(files[1], "r+b") as file:
        file.seek(shares[1] // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))

# One bit of one part is wrong: whoever reads it, no rank loads step 2, and all load step 1.
in_rank_0(flip)
for mode in ("broadcast", "all-gather", "auto"):
    try:
        ckpt.load(2, restore_mode=mode)
        raise SystemExit("damage was not found")
    except DataMismatchError as error:
        assert "__1_0.distcp" in str(error) or "rank" in str(error), error
    found = ckpt.load(2, restore_mode=mode, on_corrupt="previous")
    assert ckpt.loaded.step == 1 and not equal(state, found)
# A part is missing.
in_rank_0(lambda: os.remove(files[1]))
for mode in ("all", "all-gather"):
    ckpt.load(2, restore_mode=mode, on_corrupt="previous")
    assert ckpt.loaded.step == 1
try:
    ckpt.load(2, restore_mode="tree")
except OptionError as error:
    assert "all-gather" in str(error)
ckpt.close()
print("done")
"""


def test_slices_and_restore_modes(tmp_path: Path) -> None:
    """Equal shares, equal tensors, damage found by all ranks; in one job, as a start is slow."""
    code = _CODE.replace("{here}", str(tmp_path / "runs"))
    with start_ranks(code, 2, environ={"OMP_NUM_THREADS": "1"}) as ranks:
        ends = ranks.ends(120)
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert [out for _, out, _ in ends] == ["done\n"] * 2
