"""A long run of background saves needs no more memory than its first saves."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

_SAVES = 250

_CHILD = """
import gc, sys
import torch
from iobench import Checkpointer, KeepLast

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

state = {"model": {str(i): torch.zeros(20_000) for i in range(10)}, "step": 0}
lazy = sys.argv[2] == "lazy"
ckpt = Checkpointer(sys.argv[1], writer="hybrid", slots=3, keep=KeepLast(2), lazy=lazy)
for step in range(int(sys.argv[3])):
    ckpt.before_optimizer_step()
    for tensor in state["model"].values():
        tensor.add_(1)
    state["step"] = step
    ckpt.save_async(state, step)
    if step == 9:
        ckpt.wait()
        early = resident()
ckpt.wait()
print(early, resident())
ckpt.close()
"""


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_memory_is_steady(mode: str) -> None:
    """After 250 saves the resident memory is within 1% of that after the first ten."""
    shared = Path("/dev/shm")  # where syncs cost nothing
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as made:
        command = [sys.executable, "-c", _CHILD, f"{made}/runs", mode, str(_SAVES)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    early, late = map(int, done.stdout.split())
    assert late <= early * 1.01, f"{early} pages after 10 saves, {late} after {_SAVES}"
