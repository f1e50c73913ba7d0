"""iobench verify: finds all damage of a corpus, names file and tensor, and gives no false alarm."""

import contextlib
import enum
import io
import json
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoint_corpus import GOOD, change_header, change_metadata, cut, flip, zeros
from support.s3_servers import put_tree
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import iobench
from iobench.errors import DataMismatchError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks that make the corpus


@pytest.mark.parametrize("name", GOOD)
def test_no_false_alarm(name: str, corpus, tmp_path) -> None:
    """Nothing is found in a whole checkpoint, also after its checksums were recorded; then every
    byte is proved."""
    copy = tmp_path / name
    shutil.copytree(corpus(name), copy)
    found = iobench.verify(copy, values=True)
    assert found.findings == tuple(f for f in found.findings if "infinite" in f.what)
    assert found.kinds
    assert iobench.verify(copy, record=True).ok
    again = iobench.verify(copy)
    assert (again.findings, again.unproved) == ((), {})
    assert again.proved_bytes == again.size_bytes > 0


_SHARD = "model-00002-of-00005.safetensors"
_STEP = "global_step1"
_OPTIMIZER = f"{_STEP}/zero_pp_rank_0_mp_rank_00_optim_states.pt"
_MODEL = f"{_STEP}/mp_rank_00_model_states.pt"


def _tensor_at(file: Path, name: str) -> int:
    """The offset of a tensor in a safetensors file."""
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    begin: int = json.loads(data[8 : 8 + length])[name]["data_offsets"][0]
    return 8 + length + begin


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _first(name: str) -> bytes:
    """The first bytes of a tensor of the state that most of the corpus has."""
    return _bytes_of(_corpus_state()[name])[:32]


def _corpus_state(seed: int = 0) -> dict[str, torch.Tensor]:
    from support import checkpoint_corpus

    return checkpoint_corpus._state(seed)


def _drop_tensor(file: Path, name: str) -> None:
    tensors = load_file(file)
    tensors.pop(name)
    save_file(tensors, file, metadata={"format": "pt"})


def _add_tensor(file: Path, name: str, tensor: torch.Tensor) -> None:
    save_file({**load_file(file), name: tensor}, file, metadata={"format": "pt"})


def _shape(name: str, shape: list[int]) -> Callable[[Any], None]:
    def change(header: Any) -> None:
        header[name]["shape"] = shape

    return change


def _dtype(found: Any) -> None:
    name = "model.layers.0.weight"
    old = found.state_dict_metadata[name]
    old.properties.dtype = torch.float64


def _chunk(found: Any) -> None:
    name = "model.layers.0.weight"
    key = next(one for one in found.storage_data if one.fqn == name)
    del found.storage_data[key]


def _evil(file: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(file.parent / "ran"),)

    file.write_bytes(pickle.dumps(Evil()))


_ST, _PT, _PART = "model.safetensors", "model.pt", "__0_0.distcp"
_INDEX, _THIRD = "model.safetensors.index.json", "model-00003-of-00005.safetensors"
_BIN = "pytorch_model-0000{}-of-00002.bin"
_STEP_10, _STEP_20 = (f"step-{step}/tensors.safetensors" for step in (10, 20))
_MOMENT = "optimizer_state_dict.base_optimizer_state.state.0.exp_avg_sq"
_GATE, _WEIGHT = "model.layers.0.mlp.gate_proj.weight", "layers.1.weight"

BAD: list[tuple[str, str, Callable[[Path], object], str, str]] = [
    ("safetensors", _ST, lambda f: cut(f, 100), "head.weight", "100 bytes are missing"),
    ("safetensors", _ST, lambda f: f.open("ab").write(bytes(5)), "", "5 bytes follow the last"),
    ("safetensors", _ST, lambda f: os.truncate(f, 0), "", "not a safetensors file"),
    ("safetensors", _ST, lambda f: flip(f, 8), "", "not a safetensors file"),
    ("safetensors", _ST, lambda f: zeros(f, 0, 100), "", "not a safetensors file"),
    ("safetensors", _ST, lambda f: zeros(f, 1, 2), "layers.0.weight", "zeros"),
    (
        *("safetensors", _ST, lambda f: change_header(f, _shape("layers.0.weight", [69, 64]))),
        *("", "'layers.0.weight' has 24576 bytes"),
    ),
    (
        *("safetensors-iobench", "weights.safetensors", lambda f: zeros(f, 10, 9)),
        *("head.weight", "zeros"),
    ),
    ("hf-shards", _SHARD, Path.unlink, "model.layers.0.input_layernorm.weight", "is missing"),
    (
        *("hf-shards", "model-00006-of-00006.safetensors"),
        *(lambda f: shutil.copy(f.with_name(_SHARD), f), "", "an extra shard"),
    ),
    (
        *("hf-shards", _SHARD, lambda f: cut(f, 30000)),
        *("model.layers.1.self_attn.q_proj.weight", "bytes are missing"),
    ),
    (
        *("hf-shards", _SHARD, lambda f: shutil.copy(f.with_name(_THIRD), f)),
        *(_GATE, "lacks a tensor"),
    ),
    ("hf-shards", _SHARD, lambda f: _drop_tensor(f, _GATE), _GATE, "lacks a tensor"),
    (
        *("hf-shards", _SHARD, lambda f: _add_tensor(f, "model.norm.weight", torch.ones(64))),
        *("model.norm.weight", "twice"),
    ),
    (
        *("hf-shards", _SHARD, lambda f: _add_tensor(f, "more", torch.ones(64))),
        *("more", f"not in {_INDEX}"),
    ),
    ("hf-shards", _INDEX, lambda f: cut(f, 100), "", "not JSON"),
    (
        *("hf-shards", _SHARD, lambda f: (f.with_name(_INDEX).unlink(), f.unlink())),
        *("", "is missing among its shards"),
    ),
    ("hf", "config.json", lambda f: zeros(f, 0), "", "zeros instead of JSON"),
    ("hf", _ST, lambda f: zeros(f, 40, 3), _GATE, "zeros"),
    ("hf-bin", _BIN.format(1), lambda f: flip(f, 30000), "model.embed_tokens.weight", "CRC-32"),
    ("hf-bin", _BIN.format(2), Path.unlink, "model.layers.2.self_attn.k_proj.weight", "missing"),
    ("hf-trainer", "checkpoint-4/optimizer.pt", lambda f: cut(f, 1000), "", "not a whole zip"),
    ("torch", _PT, lambda f: flip(f, _first(_WEIGHT)), f"model.{_WEIGHT}", "CRC-32"),
    ("torch", _PT, lambda f: flip(f, _WEIGHT.encode()), "", "CRC-32"),
    ("torch", _PT, lambda f: flip(f, f.read_bytes().rindex(b"data/1")), "", "header in the zip"),
    ("torch", _PT, lambda f: cut(f, 20000), "", "not a whole zip"),
    ("torch", _PT, lambda f: zeros(f, 0), "", "begins with zeros"),
    ("torch-odd", "odd.pt", lambda f: zeros(f, 300, 4), "embedding", "a hole"),
    ("torch-object", _PT, lambda f: flip(f, _first(_WEIGHT)), f"model.{_WEIGHT}", "CRC-32"),
    ("lightning", "last.ckpt", lambda f: flip(f, 10000), "state_dict.layer.weight", "CRC-32"),
    ("dcp", _PART, lambda f: flip(f, _first(_WEIGHT)), f"model.{_WEIGHT}", "CRC-32"),
    ("dcp", _PART, lambda f: cut(f, 5000), "", "bytes are missing"),
    ("dcp", _PART, lambda f: zeros(f, 4, 2), "", "a hole"),
    ("dcp-files", "__0_1.distcp", Path.unlink, "model.", "is missing"),
    ("dcp", "__1_0.distcp", lambda f: shutil.copy(f.with_name(_PART), f), "", "an extra file"),
    ("dcp", ".metadata", Path.unlink, "", "is missing"),
    ("dcp", ".metadata", lambda f: cut(f, 50), "", "not metadata of DCP"),
    ("dcp", ".metadata", _evil, "", "posix.mkdir"),
    (
        *("dcp", _PART, lambda f: change_metadata(f.parent, _dtype)),
        *("model.layers.0.weight", ".metadata says float64"),
    ),
    (
        *("dcp", ".metadata", lambda f: change_metadata(f.parent, _chunk)),
        *("model.layers.0.weight", "names no file"),
    ),
    ("megatron", "iter_0000500/common.pt", Path.unlink, "", "is missing"),
    (
        *("megatron", "latest_checkpointed_iteration.txt", lambda f: f.write_text("600")),
        *("", "no iter_0000600"),
    ),
    ("deepspeed-2", _OPTIMIZER, lambda f: flip(f, 20000), _MOMENT, "differs"),
    ("deepspeed-ranks", _OPTIMIZER, Path.unlink, "", "is missing among the optim states"),
    ("deepspeed-1", _MODEL, Path.unlink, "", "is missing"),
    (
        "deepspeed-1",
        "latest",
        lambda f: shutil.rmtree(f.parent / _STEP),
        "",
        f"there is no {_STEP}",
    ),
    (
        *("run", _STEP_20, lambda f: flip(f, _tensor_at(f, "model.head.weight"))),
        *("model.head.weight", "XXH3"),
    ),
    ("run", _STEP_20, lambda f: cut(f, 10), "model.head.weight", "10 bytes are missing"),
    ("run", _STEP_10, lambda f: zeros(f, 2, 1), "model.layers.0.weight", "a hole"),
    ("run", _STEP_10, Path.unlink, "model.", "is missing"),
    ("run-values", "step-1/state.json", lambda f: flip(f, 3), "", "XXH3"),
    ("run", "step-10/manifest.json", lambda f: flip(f, b"created_s"), "", "damaged, its checksum"),
    ("run", "step-10/manifest.json", Path.unlink, "", "no complete checkpoint"),
    (
        *("run", "step-20/tensors-2.safetensors"),
        *(lambda f: shutil.copy(f.parents[1] / _STEP_10, f), "", "not in the manifest"),
    ),
]
"""A whole checkpoint, the file of a finding, what is done to it, and the finding's tensor and
words."""


def _named(report: Any, path: str, tensor: str, what: str) -> bool:
    return any(
        (one.path, tensor in one.tensor, what in one.what) == (path, True, True)
        and (tensor == "" or tensor.endswith(".") or one.tensor == tensor)
        for one in report.errors
    )


@pytest.mark.parametrize(
    ("good", "path", "damage", "tensor", "what"), BAD, ids=[f"{one[0]}: {one[-1]}" for one in BAD]
)
def test_damage_is_found_and_named(good, path, damage, tensor, what, corpus, tmp_path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(corpus(good), copy)
    damage(copy / path)
    report = iobench.verify(copy)
    assert not report.ok
    assert _named(report, path, tensor, what), [str(one) for one in report.findings]
    assert not (copy / "ran").exists()


def test_what_a_model_lacks(corpus, tmp_path, iobench_inside) -> None:
    """Without a tokenizer or its config it is not damaged: a warning, and exit code 0."""
    copy = tmp_path / "hf"
    shutil.copytree(corpus("hf"), copy)
    for file in copy.glob("token*"):
        file.unlink()
    done = iobench_inside("verify", copy)
    assert (done.returncode, done.stderr) == (0, "")
    assert "warning  .: has no tokenizer" in done.stdout
    (copy / "config.json").unlink()
    report = iobench.verify(copy)
    assert report.ok
    assert [(one.severity, one.path) for one in report.findings] == [("warning", ".")]
    assert "has no config.json" in report.findings[0].what


def test_the_corpus_is_large_enough() -> None:
    assert min(len(BAD), len(GOOD)) >= 40
    assert {good for good, *_ in BAD} <= GOOD.keys()


# The command.


def test_the_command(corpus, iobench_inside, tmp_path) -> None:
    """Exit code 0 or 4, a line for each finding, JSON, and 2 for what is no checkpoint."""
    copy = tmp_path / "run"
    shutil.copytree(corpus("run"), copy)
    whole = iobench_inside("verify", copy)
    assert (whole.returncode, whole.stderr) == (0, "")
    assert "result   whole" in whole.stdout
    cut(copy / "step-10/tensors.safetensors", 10)
    damaged = iobench_inside("verify", copy, corpus("torch"))
    assert damaged.returncode == 4
    assert "step-10/tensors.safetensors: model.head.weight: the file ends" in damaged.stdout
    assert damaged.stderr == f"iobench verify: {copy}: 1 error\n"
    both = json.loads(iobench_inside("verify", copy, corpus("torch"), "--format", "json").stdout)
    assert both["schema"] == "iobench.verify/1"
    assert [one["ok"] for one in both["reports"]] == [False, True]
    (finding,) = both["reports"][0]["findings"]
    assert finding["tensor"] == "model.head.weight"
    (tmp_path / "text").write_text("text")
    (tmp_path / "data.bin").write_bytes(bytes(100))
    for wrong in (tmp_path / "text", tmp_path / "data.bin", tmp_path / "missing"):
        done = iobench_inside("verify", wrong)
        assert (done.returncode, done.stdout) == (2, "")


def test_a_record_is_compared(corpus, tmp_path) -> None:
    """Of a directory and of a single file: a flipped bit that nothing else shows, and the config of
    the model."""
    copy = tmp_path / "hf"
    shutil.copytree(corpus("hf"), copy)
    file = copy / "model.safetensors"
    at = _tensor_at(file, "model.norm.weight")
    for target, recorded in ((copy, copy / "iobench-verify.json"), (file, None)):
        report = iobench.verify(target, record=True)
        assert report.ok
        assert recorded is None or recorded.exists()
        flip(file, at)
        (wrong,) = iobench.verify(target).errors
        assert (wrong.path, wrong.tensor) == (file.name, "model.norm.weight")
        assert not iobench.verify(target, record=False).ok
        flip(file, at)
        assert iobench.verify(target).ok
    flip(copy / "config.json", b"vocab_size")
    (wrong,) = iobench.verify(copy).errors
    assert (wrong.path, "XXH3" in wrong.what) == ("config.json", True)
    flip(copy / "iobench-verify.json", 30)
    assert "iobench-verify.json" in [one.path for one in iobench.verify(copy).errors]


def test_damage_is_not_recorded(corpus, tmp_path) -> None:
    """A record of damaged files would prove them."""
    copy = tmp_path / "torch"
    shutil.copytree(corpus("torch"), copy)
    flip(copy / "model.pt", _first("layers.1.weight"))
    assert not iobench.verify(copy, record=True).ok
    assert [one.name for one in copy.iterdir()] == ["model.pt"]


@pytest.mark.parametrize(
    ("one", "other"),
    [("torch", "safetensors"), ("dcp", "torch"), ("run", "dcp-files"), ("dcp", "megatron")],
)
def test_against(one: str, other: str, corpus, tmp_path) -> None:
    """Formats and prefixes do not matter; a value, a shape and a missing tensor do."""
    from iobench.verification.verify import verify_against

    first = corpus(one) / "step-10" if one == "run" else corpus(one)
    second = corpus(other)
    if one == "run":
        first = tmp_path / "own"
        with iobench.Checkpointer(first) as checkpointer:
            checkpointer.save({"model": _corpus_state()}, 1)
    report = verify_against(first, second, values=True)
    assert (report.findings, report.tensors) == ((), 4)
    assert report.values == {"nan": 0, "inf": 0, "zero_tensors": 1}
    changed = _corpus_state()
    changed["layers.0.weight"][3, 4] += 1
    changed["layers.0.bias"] = torch.zeros(63)
    del changed["head.weight"]
    changed["new"] = torch.ones(2)
    torch.save({"model": changed}, tmp_path / "changed.pt")
    found = {
        f.tensor.split(".", 1)[-1]: f.what
        for f in verify_against(tmp_path / "changed.pt", corpus("torch")).errors
    }
    assert found["layers.0.weight"].startswith("1 of 6144 values differ")
    assert "[63], but float32 [64]" in found["layers.0.bias"]
    assert {"head.weight", "new"} <= found.keys()
    with pytest.raises(UsageError, match=r"same name: the first are [\w.]+ and [\w.]+$"):
        verify_against(corpus("torch"), corpus("adapter"))


def test_values_are_counted(tmp_path) -> None:
    """NaN, infinities and tensors of zeros, of every floating type."""
    for number, dtype in enumerate(
        (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2)
    ):
        values = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), 0.0]).to(dtype)
        save_file(
            {"x": values, "z": torch.zeros(3, dtype=dtype)}, tmp_path / f"{number}.safetensors"
        )
    save_file(
        {"x": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)}, tmp_path / "8.safetensors"
    )
    report = iobench.verify(tmp_path, values=True)
    assert report.ok
    assert report.values == {"nan": 6, "inf": 10, "zero_tensors": 5}
    assert len(report.findings) == 6


def test_in_a_bucket(server, corpus, tmp_path) -> None:
    """Whole and damaged, of several formats."""
    with server.active():
        for name in ("run", "dcp", "hf-shards", "torch"):
            put_tree(corpus(name), f"{server.target}/{name}")
            report = iobench.verify(f"{server.target}/{name}")
            assert (report.findings, report.ok) == ((), True)
        bad = bytearray((corpus("dcp") / "__0_0.distcp").read_bytes())
        bad[bad.index(_first("layers.1.weight"))] ^= 1
        image = iobench.FileImage.of("__0_0.distcp", [bytes(bad)])
        iobench.load_writer("s3").write(image, f"{server.target}/dcp")
        (wrong,) = iobench.verify(f"{server.target}/dcp").errors
        assert (wrong.path, wrong.tensor) == ("__0_0.distcp", "model.layers.1.weight")
        assert iobench.verify(f"{server.target}/torch/model.pt").ok


def test_the_page(corpus, tmp_path, iobench_inside, server) -> None:
    """Every command and block of docs/verify.md works, on checkpoints of these names."""
    names = {
        "runs/a": "run",
        "Llama-3.1-8B": "hf",
        "checkpoints/dcp": "dcp",
        "lightning": "lightning",
    }
    for target, name in {**names, "deepspeed": "deepspeed-1"}.items():
        shutil.copytree(corpus(name), tmp_path / target)
    shutil.copy(corpus("torch") / "model.pt", tmp_path / "model.pt")
    shutil.copy(corpus("safetensors") / "model.safetensors", tmp_path / "model.safetensors")
    page = (Path(__file__).parents[2] / "docs/verify.md").read_text()
    lines = re.findall(r"^    iobench (.*)", page, re.MULTILINE)
    assert len(lines) >= 6
    with server.active():
        put_tree(tmp_path / "runs/a", f"{server.target}/runs/a")
        for line in lines:
            words = line.split("#")[0].replace("s3://bucket", server.target).split()
            done = iobench_inside(*words, cwd=tmp_path)
            assert done.returncode == 0, (words, done.stdout, done.stderr)
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        with contextlib.chdir(tmp_path):
            exec(block, {})


@pytest.mark.parametrize("page", [3, 4, 7, 8])
def test_a_hole_at_the_edge_of_a_window(page, tmp_path, monkeypatch) -> None:
    """It is found where it begins or ends a window, and what is next to it is in another one."""
    monkeypatch.setattr("iobench.verification.reading._WINDOW", 4 * 4096)
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(64, 1000)}, file)
    assert iobench.verify(tmp_path).ok
    zeros(file, page)
    assert [(one.path, one.tensor) for one in iobench.verify(tmp_path).errors] == [(file.name, "w")]


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_path_in_metadata(module: str) -> None:
    """DCP writes the path of its save; Python 3.13 has another module for it than 3.12 and 3.14."""
    from iobench.verification.dcp import _Unpickler

    pickled = f"c{module}\nPosixPath\n(S'runs'\nS'a'\ntR.".encode()
    assert _Unpickler(io.BytesIO(pickled)).load() == "runs/a"


class _EarlyPickler(pickle.Pickler):
    """Pickles enums like Python 3.11.0 to 3.11.3, which Debian 12 has."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_an_enum_in_metadata(corpus: Callable[[str], Path]) -> None:
    """Some versions of Python pickle it by getattr, which may get nothing else."""
    from iobench.verification.dcp import read_metadata

    file = corpus("dcp") / ".metadata"
    found = read_metadata(file.read_bytes())
    room = io.BytesIO()
    _EarlyPickler(room).dump(found)
    assert b"getattr" in room.getvalue()
    assert read_metadata(room.getvalue()) == found
    for kind, name in (
        ("torch\nSize", "count"),
        (f"{type(found).__module__}\nMetadata", "__init__"),
        (f"{type(found).__module__}\n_MEM_FORMAT_ENCODING", "__class__"),
    ):
        with pytest.raises(DataMismatchError, match="no part of metadata"):
            read_metadata(f"cbuiltins\ngetattr\n(c{kind}\nS'{name}'\ntR.".encode())


@pytest.mark.parametrize(
    "field",
    ["state_dict_metadata", "storage_data", "properties", "chunks", "size", "sizes", "offsets"],
)
def test_a_flipped_bit_in_a_field_of_metadata(
    field: str, corpus: Callable[[str], Path], tmp_path: Path
) -> None:
    """The pickle is as valid as before, and the field is missing in what it makes."""
    directory = Path(shutil.copytree(corpus("dcp"), tmp_path / "dcp"))
    file, name = directory / ".metadata", field.encode()
    old, new = bytes([0x8C, len(name)]) + name, bytes([0x8C, len(name)]) + b"S" + name[1:]
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new))
    assert [one.path for one in iobench.verify(directory).errors] == [".metadata"]


def test_metadata_of_torch_before_2_3(corpus: Callable[[str], Path], tmp_path: Path) -> None:
    """The same class was in another module, as stock still reads it."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    directory = Path(shutil.copytree(corpus("dcp"), tmp_path / "dcp"))
    found = pickle.loads((directory / ".metadata").read_bytes())
    for one in found.state_dict_metadata.values():
        if isinstance(one, TensorStorageMetadata):
            one.properties = TensorProperties(dtype=one.properties.dtype)
    (directory / ".metadata").write_bytes(pickle.dumps(found))
    report = iobench.verify(directory)
    assert report.ok, report.findings
    assert report.tensors
