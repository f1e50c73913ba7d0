"""A model whose optimizer does not fit a memory limit: killed without offload, trained with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from iobench.units import MIB

pytestmark = pytest.mark.root

_LIMIT = 480 * MIB
_ELEMENTS = 24_000_000  # 96 MiB of 16-bit parameters and gradients, 288 MiB of fp32 state

_TRAINER = """
import os, sys
from pathlib import Path
group, kind, directory, elements = sys.argv[1:]
Path(group, "cgroup.procs").write_text(str(os.getpid()))
import torch
torch.set_num_threads(1)
parameter = torch.nn.Parameter(torch.ones(int(elements), dtype=torch.bfloat16))
if kind == "offload":
    from iobench.offload import AdamW
    optimizer = AdamW([parameter], directory, lr=0.1, memory="64MiB", pins=0)
else:
    master = torch.nn.Parameter(parameter.detach().float())
    optimizer = torch.optim.AdamW([master], lr=0.1, fused=True)
    master.grad = torch.ones_like(master)
parameter.grad = torch.ones_like(parameter)
for _ in range(2):
    optimizer.step()
if kind == "offload":
    optimizer.close()
print("trained", float(parameter[7]))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a limit of memory, of either version."""
    for parent, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        made = parent / f"iobench-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            (made / limit).write_text(str(_LIMIT))
            yield made
            return
        except OSError:  # this version has no memory controller here
            continue
        finally:
            made.rmdir()
    pytest.skip("no control group with a memory limit can be made here")


def _train(group: Path, kind: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _TRAINER, group, kind, directory, str(_ELEMENTS)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_state_that_does_not_fit(group: Path, tmp_path: Path) -> None:
    """The same limit, the same model."""
    resident = _train(group, "resident", tmp_path)
    assert resident.returncode == -9, resident.stderr
    offloaded = _train(group, "offload", tmp_path / "state")
    assert offloaded.returncode == 0, offloaded.stderr
    assert "trained" in offloaded.stdout
