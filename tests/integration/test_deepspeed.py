"""DeepSpeed's checkpoints through our writers: its interface, and a real engine on the CPU."""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from iobench.errors import TransferError, UsageError
from iobench.writers.buffered import BufferedWriter
from iobench.writers.odirect import ODirectWriter
from iobench.writers.transfer import Transfer

pytestmark = pytest.mark.filterwarnings("ignore")  # the warnings of others

os.environ.setdefault("DS_ACCELERATOR", "cpu")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed
    from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
        CheckpointEngine as StockCheckpointEngine,
    )

    from iobench.integrations.deepspeed import (
        CheckpointEngine,
        DecoupledCheckpointEngine,
        attach,
    )


class Held(BufferedWriter):
    """Waits before each file, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.fails = threading.Event(), ""
        self.go.set()

    def write(self, image: Any, target: Any, **options: Any) -> Transfer:
        assert self.go.wait(30)
        if image.path == self.fails:
            raise TransferError(28, "No space left on device", image.path)
        return super().write(image, target, **options)


def info(directory: Path, tag: str = "step1") -> CheckpointCommitInfo:
    return CheckpointCommitInfo(tag=tag, save_dir=str(directory), save_latest=True)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


STATE = {"module": {"w": torch.arange(1000.0), "b": torch.ones(3)}, "step": 7, "args": range(3)}


@pytest.mark.parametrize("made", [CheckpointEngine, DecoupledCheckpointEngine])
def test_the_interface(made: Any, tmp_path: Path) -> None:
    """Every method of DeepSpeed's base class; files are torch.save's, and torch's are loaded."""
    engine = made("odirect")
    assert isinstance(engine, StockCheckpointEngine)
    assert not made.__abstractmethods__
    engine.makedirs(str(tmp_path / "a" / "step1"), exist_ok=True)
    engine.create(info(tmp_path / "a"))
    file = tmp_path / "a" / "step1" / "mp_rank_00_model_states.pt"
    engine.save(STATE, str(file))
    assert engine.commit(info(tmp_path / "a")) is True
    torch.save(STATE, tmp_path / file.name)
    assert file.read_bytes() == (tmp_path / file.name).read_bytes()
    for location in (None, "cpu", torch.device("cpu"), lambda storage, _: storage):
        found = engine.load(str(tmp_path / file.name), map_location=location)
        assert torch.equal(found["module"]["w"], STATE["module"]["w"])
        assert found["args"] == range(3)
    assert engine.is_data_parallel_writer(0)
    assert not engine.is_data_parallel_writer(1)
    assert engine.is_decoupled() is (made is DecoupledCheckpointEngine)
    assert engine.get_commit_info() is None
    assert engine.preserves_storage_sharing()
    engine.cleanup()


def test_decoupled_saves_wait_for_the_commit(tmp_path: Path) -> None:
    """The state may change at once; nothing is committed before it is durable."""
    writer = Held()
    engine = DecoupledCheckpointEngine(writer)
    state = {"w": torch.zeros(5000)}
    writer.go.clear()
    engine.create(info(tmp_path))
    engine.save(state, str(tmp_path / "a.pt"))
    state["w"].fill_(9)
    assert names(tmp_path) == []
    assert engine.get_commit_info() == info(tmp_path)
    threading.Timer(0.05, writer.go.set).start()
    engine.commit(info(tmp_path))
    assert engine.get_commit_info() is None
    assert torch.load(tmp_path / "a.pt")["w"].sum() == 0
    writer.fails = "b.pt"
    engine.create(info(tmp_path, "two"))
    engine.save(state, str(tmp_path / "b.pt"))
    with pytest.raises(TransferError, match="No space left"):
        engine.commit(info(tmp_path, "two"))
    engine.create(info(tmp_path, "three"))
    engine.save(state, str(tmp_path / "c.pt"))
    engine.cleanup()
    assert (tmp_path / "latest").read_text() == "three"
    assert names(tmp_path) == ["a.pt", "c.pt", "latest"]


def test_only_engines(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint_engine"):
        attach(object(), "buffered")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]  # takes a minute to compile
    os.environ["LOCAL_RANK"] = "0"
    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        del os.environ["LOCAL_RANK"]


def made_engine(stage: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 1))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        dist_init_required=False,
        config={
            "train_batch_size": 4,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    return engine


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        data = torch.randn(4, 9, generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.mse_loss(engine(data[:, :8]).squeeze(), data[:, 8])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("stage", "decoupled"), [(0, False), (1, False), (1, True)])
def test_a_real_engine(group: None, stage: int, decoupled: bool, tmp_path: Path) -> None:
    """Stock resumes from ours and ours from stock, with the losses of a run that went on."""
    engine = made_engine(stage)
    train(engine, range(3))
    engine.save_checkpoint(str(tmp_path / "stock"), client_state={"note": "x"})
    ours = attach(engine, ODirectWriter(), decoupled=decoupled)
    assert engine.checkpoint_engine is ours
    engine.save_checkpoint(str(tmp_path / "ours"), client_state={"note": "x"})
    wanted = train(engine, range(3, 6))
    tag = (tmp_path / "ours" / "latest").read_text()
    assert names(tmp_path / "ours" / tag) == names(tmp_path / "stock" / tag)
    moved = ours.saves if isinstance(ours, DecoupledCheckpointEngine) else ours.transfers
    assert len(moved) == (1 if stage == 0 else 2)
    for place, attached in (("ours", False), ("stock", True)):
        other = made_engine(stage)
        assert type(other.checkpoint_engine) is TorchCheckpointEngine
        if attached:
            attach(other, "odirect")
        where, client = other.load_checkpoint(str(tmp_path / place))
        assert where
        assert client["note"] == "x"
        assert train(other, range(3, 6)) == wanted
