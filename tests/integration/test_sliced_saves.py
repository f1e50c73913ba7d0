"""SlicePlanner with real gloo ranks: stock dcp.load reads what it saved, and shares are equal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_SCRIPT = Path(__file__).parent / "scripts" / "sliced_save.py"
_HEADERS = 64 * 1024  # of torch's file format: about 1 KiB for each part


def test_stock_dcp_loads_what_ranks_saved_in_slices(tmp_path: Path) -> None:
    """Plain tensors, DTensors replicated, sharded by rows, by columns and both, objects."""
    done = subprocess.run(
        [sys.executable, _SCRIPT, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    shares = json.loads(done.stdout)
    mean = sum(shares) / len(shares)
    # 64 KiB is the least unit of a share; this state is small, so that the test is quick.
    assert max(shares) <= mean * 1.01 + 64 * 1024 + _HEADERS, shares
