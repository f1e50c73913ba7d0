"""DLIO's checkpoint class over our writers: its interface, and the real DLIO where installed."""

import importlib
import importlib.util
import inspect
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from iobench.errors import DataMismatchError, UnknownNameError

_PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
_PYTORCH = "dlio_benchmark.checkpointing.pytorch_checkpointing"


class PyTorchCheckpointing:
    """The calls of DLIO's class, the base class of ours, with one model and one optimizer state."""

    folder = ""

    def __init__(self) -> None:
        self.layer_state = {"0": {"w": torch.rand(5000)}}
        self.optimization_state = {"0": torch.rand(9000)}

    def get_name(self, suffix: str) -> str:
        return os.path.join(self.folder, f"{suffix}.pt")

    def save_state(self, suffix: str, state: Any, fsync: bool = False) -> None:
        with open(self.get_name(suffix), "wb") as file:
            torch.save(state, file)

    def load_state(self, suffix: str, state: Any) -> None:
        assert len(torch.load(self.get_name(suffix))) > 0

    def save_checkpoint(self, epoch: int, step_number: int) -> None:
        where = f"global_epoch{epoch}_step{step_number}"
        os.makedirs(os.path.join(self.folder, where), exist_ok=True)
        name = f"{where}/zero_pp_rank_0_mp_rank_0"
        self.save_state(suffix=f"{name}_model_states", state=self.layer_state, fsync=False)
        self.save_state(suffix=f"{name}_optim_states", state=self.optimization_state, fsync=False)

    def load_checkpoint(self, epoch: int, step_number: int) -> None:
        name = f"global_epoch{epoch}_step{step_number}/zero_pp_rank_0_mp_rank_0"
        self.load_state(suffix=f"{name}_model_states", state=self.layer_state)
        self.load_state(suffix=f"{name}_optim_states", state=self.optimization_state)

    def finalize(self) -> None: ...


@pytest.fixture
def dlio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """Our module with the replacement; DLIO's own packages are not loaded."""
    for name in ("dlio_benchmark", "dlio_benchmark.checkpointing", _PYTORCH):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(
        sys.modules[_PYTORCH], "PyTorchCheckpointing", PyTorchCheckpointing, raising=False
    )
    monkeypatch.setattr(PyTorchCheckpointing, "folder", str(tmp_path))
    sys.modules.pop("iobench.integrations.dlio", None)
    yield importlib.import_module("iobench.integrations.dlio")
    sys.modules.pop("iobench.integrations.dlio", None)


def test_the_interface(dlio, tmp_path, monkeypatch, caplog) -> None:
    """DLIO finds one object by the name in docs/integrations.md. The stock class loads our files,
    and ours loads stock files."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", _PAGE.read_text(), re.DOTALL | re.MULTILINE)
    named = yaml.safe_load(block)["checkpoint"]["checkpoint_mechanism_classname"]
    module, _, name = named.rpartition(".")
    assert module == dlio.__name__
    found = dict(vars(dlio))[name]
    assert issubclass(found, PyTorchCheckpointing)
    monkeypatch.setenv("IOBENCH_WRITER", "odirect")
    made = found.get_instance()
    assert found.get_instance() is made
    made.save_checkpoint(1, 20)
    stock = PyTorchCheckpointing()
    stock.load_checkpoint(1, 20)
    file = tmp_path / "global_epoch1_step20" / "zero_pp_rank_0_mp_rank_0_optim_states.pt"
    assert torch.equal(torch.load(file)["0"], made.optimization_state["0"])
    stock.save_checkpoint(2, 40)
    made.load_checkpoint(2, 40)
    assert [(m.writer, m.operation, m.durable) for m in made.transfers] == [
        *(("odirect", "write", True),) * 2,
        *(("odirect", "read", True),) * 2,
    ]
    with caplog.at_level(logging.INFO, logger="iobench"):
        made.finalize()
    assert "write: 2 files" in caplog.text
    assert "read: 2 files" in caplog.text
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataMismatchError):
        made.load_checkpoint(1, 20)


def test_a_class_of_ones_own(dlio, monkeypatch) -> None:
    """It selects its own writer, and is another object."""
    mine = type("Mine", (dlio.Checkpointing,), {"writer": "buffered"})
    made = mine.get_instance()
    assert made is not dlio.Checkpointing.get_instance()
    made.save_checkpoint(1, 1)
    assert made.transfers[0].writer == "buffered"
    monkeypatch.setenv("IOBENCH_WRITER", "odirectt")
    with pytest.raises(UnknownNameError, match="odirect"):
        type("Typo", (dlio.Checkpointing,), {}).get_instance()


@pytest.mark.skipif(
    importlib.util.find_spec("dlio_benchmark") is None,
    reason="dlio_benchmark is not installed; `make test-dlio` runs these tests with it",
)
class TestReal:
    """The installed DLIO without TensorFlow and DALI, which PyTorch runs do not load."""

    def test_signatures(self) -> None:
        """Our overrides accept the arguments that DLIO passes."""
        real = importlib.import_module(_PYTORCH).PyTorchCheckpointing
        ours = importlib.import_module("iobench.integrations.dlio").Checkpointing
        for name in ("save_state", "load_state"):
            theirs = inspect.signature(getattr(real, name)).parameters
            mine = inspect.signature(getattr(ours, name)).parameters
            assert list(mine)[: len(theirs)] == [*theirs]
        assert not ours.__abstractmethods__

    def test_checkpointing_workload(self, tmp_path) -> None:
        """`dlio_benchmark.main` saves and loads a small model; every file goes through odirect."""
        overrides = {
            "++workload.model": {
                "num_layers": 2,
                "transformer.hidden_size": 64,
                "transformer.ffn_hidden_size": 128,
                "transformer.vocab_size": 500,
            },
            "++workload.checkpoint": {
                "checkpoint_folder": tmp_path / "saved",
                "checkpoint_mechanism_classname": "iobench.integrations.dlio.Checkpointing",
                "num_checkpoints_write": 2,
                "num_checkpoints_read": 2,
                "time_between_checkpoints": 0,
            },
            "hydra": {"run.dir": tmp_path / "output"},
        }
        done = subprocess.run(
            [sys.executable, "-m", "dlio_benchmark.main", "workload=llama_8b_zero3"]
            + [
                f"{at}.{key}={value}"
                for at, all_ in overrides.items()
                for key, value in all_.items()
            ],
            env=os.environ | {"IOBENCH_WRITER": "odirect"},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout
        assert re.search(r"iobench: write: 4 files, \d+ bytes \(direct \d+\)", done.stdout)
        assert re.search(r"iobench: read: 4 files, \d+ bytes \(direct \d+\)", done.stdout)
        for step in (1, 2):
            for kind in ("model", "optim"):
                name = f"global_epoch1_step{step}/zero_pp_rank_0_mp_rank_0_{kind}_states.pt"
                assert torch.load(tmp_path / "saved" / name)
