"""DeepSpeed's checkpoints through our writers: its interface, and a real engine on the CPU."""

import importlib
import os
import subprocess
import sys
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
    from accelerate.utils import ProjectConfiguration
    from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
        CheckpointEngine as StockCheckpointEngine,
    )

    from iobench.integrations import accelerate
    from iobench.integrations.deepspeed import CheckpointEngine, DecoupledCheckpointEngine, attach


class Held(BufferedWriter):
    """Waits before each file, and fails at the file that the test names."""

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
def test_the_interface(made: Any, tmp_path) -> None:
    """Every method of DeepSpeed's base class. Files are those of torch.save, and files of torch can
    be loaded."""
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


def test_decoupled_saves_wait_for_the_commit(tmp_path) -> None:
    """The state may change at once; the commit comes after all files are durable."""
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


def test_each_checkpoint_has_its_latest(tmp_path) -> None:
    """Also without a step between two saves, when DeepSpeed does not ask for the commit."""
    engine = DecoupledCheckpointEngine("buffered")
    for name, latest in (("last", True), ("unnamed", False), ("best", True)):
        directory = tmp_path / name
        directory.mkdir()
        engine.create(CheckpointCommitInfo(tag="7", save_dir=str(directory), save_latest=latest))
        engine.save({"w": torch.ones(9)}, str(directory / "a.pt"))
    assert (tmp_path / "last" / "latest").read_text() == "7"
    engine.cleanup()
    assert names(tmp_path / "unnamed") == ["a.pt"]
    assert names(tmp_path / "last") == names(tmp_path / "best") == ["a.pt", "latest"]


def test_a_reported_failure_stays_a_failure(tmp_path) -> None:
    """A save or load raises it, and then the commit: `latest` must not name an incomplete
    checkpoint."""
    writer = Held()
    engine = DecoupledCheckpointEngine(writer)
    writer.fails = "a.pt"
    for again in (lambda: engine.save({}, str(tmp_path / "b.pt")), lambda: engine.load("b.pt")):
        engine.create(info(tmp_path))
        engine.save({"w": torch.ones(9)}, str(tmp_path / "a.pt"))
        engine._background._persister.wait()
        with pytest.raises(TransferError, match="No space left"):
            again()
        with pytest.raises(TransferError, match="No space left"):
            engine.commit(info(tmp_path))
    engine.create(info(tmp_path, "two"))
    engine.save({"w": torch.ones(9)}, str(tmp_path / "c.pt"))
    engine.cleanup()
    assert (tmp_path / "latest").read_text() == "two"


def test_only_engines(tmp_path) -> None:
    with pytest.raises(UsageError, match="no checkpoint_engine"):
        attach(object(), "buffered")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process only."""
    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # takes a minute to compile
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


def test_a_checkpoint_is_that_of_all_ranks(group, tmp_path, monkeypatch) -> None:
    """`latest` names it only after the files of every rank are durable. The failure of one rank is
    that of all."""
    asked: list[int] = []
    others = [1, 0, 0, 1]

    def all_reduce(flag: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        asked.append(int(flag))
        assert (tmp_path / "a.pt").exists()
        assert not (tmp_path / "latest").exists()
        flag.fill_(min(int(flag), others.pop(0)))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    writer = Held()
    engine = DecoupledCheckpointEngine(writer)
    engine.create(info(tmp_path))
    engine.save({"w": torch.ones(9)}, str(tmp_path / "a.pt"))
    assert engine.commit(info(tmp_path))
    for end in (lambda: engine.create(info(tmp_path)), engine.cleanup):
        engine.create(info(tmp_path))
        with pytest.raises(TransferError, match="another rank"):
            end()
    writer.fails = "b.pt"
    engine.create(info(tmp_path))
    engine.save({"w": torch.ones(9)}, str(tmp_path / "b.pt"))
    with pytest.raises(TransferError, match="No space left"):
        engine.commit(info(tmp_path))
    assert asked == [1, 1, 1, 0]
    engine.create(CheckpointCommitInfo(tag="x", save_dir=str(tmp_path), save_latest=False))
    engine.cleanup()  # no rank names it, so none is asked
    assert names(tmp_path) == ["a.pt"]


_RANK = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {tests!r})
from test_deepspeed import *
rank, place = int(sys.argv[1]), Path({place!r})
torch.distributed.init_process_group(
    "gloo", init_method="file://" + {store!r}, rank=rank, world_size=2
)
writer = Held()
engine = DecoupledCheckpointEngine(writer)
for tag, fails in (("whole", ""), ("half", "rank1.pt")):
    writer.fails = fails
    engine.create(info(place, tag))
    engine.save(STATE, str(place / f"rank{{rank}}.pt"))
    try:
        engine.cleanup()
    except TransferError as error:
        print(error)
torch.distributed.destroy_process_group()
"""


def test_two_ranks_of_which_one_fails(tmp_path) -> None:
    """Both get the error, and `latest` names the checkpoint before."""
    script, place = tmp_path / "script.py", tmp_path / "place"
    place.mkdir()
    tests, store = str(Path(__file__).parent), str(tmp_path / "store")
    script.write_text(_RANK.format(tests=tests, place=str(place), store=store))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank)], stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "another rank failed" in outputs[0]
    assert "No space left" in outputs[1]
    assert (place / "latest").read_text() == "whole"


def test_a_rank_that_ends_by_an_error_waits_for_no_other(group, tmp_path, monkeypatch) -> None:
    """The others are in a step: they do not answer, and must not be disturbed."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: pytest.fail("asked"))
    engine = DecoupledCheckpointEngine("buffered")
    engine.create(info(tmp_path))
    engine.save({"w": torch.ones(9)}, str(tmp_path / "a.pt"))
    try:
        raise ValueError("of the training")
    except ValueError:
        engine.cleanup()
    assert names(tmp_path) == ["a.pt"]


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
def test_a_real_engine(group, stage: int, decoupled: bool, tmp_path) -> None:
    """The stock engine resumes from our checkpoint and ours from a stock one, with the losses of an
    uninterrupted run."""
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


class Accelerated:
    """An Accelerator with a DeepSpeed engine, as far as a save needs it."""

    is_main_process = True
    project_configuration = ProjectConfiguration()

    def __init__(self, engine: Any) -> None:
        self._models = [engine]

    def save_state(self, output_dir: str) -> None:
        self._models[0].save_checkpoint(output_dir, "pytorch_model")

    def load_state(self, input_dir: str) -> None:
        raise NotImplementedError

    def wait_for_everyone(self) -> None:
        pass


def test_decoupled_below_accelerate(group, tmp_path) -> None:
    """All files are in the directory before it gets its name, also `latest`."""
    engine = made_engine(1)
    train(engine, range(1))
    ours = attach(engine, "buffered", decoupled=True)
    accelerated = Accelerated(engine)
    accelerate.attach(accelerated, "buffered")
    accelerated.save_state(str(tmp_path / "last"))
    assert ours.get_commit_info() is None
    assert (tmp_path / "last" / "latest").read_text() == "pytorch_model"
    assert len(names(tmp_path / "last" / "pytorch_model")) == 2
    assert names(tmp_path) == ["last"]
    train(engine, range(1, 2))


def test_a_16bit_model_after_a_checkpoint(group, tmp_path) -> None:
    """Its commit is not that of the checkpoint before, which then has its `latest`."""
    engine = made_engine(1)
    train(engine, range(1))
    attach(engine, "buffered", decoupled=True)
    engine.save_checkpoint(str(tmp_path), "step1")
    engine.save_16bit_model(str(tmp_path), "model.bin")
    assert {"latest", "model.bin", "step1"} <= set(names(tmp_path))
    assert (tmp_path / "latest").read_text() == "step1"
