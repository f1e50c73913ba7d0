"""The Transformers Trainer's checkpoints with our writers, compared with the stock Trainer's."""

import functools
import json
import re
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.captured import captured
from support.recording import Recording

from iobench.errors import UsageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from iobench.integrations.transformers import WriterMixin, patch, unpatch

pytestmark = pytest.mark.filterwarnings("ignore")  # the warnings of others


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The model is tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Ours(WriterMixin, Trainer):
    """A user's own subclass of Trainer."""

    writer = "buffered"


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 60, (12,), generator=made)
        return {"input_ids": ids, "labels": ids}


def trainer(directory: Path, cls: Any = Trainer, *, shards: bool = True, **options: Any) -> Any:
    """6 steps with a checkpoint after 2, 4 and 6, with dropout and shuffled data."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
    model = LlamaForCausalLM(config)
    if shards:
        model.save_pretrained = functools.partial(model.save_pretrained, max_shard_size="20KB")
    settings: dict[str, Any] = {
        "output_dir": str(directory),
        "max_steps": 6,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return cls(
        model=model,
        args=TrainingArguments(**settings | options),
        train_dataset=Data(),
        eval_dataset=Data(),
    )


def losses(made: Any, resume: Any = None) -> dict[int, float]:
    """Train, and return the loss of each step."""
    made.train(resume_from_checkpoint=resume if resume is None else str(resume))
    return {e["step"]: e["loss"] for e in made.state.log_history if "loss" in e}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """The checkpoints of the stock Trainer, and its losses."""
    directory = tmp_path_factory.mktemp("stock")
    return directory, losses(trainer(directory))


def test_each_side_resumes_from_the_other(stock, tmp_path) -> None:
    """The files have the same names and content; after a resume from either, the losses are
    equal."""
    theirs, wanted = stock
    made, writer = trainer(tmp_path / "ours"), Recording()
    patch(made, writer=writer)
    assert losses(made) == wanted
    assert names(tmp_path / "ours") == names(theirs)
    for step in (2, 4, 6):
        ours = tmp_path / "ours" / f"checkpoint-{step}"
        other = theirs / ours.name
        assert names(ours) == names(other)
        shards = [name for name in names(ours) if name.endswith(".safetensors")]
        assert len(shards) > 2
        for name in names(ours):
            if name == "training_args.bin":  # names its directory
                continue
            if name.endswith((".pt", ".pth")):
                continue  # compared by what a resume makes of them
            assert (ours / name).read_bytes() == (other / name).read_bytes() or "state" in name
    expected = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", *shards}
    assert set(writer.written) == expected
    tail = {step: loss for step, loss in wanted.items() if step > 4}
    by_stock = losses(trainer(tmp_path / "a"), tmp_path / "ours" / "checkpoint-4")
    resumed = trainer(tmp_path / "b", Ours)
    resumed.writer = writer
    by_ours = losses(resumed, theirs / "checkpoint-4")
    assert {s: x for s, x in by_stock.items() if s > 4} == tail
    assert {s: x for s, x in by_ours.items() if s > 4} == tail
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", shards[0]} <= set(writer.read_)


def test_one_line_for_every_trainer(stock, tmp_path) -> None:
    """Trainers of derived classes too; after the undo they are stock again."""

    class Derived(Trainer):
        pass

    writer = Recording()
    patch(writer=writer)
    try:
        with pytest.raises(UsageError, match="already"):
            patch(writer=writer)
        made = trainer(tmp_path / "a", Derived, shards=False)
        own = trainer(tmp_path / "b", Ours)
    finally:
        unpatch()
    assert isinstance(made, Derived)
    assert isinstance(made, WriterMixin)
    assert own.writer == "buffered"
    assert not isinstance(trainer(tmp_path / "c"), WriterMixin)
    assert losses(made) == stock[1]
    assert "model.safetensors" in writer.written
    with pytest.raises(UsageError, match="already"):
        patch(made, writer=writer)
    unpatch(made)
    assert type(made) is Derived
    count = len(writer.written)
    made._save_checkpoint(made.model, None)
    assert len(writer.written) == count


BEST: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "shards": False,
}


def test_rotation_and_the_best(tmp_path) -> None:
    """Old checkpoints are removed after the new one exists; the best one has its own name."""
    options = BEST | {"save_total_limit": 1}
    wanted = trainer(tmp_path / "stock", **options)
    stock_losses = losses(wanted)
    ours = trainer(tmp_path / "ours", **options)
    patch(ours, writer="buffered")
    assert losses(ours) == stock_losses
    assert names(tmp_path / "ours") == names(tmp_path / "stock")
    assert ours.state.best_model_checkpoint == wanted.state.best_model_checkpoint.replace(
        "/stock/", "/ours/"
    )
    last = get_last_checkpoint(str(tmp_path / "ours"))
    assert last is not None
    text = Path(last, "trainer_state.json").read_text()
    assert "staging" not in text


def test_the_best_of_a_run_that_was_moved(tmp_path) -> None:
    """After a resume in another directory it is found by its step, like by the stock Trainer, and
    is not removed."""
    options = BEST | {"save_total_limit": 2, "greater_is_better": True}  # the first is the best
    trainer(tmp_path / "run", max_steps=4, **options).train()
    shutil.copytree(tmp_path / "run", tmp_path / "stock")
    (tmp_path / "run").rename(tmp_path / "ours")
    wanted = trainer(tmp_path / "stock", **options)
    wanted.train(resume_from_checkpoint=True)
    ours = trainer(tmp_path / "ours", **options)
    patch(ours, writer="buffered")
    ours.train(resume_from_checkpoint=True)
    assert wanted.state.best_global_step == 2
    assert wanted.state.best_model_checkpoint == str(tmp_path / "stock" / "checkpoint-2")
    assert ours.state.best_model_checkpoint == str(tmp_path / "ours" / "checkpoint-2")
    assert names(tmp_path / "ours") == names(tmp_path / "stock") == ["checkpoint-2", "checkpoint-6"]
    state = json.loads((tmp_path / "ours" / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == ours.state.best_model_checkpoint
    assert all(map(torch.equal, ours.model.parameters(), wanted.model.parameters()))


_KILLED = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
sys.path[:0] = {tests!r}
from test_transformers import Recording, patch, trainer
made = trainer(Path({directory!r}))
patch(made, writer=Recording())
save = made._save_rng_state
def killing(directory):
    if made.state.global_step == 4:
        made._iobench_writer.dies = "rng_state.pth"
    save(directory)
made._save_rng_state = killing
made.train()
"""


def test_killed_in_the_middle_of_a_save(stock, tmp_path) -> None:
    """No incomplete checkpoint is found; the resumed run cleans up and ends with the same
    losses."""
    code = _KILLED.format(
        tests=[str(Path(__file__).parent), str(Path(__file__).parents[1])], directory=str(tmp_path)
    )
    done = captured([sys.executable, "-c", code], timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left, _ = names(tmp_path)
    assert re.fullmatch(r"_checkpoint-4\.[0-9a-f]+\.iobench-staging", left)
    half = tmp_path / left / "checkpoint-4"
    assert (half / "optimizer.pt").exists()
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    made = trainer(tmp_path)
    patch(made, writer="odirect")
    made.train(resume_from_checkpoint=True)
    assert {e["step"]: e["loss"] for e in made.state.log_history if "loss" in e} == stock[1]
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_other_threads_are_left_alone(tmp_path) -> None:
    """A save of another thread during a checkpoint is made by the stock functions."""
    from iobench.integrations.routed import routed

    writer, stock_save = Recording(), torch.save
    with routed(writer, tmp_path):
        done = threading.Thread(target=lambda: torch.save({}, tmp_path / "theirs.pt"))
        done.start()
        done.join()
        torch.save({"n": 1}, tmp_path / "ours.pt")
        torch.save({"n": 1}, str(tmp_path.with_name("elsewhere.pt")))
        safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "ours.safetensors")
        assert torch.load(tmp_path / "ours.pt") == {"n": 1}
    assert writer.written == ["ours.pt", "ours.safetensors"]
    assert writer.read_ == ["ours.pt"]
    assert torch.save is stock_save
