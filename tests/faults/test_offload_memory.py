"""A model whose optimizer does not fit a memory limit: killed without offload, trained with it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.captured import captured
from support.control_groups import control_group

from iobench.units import MIB

# Python and torch take about 200 MiB; with Python 3.13 100 MiB more, and what they map.
_LIMIT = 680 * MIB
_ELEMENTS = 36_000_000  # 144 MiB of 16-bit parameters and gradients, 576 MiB of fp32 state

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
    with control_group(_LIMIT) as made:
        yield made.path


def _train(group: Path, kind: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _TRAINER, group, kind, directory, str(_ELEMENTS)]
    return captured(command)


@pytest.mark.root
def test_state_that_does_not_fit(group, tmp_path) -> None:
    """The same limit, the same model."""
    resident = _train(group, "resident", tmp_path)
    assert resident.returncode == -9, resident.stderr
    offloaded = _train(group, "offload", tmp_path / "state")
    assert offloaded.returncode == 0, offloaded.stderr
    assert "trained" in offloaded.stdout
