"""Checkpoints of every format that `iobench verify` reads, made by the programs that define them,
and the damage that tests do to copies of them."""

import importlib
import io
import json
import os
import shutil
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

import iobench
from iobench.formats import safetensors, torch_file
from iobench.integrations.dcp import StorageWriter

_BUFFERED = iobench.load_writer("buffered")


def _state(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(96, 64, generator=made),
        "layers.0.bias": torch.zeros(64),
        "layers.1.weight": torch.randn(96, 64, generator=made).to(torch.bfloat16),
        "head.weight": torch.randn(100, 64, generator=made).half(),
    }


def _odd() -> dict[str, torch.Tensor]:
    """Values that could be taken for damage, and are none."""
    padded = torch.randn(2048, 1024)
    padded[1900:] = 0  # rows that no token uses, as aligned to pages as the header allows
    return {
        "embedding": padded,
        "mask": torch.tril(torch.ones(512, 512, dtype=torch.bool)),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "zeros": torch.zeros(64, 1024),
        "nan": torch.full((8,), float("nan")),
        "fp8": torch.randn(64).to(torch.float8_e4m3fn),
    }


# safetensors


def _safetensors(at: Path) -> None:
    save_file(_state(), at / "model.safetensors")
    (at / "config.json").write_text("{}")


def _adapter(at: Path) -> None:
    save_file({"lora_A": torch.randn(8, 64), "lora_B": torch.zeros(64, 8)}, at / _ADAPTER)
    (at / "adapter_config.json").write_text('{"peft_type": "LORA"}')


_ADAPTER = "adapter_model.safetensors"


# transformers


def _llama() -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    return transformers.LlamaForCausalLM(config)


def _tokenizer(at: Path) -> None:
    tokenizers = importlib.import_module("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    fast = importlib.import_module("transformers").PreTrainedTokenizerFast
    fast(tokenizer_object=made, pad_token="b").save_pretrained(at)


def _hf(model: Any, at: Path, **options: Any) -> None:
    model.save_pretrained(at, **options)
    _tokenizer(at)


def _hf_bin(at: Path) -> None:
    """A directory of before safetensors: shards of torch.save, and their index."""
    model = _llama()
    model.config.save_pretrained(at)
    _tokenizer(at)
    items = list(model.state_dict().items())
    names = [f"pytorch_model-{n:05}-of-00002.bin" for n in (1, 2)]
    halves = dict(items[:20]), dict(items[20:])
    for name, half in zip(names, halves, strict=True):
        torch.save(half, at / name)
    weights = {one: name for name, half in zip(names, halves, strict=True) for one in half}
    index = {"metadata": {"total_size": 1}, "weight_map": weights}
    (at / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _gpt2() -> Any:
    transformers = importlib.import_module("transformers")
    config = transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def _bert() -> Any:
    transformers = importlib.import_module("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=128, num_attention_heads=2, **small)
    return transformers.BertModel(config)


class _Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(8) + index
        return {"input_ids": ids, "labels": ids}


def _hf_trainer(at: Path) -> None:
    transformers = importlib.import_module("transformers")
    options = {"output_dir": str(at), "max_steps": 4, "save_steps": 2, "report_to": "none"}
    made = transformers.TrainingArguments(**options, disable_tqdm=True, use_cpu=True)
    tokenizer = at / "tokenizer"
    _tokenizer(tokenizer)
    loaded = importlib.import_module("transformers").AutoTokenizer.from_pretrained(tokenizer)
    shutil.rmtree(tokenizer)
    transformers.Trainer(
        model=_llama(), args=made, train_dataset=_Tokens(), processing_class=loaded
    ).train()


# torch.save


def _torch_optimizer(at: Path) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, at / "both.pth")


def _torch_views(at: Path) -> None:
    whole = torch.randn(64, 64)
    torch.save({"whole": whole, "turned": whole.T, "row": whole[3], "tied": whole}, at / "views.pt")


def _torch_without_crc(at: Path) -> None:
    from torch.serialization import set_crc32_options

    set_crc32_options(False)
    try:
        torch.save(_state(), at / "model.pt")
    finally:
        set_crc32_options(True)


class Opaque:
    """An object that `weights_only` refuses."""


def _torch_script(at: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(torch.nn.Linear(8, 8), torch.randn(1, 8)), at / "m.pt")


def _torch_stream(at: Path) -> None:
    with _BUFFERED.open(str(at / "model.pt")) as file:
        torch.save(_state(), file)


# DCP


def _dcp_several_files(at: Path) -> None:
    writer = dcp.FileSystemWriter(at, thread_count=3, single_file_per_rank=False)
    dcp.save({"model": _state()}, storage_writer=writer)


def _megatron(at: Path) -> None:
    """The files of torch_dist: DCP, plain values in common.pt, and the newest iteration."""
    step = at / "iter_0000500"
    dcp.save(_state(), checkpoint_id=step)
    torch.save({"iteration": 500, "args": {"lr": 1.0}}, step / "common.pt")
    (step / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (at / "latest_checkpointed_iteration.txt").write_text("500")


# Lightning, DeepSpeed, Accelerate


def _lightning(at: Path) -> None:
    lightning = importlib.import_module("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]  # known at run time
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    options: dict[str, Any] = {"max_steps": 2, "accelerator": "cpu", "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(**options, **quiet, enable_checkpointing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 64)))
        trainer.save_checkpoint(at / "last.ckpt")


def _deepspeed(stage: int) -> Callable[[Path], None]:
    def save(at: Path) -> None:
        deepspeed = importlib.import_module("deepspeed")
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
        config = {
            "train_batch_size": 4,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, dist_init_required=False, config=config
            )
            engine.backward(engine(torch.randn(4, 64)).sum())
            engine.step()
            engine.save_checkpoint(str(at), tag="global_step1")

    return save


def _deepspeed_two_ranks(at: Path) -> None:
    """The second rank's file is like that of the first one."""
    _deepspeed(1)(at)
    step = at / "global_step1"
    one = step / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(one, step / "zero_pp_rank_1_mp_rank_00_optim_states.pt")


def _accelerate(at: Path) -> None:
    accelerate = importlib.import_module("accelerate")
    made = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(64, 64)
    made.prepare(model, torch.optim.AdamW(model.parameters()))
    made.save_state(str(at / "state"))


# iobench


def _run(at: Path, *steps: int, keep: int = 2, model: bool = True) -> None:
    with iobench.Checkpointer(at, writer=_BUFFERED, keep=iobench.KeepLast(keep)) as checkpointer:
        for step in steps:
            checkpointer.save({"step": step} | ({"model": _state(step)} if model else {}), step)


def _run_half_written(at: Path) -> None:
    _run(at, 10, 20)
    (at / ".step-30.0123abcd.part").mkdir()
    (at / ".step-30.0123abcd.part" / "tensors.safetensors").write_bytes(bytes(100))


def _exported(at: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    with iobench.offload.AdamW(model.parameters(), at / "adam") as optimizer:
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
    torch.save(model.state_dict(), at / "model.pt")


GOOD: dict[str, Callable[[Path], object]] = {
    "safetensors": _safetensors,
    "safetensors-odd": lambda at: save_file(_odd(), at / "odd.safetensors", {"format": "pt"}),
    "safetensors-iobench": lambda at: safetensors.save(
        _state(1), "weights.safetensors", at, _BUFFERED
    ),
    "adapter": _adapter,
    "hf": lambda at: _hf(_llama(), at),
    "hf-shards": lambda at: _hf(_llama(), at, max_shard_size="150KB"),
    "hf-bf16": lambda at: _hf(_llama().to(torch.bfloat16), at, max_shard_size="100KB"),
    "hf-bin": _hf_bin,
    "hf-gpt2": lambda at: _hf(_gpt2(), at),
    "hf-bert": lambda at: _hf(_bert(), at),
    "hf-trainer": _hf_trainer,
    "torch": lambda at: torch.save({"model": _state(), "step": 7}, at / "model.pt"),
    "torch-optimizer": _torch_optimizer,
    "torch-views": _torch_views,
    "torch-list": lambda at: torch.save([torch.randn(3), (torch.ones(2), 5)], at / "list.pt"),
    "torch-tensor": lambda at: torch.save(torch.randn(64, 64), at / "one.pt"),
    "torch-odd": lambda at: torch.save(_odd(), at / "odd.pt"),
    "torch-no-crc": _torch_without_crc,
    "torch-old": lambda at: torch.save(
        _state(), at / "old.pt", _use_new_zipfile_serialization=False
    ),
    "torch-object": lambda at: torch.save({"model": _state(), "args": Opaque()}, at / "model.pt"),
    "torch-script": _torch_script,
    "torch-iobench": lambda at: torch_file.save({"model": _state()}, "model.pt", at, _BUFFERED),
    "torch-stream": _torch_stream,
    "dcp": lambda at: dcp.save({"model": _state(), "step": 3, "name": "x"}, checkpoint_id=at),
    "dcp-odd": lambda at: dcp.save(
        {"model": _odd(), "nested": [{"a": torch.ones(3)}, {"b": 1}]}, checkpoint_id=at
    ),
    "dcp-iobench": lambda at: dcp.save(
        {"model": _state()}, storage_writer=StorageWriter(at, "buffered")
    ),
    "dcp-files": _dcp_several_files,
    "megatron": _megatron,
    "lightning": _lightning,
    **{f"deepspeed-{stage}": _deepspeed(stage) for stage in range(4)},
    "deepspeed-ranks": _deepspeed_two_ranks,
    "accelerate": _accelerate,
    "run": lambda at: _run(at, 10, 20),
    "run-values": lambda at: _run(at, 1, model=False),
    "run-replaced": lambda at: _run(at, 1, 2, 3),
    "run-half": _run_half_written,
    "exported": _exported,
}
"""What makes a whole checkpoint in an empty directory, by name."""


def make_all(at: Path) -> None:
    """Make the checkpoints of GOOD below `at`, each in a directory with its name.

    In a process of its own: DeepSpeed and DTensors keep process groups that are destroyed.
    """
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # a minute
    os.environ["LOCAL_RANK"] = "0"
    store = f"file://{at / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    for name, make in GOOD.items():
        (at / name).mkdir()
        make(at / name)
    torch.distributed.destroy_process_group()


# Damage.


def flip(file: Path, what: bytes | int) -> None:
    """Flip a bit of a byte: at an offset, or of the first occurrence of some bytes."""
    data = bytearray(file.read_bytes())
    at = what if isinstance(what, int) else data.index(what)
    data[at] ^= 4
    file.write_bytes(data)


def cut(file: Path, size_bytes: int) -> None:
    """Leave out the last bytes."""
    os.truncate(file, file.stat().st_size - size_bytes)


def zeros(file: Path, page: int, pages: int = 1) -> None:
    """Write pages of zeros, like a file system that lost them in a power cut."""
    with file.open("r+b") as opened:
        opened.seek(page * 4096)
        opened.write(bytes(min(pages * 4096, file.stat().st_size - page * 4096)))


def change_header(file: Path, change: Callable[[Any], None]) -> None:
    """Change the header of a safetensors file; its length stays."""
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    file.write_bytes(data[:8] + text + data[8 + length :])


def change_metadata(directory: Path, change: Callable[[Any], None]) -> None:
    """Change the metadata of DCP."""
    import pickle

    file = directory / ".metadata"
    found = pickle.load(io.BytesIO(file.read_bytes()))
    change(found)
    file.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    make_all(Path(sys.argv[1]))
