"""README.md and docs/: every python block runs, in the order of its page, in an empty directory.

Stand-ins take the place of what a reader has: a model, data, a trainer of some framework, a bucket.
Some have tests of their own: checkpointer.md in tests/unit/checkpoint/test_documented.py,
writers.md in tests/unit/writers/test_documented.py, verify.md in test_verify.py, load.md in
test_safe_open.py, export.md in test_export.py, tutorials/ in test_tutorials.py.
tests/unit/test_docs_commands.py checks that no block is left out.
"""

import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer.main
from support.scripted_s3 import scripted_s3

import iobench
from iobench.formats import safetensors, torch_file

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own

Names = dict[str, Any]

_ROOT = Path(__file__).parents[2]
_EXAMPLE = _ROOT / "tests" / "unit" / "results" / "example.jsonl"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_PAGES = [
    page
    for page in (_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md")))
    if _BLOCK.search(page.read_text())
    and page.name not in ("checkpointer.md", "export.md", "load.md", "verify.md", "writers.md")
    and page.parent.name not in ("api", "tutorials")
]
_ELSEWHERE = {"/mnt/nvme": "nvme", '"cuda:1"': '"cpu"', '"cuda"': '"cpu"'}
"""What a page names and this machine may lack."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """s3://bucket, which boto3 finds by environment variables."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    with scripted_s3() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint_url)
        yield


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, with the writer.toml that the pages name."""
    monkeypatch.chdir(tmp_path)
    Path("writer.toml").write_text(iobench.dump_writer(iobench.load_writer("buffered")))


def _nothing(*given: Any, **more: Any) -> None:
    """Replaces work that takes time."""


def _training() -> Names:
    """Enough steps for one checkpoint of `Every(500)`."""
    model = torch.nn.Linear(4, 4)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data": range(501),
        "train": _nothing,
        "state": {"weight": torch.ones(3), "step": 7},
        "tensors": {"weight": torch.ones(3)},
    }


class _LightningTrainer:
    """Accepts plugins like Lightning's; a real one is in test_lightning.py."""

    def __init__(self, plugins: Sequence[Any] = (), max_epochs: int = 1) -> None:
        import lightning.pytorch.plugins as found

        self.plugins = plugins
        assert all(isinstance(one, found.CheckpointIO) for one in plugins)

    def fit(self, model: Any, ckpt_path: str) -> None:
        """Train nothing."""


def _engine() -> Any:
    """A DeepSpeed engine, as far as checkpoints need it; a real one is in test_deepspeed.py."""
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    engine = SimpleNamespace(checkpoint_engine=TorchCheckpointEngine())

    def save_checkpoint(directory: str) -> None:
        Path(directory).mkdir(parents=True)
        engine.checkpoint_engine.save({"w": torch.ones(3)}, f"{directory}/state.pt")

    engine.save_checkpoint = save_checkpoint
    return engine


def _initialize(**given: Any) -> tuple[Any, None]:
    return _engine(), None


def _transformers_trainer() -> Any:
    from transformers import Trainer, TrainingArguments

    return Trainer(torch.nn.Linear(1, 1), TrainingArguments("out", report_to=[], use_cpu=True))


def _readme() -> Iterator[Names]:
    from accelerate import Accelerator

    from iobench.integrations import transformers

    yield {
        **_training(),
        "Trainer": _LightningTrainer,
        "accelerator": Accelerator(),
        "engine": _engine(),
    }
    transformers.unpatch()
    state = iobench.load_checkpoint("runs/a")
    assert set(state) == {"model", "optimizer"}


def _integrations() -> Iterator[Names]:
    import accelerate
    from transformers import Trainer

    from iobench.integrations import transformers

    names = {**_training(), "Accelerator": accelerate.Accelerator}
    names |= {"LightningTrainer": _LightningTrainer, "TransformersTrainer": Trainer}
    names["deepspeed"] = SimpleNamespace(initialize=_initialize)
    names |= {"config": {}, "made": _transformers_trainer}
    yield names
    transformers.unpatch()
    names["engine"].checkpoint_engine.cleanup()
    names["future"].result(timeout=60)
    assert torch.equal(names["state"]["weight"], torch.ones(3))
    assert list(Path("runs/last").iterdir())
    assert Path("runs/a/state.pt").exists()


def _s3() -> Iterator[Names]:
    names = {**_training(), "iobench": iobench, "torch": torch}
    names |= {"safetensors": safetensors, "torch_file": torch_file}
    names["state"] = names["tensors"]
    yield names
    assert torch.equal(names["state"]["weight"], names["model"].weight)


def _writers() -> Iterator[Names]:
    """The files are those of the stock libraries."""
    import safetensors.torch as stock

    names = {**_training(), "iobench": iobench, "torch": torch}
    yield names
    assert torch.equal(stock.load_file("runs/model.safetensors")["weight"], torch.ones(3))
    assert torch.load("runs/state.pt")["step"] == names["state"]["step"] == 7
    assert torch.equal(names["tensors"]["weight"], torch.ones(3))


def _gds() -> Iterator[Names]:
    names = {**_training(), "safetensors": safetensors, "torch_file": torch_file}
    names["writer"] = iobench.load_writer("buffered")
    yield names
    assert names["state"].keys() == names["model"].state_dict().keys()


def _results() -> Iterator[Names]:
    Path("results").mkdir()
    shutil.copy(_EXAMPLE, "results/20260131T120000Z-llama7b.jsonl")
    names: Names = {}
    yield names
    assert {"bytes_per_s", "file", "run_status"} <= set(names["samples"].columns)


def _exec() -> Iterator[Names]:
    names = _training()
    yield names
    assert names["state"]["step"] == 7
    assert torch.equal(names["tensors"]["weight"], torch.ones(3))


def _launchers() -> Iterator[Names]:
    """Ray, whose workers have torchrun's variables; a run with these is in test_ranks_run.py."""
    from support.cli import app

    ran: list[list[str]] = []

    class TorchTrainer:
        def __init__(self, function: Callable[[], None], scaling_config: SimpleNamespace) -> None:
            assert scaling_config.num_workers > 1
            self.fit = function

    def run(command: list[str], *, check: bool) -> None:
        assert check
        ran.append(command)

    train = SimpleNamespace(ScalingConfig=SimpleNamespace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", SimpleNamespace(train=train))
        patch.setitem(sys.modules, "ray.train", train)
        patch.setitem(sys.modules, "ray.train.torch", SimpleNamespace(TorchTrainer=TorchTrainer))
        patch.setattr(subprocess, "run", run)
        yield {}
    ((python, *words),) = ran
    assert (python, words[:2]) == (sys.executable, ["-m", "iobench"])
    typer.main.get_command(app).make_context("iobench", words[2:])


def _plain() -> Iterator[Names]:
    yield {**_training(), "iobench": iobench, "torch": torch}


def _migrate() -> Iterator[Names]:
    names = {**_training(), "iobench": iobench, "torch": torch, "Trainer": _LightningTrainer}
    yield names
    assert names["first"] == 0
    assert iobench.load_checkpoint("runs/a", 0).keys() == {"model", "optimizer"}
    assert names["trainer"].plugins
    assert Path("dcp/step-100/.metadata").exists()
    assert Path("dcp/step-101/.metadata").exists()


def _offload() -> Iterator[Names]:
    """A job of one rank; real ones are in test_offload_ranks.py."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{Path.cwd()}/meeting", rank=0, world_size=1
    )
    try:
        yield {}
    finally:
        torch.distributed.destroy_process_group()


_STAND_INS: dict[str, Callable[[], Iterator[Names]]] = {
    "README.md": _readme,
    "exec.md": _exec,
    "gds.md": _gds,
    "integrations.md": _integrations,
    "migrate.md": _migrate,
    "results.md": _results,
    "run-over-ranks.md": _launchers,
    "offload.md": _offload,
    "s3.md": _s3,
    "writers-in-your-framework.md": _writers,
}


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_every_block_runs(page, bucket) -> None:
    """One block after the other, in the order of the page."""
    made = _STAND_INS.get(page.name, _plain)()
    names = next(made)
    for code in _BLOCK.findall(page.read_text()):
        for one, other in _ELSEWHERE.items():
            code = code.replace(one, other)
        if "lightning" in code and "LightningTrainer" in names:
            names["Trainer"] = names["LightningTrainer"]
        if "transformers" in code and "TransformersTrainer" in names:
            names["Trainer"], names["trainer"] = names["TransformersTrainer"], names["made"]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(code, str(page), "exec"), names)
    assert next(made, None) is None
