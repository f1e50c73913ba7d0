"""load_sharded: each rank gets its parts of a model, read by itself or once by all together."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import iobench.safetensors
from iobench.errors import DataMismatchError, OptionError, StateMismatchError, TargetError
from iobench.exports import sharded
from iobench.formats import safetensors
from iobench.formats.tensors import tensor_bytes
from iobench.ranks.restore_plan import RESTORE_MODES
from iobench.writers.hybrid import HybridWriter
from iobench.writers.odirect import ODirectWriter
from iobench.writers.s3 import S3Writer
from tests.support import rank_sharded


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    found = {}
    for name, (shape, dtype) in rank_sharded.SHAPES.items():
        found[name] = torch.empty(shape, dtype=dtype)
        data = tensor_bytes(found[name])
        data[:] = torch.randint(0, 60, (len(data),), dtype=torch.uint8).numpy()  # no NaN
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in two files with an index, and a third file that does not belong to it."""
    directory, tensors = tmp_path_factory.mktemp("model"), _tensors()
    weight_map = {}
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


@pytest.mark.parametrize("mode", RESTORE_MODES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equal_to_the_whole(ranks, model, size: int, mode: str) -> None:
    """Every kind of part of every rank, in every mode; with an exchange each byte is read once."""
    writer = "odirect" if size == 3 else "hybrid"
    found = ranks.first(size).call(rank_sharded.load, str(model), mode, writer)
    for wrong, moved, amplification, paths in found:
        assert wrong == []
        assert moved > 0
        if mode in ("broadcast", "all-gather") and size > 1:
            assert amplification < 1.1  # whole pages at the ends of ranges
            assert "network" in paths or mode == "broadcast"
        else:
            assert "network" not in paths or mode == "auto"


def test_only_what_is_wanted_is_read(model) -> None:
    """Rows exactly; of columns the gaps too."""
    tensors = _tensors()
    like = {"rows": slice(100, 900), "columns": (slice(None), slice(10, 20))}
    found, moved = sharded.load_sharded(model, like, ODirectWriter(), restore_mode="all")
    assert {name: value.shape for name, value in found.items()} == {
        "rows": (800, 520),
        "columns": (520, 10),
    }
    for name, index in like.items():
        assert torch.equal(found[name], tensors[name][index])
    assert moved.bytes == 800 * 520 * 2 + (519 * 1030 + 10) * 4
    assert sum(count.bytes for count in moved.paths.values()) < moved.bytes + 4 * 4096


def test_one_file_and_a_directory_without_an_index(model, tmp_path) -> None:
    """By the drop-in, which takes the name of a writer."""
    tensors = _tensors()
    save_file(tensors, tmp_path / "a.safetensors")
    (tmp_path / "b.txt").touch()
    for place in (tmp_path, tmp_path / "a.safetensors"):
        found, _ = iobench.safetensors.load_sharded(
            place, dict.fromkeys(tensors, ...), writer="odirect"
        )
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor)
    assert iobench.safetensors.load_sharded(tmp_path, {})[0] == {}


def test_odd_places(tmp_path) -> None:
    """Tensors whose bytes are not aligned in the file; large ones stay where they were read."""
    tensors = {"a": torch.arange(400_003, dtype=torch.float32), "b": torch.arange(3.0)}
    save_file(tensors, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length] + b" "
    odd = (length + 1).to_bytes(8, "little") + header + data[8 + length :]
    (tmp_path / "a.safetensors").write_bytes(odd)
    found, _ = sharded.load_sharded(tmp_path, dict.fromkeys(tensors, ...), HybridWriter())
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert not found[name].data_ptr() % 4


@pytest.mark.parametrize(
    ("like", "error", "text"),
    [
        ({"none": ..., "rows": ...}, StateMismatchError, "missing 1 .none"),
        ({"rows": torch.zeros(3)}, StateMismatchError, r"float32 \[3\] expected, bfloat16 \[1024"),
        ({"rows": torch.zeros(1024, 520)}, StateMismatchError, "mis-shaped"),
        ({"rows": 5000}, IndexError, "out of bounds"),
        ({"rows": slice(None, None, -1)}, ValueError, "step must be greater than zero"),
    ],
)
def test_what_the_model_does_not_have(model, like, error, text) -> None:
    with pytest.raises(error, match=text):
        sharded.load_sharded(model, like, HybridWriter())


def test_places_without_a_model(tmp_path, model) -> None:
    """No files, a damaged index, an index of files that are missing, and a truncated file."""
    with pytest.raises(TargetError, match="no safetensors files"):
        sharded.load_sharded(tmp_path, {}, HybridWriter())
    with pytest.raises(OSError, match="No such file"):
        sharded.load_sharded(tmp_path / "none", {}, HybridWriter())
    with pytest.raises(OptionError, match="restore_mode"):
        sharded.load_sharded(model, {}, HybridWriter(), restore_mode="some")  # type: ignore[arg-type]  # wrong
    index = tmp_path / "model.safetensors.index.json"
    outside = ('{"weight_map": {"a": "../a.safetensors"}}', '{"weight_map": {"a": 5}}')
    for text in ("{", "[]", '{"weight_map": 3}', "{}", *outside):
        index.write_text(text)
        with pytest.raises(DataMismatchError, match="not an index"):
            sharded.load_sharded(tmp_path, {}, HybridWriter())
    index.write_text('{"weight_map": {"a": "a.safetensors"}}')
    with pytest.raises(OSError, match="No such file"):
        sharded.load_sharded(tmp_path, {"a": ...}, HybridWriter())
    save_file({"a": torch.ones(5000)}, tmp_path / "a.safetensors")
    os.truncate(tmp_path / "a.safetensors", 9000)
    with pytest.raises(
        DataMismatchError, match=r"has \d+ bytes of data, its header describes 20000"
    ):
        sharded.load_sharded(tmp_path, {"a": ...}, HybridWriter())


def test_a_file_that_changes_meanwhile(tmp_path, monkeypatch) -> None:
    """Replaced or truncated after its header was read: no state is returned."""
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(5000)}, file)
    read = sharded.ShardedLoad.read_alone

    def replacing(self: Any) -> Any:
        (tmp_path / "new").write_bytes(file.read_bytes())
        os.replace(tmp_path / "new", file)
        return read(self)

    monkeypatch.setattr(sharded.ShardedLoad, "read_alone", replacing)
    with pytest.raises(DataMismatchError, match="was changed while it was open"):
        sharded.load_sharded(tmp_path, {"a": ...}, HybridWriter())

    def cutting(self: Any) -> Any:
        os.truncate(file, 9000)
        return read(self)

    monkeypatch.setattr(sharded.ShardedLoad, "read_alone", cutting)
    with pytest.raises(DataMismatchError):
        sharded.load_sharded(tmp_path, {"a": ...}, HybridWriter())


def test_in_a_bucket(server) -> None:
    """A prefix and a single object."""
    writer, tensors = S3Writer(), _tensors()
    with server.active():
        safetensors.save(tensors, "model.safetensors", f"{server.target}/model", writer)
        for place in (f"{server.target}/model", f"{server.target}/model/model.safetensors"):
            like = {"rows": slice(3, 9), "columns": (slice(None), slice(3))}
            found, _ = sharded.load_sharded(place, like, writer, restore_mode="all")
            for name, index in like.items():
                assert torch.equal(found[name], tensors[name][index])
