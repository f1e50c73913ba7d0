"""SlicePlanner with real gloo ranks: stock dcp.load reads what it saved, and shares are equal."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.support import rank_slices
from tests.support.rank_pool import RankPool

_HEADERS = 64 * 1024  # of torch's file format: about 1 KiB for each part


def test_stock_dcp_loads_what_ranks_saved_in_slices(ranks: RankPool, tmp_path: Path) -> None:
    """Plain tensors, DTensors replicated, sharded by rows, by columns and both, objects."""
    assert ranks.call(rank_slices.save_in_slices, str(tmp_path)) == [[]] * 4
    shares = Counter[str]()
    for file in (tmp_path / "step-1").glob("*.distcp"):
        shares[file.name.split("_")[2]] += file.stat().st_size
    assert len(shares) == 4
    mean = shares.total() / len(shares)
    # 64 KiB is the least unit of a share; this state is small, so that the test is quick.
    assert max(shares.values()) <= mean * 1.01 + 64 * 1024 + _HEADERS, shares
