"""Lightning's checkpoints through our writers: a real Trainer saves, is killed, and resumes."""

import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from iobench.errors import OptionError, TransferError
from iobench.writers.buffered import BufferedWriter
from iobench.writers.transfer import Transfer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from iobench.integrations.lightning import AsyncCheckpointIO, CheckpointIO

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's hints and the warnings of others


class Model(lightning.LightningModule):
    """A tiny regression that reports each loss."""

    def __init__(self, kill_at: int = -1) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
        )
        self.losses: dict[int, float] = {}
        self.kill_at = kill_at

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if self.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.manual_seed(self.global_step)  # Lightning restores neither data nor random state
        data = torch.randn(4, 9)
        loss = torch.nn.functional.mse_loss(self.layer(data[:, :8]).squeeze(), data[:, 8])
        self.losses[self.global_step] = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(12.0))


def fit(
    directory: Path,
    plugin: Any = None,
    *,
    steps: int = 12,
    resume: Path | None = None,
    kill_at: int = -1,
    keep: int = 2,
) -> dict[int, float]:
    """Train with a checkpoint after every 3rd step; the losses by step."""
    torch.manual_seed(0)
    model = Model(kill_at)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[plugin] if plugin else None,
        callbacks=[
            ModelCheckpoint(
                dirpath=directory,
                filename="{step}",
                every_n_train_steps=3,
                save_top_k=keep,
                monitor="step",
                mode="max",
            )
        ],
    )
    trainer.fit(model, ckpt_path=str(resume) if resume else None, weights_only=False)
    return model.losses


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """What stock Lightning saved, and its losses."""
    directory = tmp_path_factory.mktemp("stock")
    return directory, fit(directory)


@pytest.mark.parametrize("made", [CheckpointIO, AsyncCheckpointIO])
def test_each_side_resumes_from_the_other(made, stock, tmp_path) -> None:
    """Checkpoints hold the same; resumed from either, a run has the losses of one that went on."""
    theirs, losses = stock
    plugin = made("odirect")
    assert fit(tmp_path / "ours", plugin) == losses
    assert names(tmp_path / "ours") == names(theirs) == ["step=12.ckpt", "step=9.ckpt"]
    for name in names(theirs):
        ours = torch.load(tmp_path / "ours" / name, weights_only=False)
        wanted = torch.load(theirs / name, weights_only=False)
        assert same(ours["state_dict"], wanted["state_dict"])
        assert same(ours["optimizer_states"], wanted["optimizer_states"])
        assert same(ours["lr_schedulers"], wanted["lr_schedulers"])
    tail = {step: loss for step, loss in losses.items() if step >= 9}
    by_stock = fit(tmp_path / "a", resume=tmp_path / "ours" / "step=9.ckpt")
    by_ours = fit(tmp_path / "b", made("buffered"), resume=theirs / "step=9.ckpt")
    assert by_stock == by_ours == tail
    if made is CheckpointIO:
        assert [t.writer for t in plugin.transfers] == ["odirect"] * 4
    else:
        assert [(save.step, save.status) for save in plugin.saves] == [
            *((3, "committed"), (6, "committed"), (9, "committed"), (12, "committed"))
        ]


class Refusing(BufferedWriter):
    """Fails for the file that the test names, and holds all others until it may go on."""

    refused = ""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()

    def write(self, image: Any, target: Any, **options: Any) -> Transfer:
        assert self.go.wait(30)
        if image.path == self.refused:
            raise TransferError(28, "No space left on device", image.path)
        return super().write(image, target, **options)


def test_a_failure_in_the_background_ends_the_fit(tmp_path) -> None:
    """Raised by the next save or by teardown, never reported as a success; the older one stays."""
    for refused in ("step=6.ckpt", "step=12.ckpt"):
        directory = tmp_path / refused
        writer = Refusing()
        writer.refused = refused
        with pytest.raises(TransferError, match="No space left"):
            fit(directory, AsyncCheckpointIO(writer), keep=1)
        kept = "step=3.ckpt" if refused == "step=6.ckpt" else "step=9.ckpt"
        assert kept in names(directory)
        assert refused not in names(directory)


def test_an_old_checkpoint_stays_until_the_new_one_is_there(tmp_path, monkeypatch) -> None:
    """Lightning removes the old one right after asking for the new one.

    Relative names are those of the directory that the process was in when it gave them.
    """
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "old.ckpt").touch()
    monkeypatch.chdir(tmp_path)
    writer = Refusing()
    plugin = AsyncCheckpointIO(writer)
    plugin.save_checkpoint({"n": torch.arange(5)}, "old.ckpt")
    plugin.wait()
    writer.go.clear()
    plugin.save_checkpoint({"n": torch.arange(6)}, "new.ckpt")
    plugin.remove_checkpoint("old.ckpt")
    monkeypatch.chdir("elsewhere")
    assert names(tmp_path) == ["elsewhere", "old.ckpt"]
    writer.go.set()
    assert len(plugin.load_checkpoint(tmp_path / "new.ckpt")["n"]) == 6
    assert names(tmp_path) == ["elsewhere", "new.ckpt"]
    assert names(tmp_path / "elsewhere") == ["old.ckpt"]
    plugin.remove_checkpoint(tmp_path / "never.ckpt")
    plugin.remove_checkpoint(tmp_path / "new.ckpt")
    assert names(tmp_path) == ["elsewhere"]
    plugin.teardown()


def test_what_it_refuses(tmp_path) -> None:
    for plugin in (CheckpointIO(), AsyncCheckpointIO()):
        with pytest.raises(OptionError, match="storage_options"):
            plugin.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"x": 1})
        with pytest.raises(FileNotFoundError):
            plugin.load_checkpoint(tmp_path / "none.ckpt")
        plugin.teardown()
