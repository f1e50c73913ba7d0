"""kill -9 while a pinned generation is copied to the remote tier: it goes on where it was, and the
state that is restored from there has the bits of a training that was never interrupted."""

import secrets
import shutil
from pathlib import Path

import pytest
import torch
from support.offload_checkpoints import held, named
from support.offload_training import has_generation
from support.preloaded import run_killed
from support.tiers import events, settled, until

from iobench import Checkpointer, KeepLast, Remote
from iobench.offload import AdamW
from iobench.units import MIB
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.target import S3Target

pytestmark = [
    pytest.mark.usefixtures("importing"),
    pytest.mark.filterwarnings("ignore:step .. the optimizer is read:RuntimeWarning"),
]

_TRAINER = """
import sys
import torch
from support import kill_points, tiers
from iobench import Checkpointer, KeepLast, Remote
from iobench.offload import AdamW
from iobench.writers.s3 import S3Writer

base, remote, point = sys.argv[1:]
parameter = torch.nn.Parameter(torch.linspace(-1, 1, 1_500_000))
optimizer = AdamW([parameter], base + "/state", memory="64MiB", chunk_elements=256 << 10, pins=3)
writer = S3Writer(part_size="5MiB", threads=1) if remote.startswith("s3") else ""
with Checkpointer(
    base + "/runs", keep=KeepLast(1), offload=optimizer, tiers=[Remote(remote, writer=writer)]
) as ckpt:
    for step in (1, 2):
        if step == 2:
            kill_points.arm(point)
        parameter.grad = torch.full_like(parameter, float(step))
        optimizer.step()
        ckpt.save({"step": step}, step)
        tiers.until(lambda: tiers.settled(ckpt))
"""

_ELEMENTS = 1_500_000
_SIZE = 18_001_920  # three tensors, the last chunk rounded up
_POINTS = {
    "iobench.offload.convert.SlotsFile.fill:after:2": 0,
    "iobench.writers.s3_store.upload.ResumedUpload.send:after:3": 15 * MIB,
    "iobench.remote.file_copier.read_back:before": _SIZE,
}
"""Points in the copy of the second checkpoint, and the least bytes that are not sent again."""


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    """The parameter after each step of the stock optimizer."""
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, _ELEMENTS))
    stock = torch.optim.AdamW([parameter], fused=True)
    found = []
    for step in (1, 2, 3):
        parameter.grad = torch.full_like(parameter, float(step))
        stock.step()
        found.append(parameter.detach().clone())
    return found


@pytest.mark.parametrize("point", _POINTS)
def test_a_bucket(point: str, moto, tmp_path, expected) -> None:
    """The next start sends what is missing alone; a new machine restores it with the same bits."""
    target = f"{moto.target}/run-{secrets.token_hex(4)}"
    run_killed(_TRAINER, tmp_path, target, point)
    writer = S3Writer(part_size="5MiB", threads=1)
    tier = Remote(target, writer=writer)
    saved = max(named(tmp_path / "runs"), default=0)
    assert set(named(tmp_path / "runs").values()) <= held(tmp_path / "state").keys()
    before = sum(one.sent_bytes for one in events(tmp_path / "runs", "durable"))
    parameter = torch.nn.Parameter(torch.zeros(_ELEMENTS))
    with (
        AdamW.resume([parameter], tmp_path / "state", memory="64MiB") as optimizer,
        Checkpointer(tmp_path / "runs", keep=KeepLast(1), offload=optimizer, tiers=[tier]) as ckpt,
    ):
        until(lambda: ckpt._tier is not None and ckpt._tier.drain.queue.get(saved) is not None)
        until(lambda: settled(ckpt))
        optimizer.wait()
        assert held(tmp_path / "state").keys() == set(named(tmp_path / "runs").values())
    again = sum(one.sent_bytes for one in events(tmp_path / "runs", "durable")) - before
    assert again <= (_SIZE + 100_000 - _POINTS[point] if saved == 2 else 0)
    assert S3Objects(writer.client, S3Target.parse(target)).uploads() == []
    shutil.rmtree(tmp_path / "runs")
    shutil.rmtree(tmp_path / "state")
    _restore(tmp_path, tier, saved, expected)
    writer.client.close()


def _restore(base: Path, tier: Remote, saved: int, expected: list[torch.Tensor]) -> None:
    parameter = torch.nn.Parameter(torch.zeros(_ELEMENTS))
    with (
        AdamW([parameter], base / "new", memory="64MiB", pins=2) as optimizer,
        Checkpointer(base / "runs", keep=KeepLast(1), offload=optimizer, tiers=[tier]) as ckpt,
    ):
        assert ckpt.load() == {"step": saved}
        assert torch.equal(parameter, expected[saved - 1])
        parameter.grad = torch.full_like(parameter, float(saved + 1))
        optimizer.step()
        assert torch.equal(parameter, expected[saved])


_RESTORER = """
import sys
import torch
from support import kill_points
from iobench import Checkpointer, KeepLast, Remote
from iobench.offload import AdamW

base, remote, point = sys.argv[1:]
parameter = torch.nn.Parameter(torch.zeros(1_500_000))
optimizer = AdamW([parameter], base + "/new", memory="64MiB", chunk_elements=256 << 10, pins=2)
keep = KeepLast(1)
with Checkpointer(base + "/runs", keep=keep, offload=optimizer, tiers=[Remote(remote)]) as ckpt:
    kill_points.arm(point)
    ckpt.load()
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_while_the_state_is_restored(when: str, tmp_path, expected) -> None:
    """The new directory has no generation, or all of it."""
    remote = str(tmp_path / "remote")
    run_killed(_TRAINER, tmp_path, remote, "iobench.remote.drain.Drain.saved:before")
    shutil.rmtree(tmp_path / "runs")
    point = f"iobench.offload.store.GenerationStore.commit:{when}"
    run_killed(_RESTORER, tmp_path, remote, point)
    assert has_generation(tmp_path / "new") == (when == "after")
    if when == "after":
        parameter = torch.nn.Parameter(torch.zeros(_ELEMENTS))
        with AdamW.resume([parameter], tmp_path / "new", memory="64MiB") as optimizer:
            assert (optimizer.updates, optimizer.durable()) == (1, 1)
            assert torch.equal(parameter, expected[0])
        return
    _restore(tmp_path, Remote(remote), 1, expected)
