"""The same tensors in other formats and other files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from iobench import workloads
from iobench.bench.data.replay import Replay
from iobench.units import MIB
from iobench.workloads import FileSpec
from iobench.workloads.reshape import Granularity, Shape
from iobench.writers.registry import make


@pytest.fixture(scope="module")
def files() -> tuple[FileSpec, ...]:
    """Raw, safetensors and torch files of a llama, scaled down."""
    return workloads.load("llama7b").scaled(8 * MIB).files()


def payload(files: tuple[FileSpec, ...]) -> Counter[tuple[str, tuple[int, ...]]]:
    return Counter((tensor.dtype, tensor.shape) for spec in files for tensor in spec.tensors)


@pytest.mark.parametrize("granularity", ["blob", "shard=1MB", "shard", "layer", "tensor", None])
@pytest.mark.parametrize("serializer", ["safetensors", "torch", "dcp", "raw", None])
def test_every_tensor_once(
    tmp_path: Path, files: tuple[FileSpec, ...], serializer: str | None, granularity: str | None
) -> None:
    """For any shape the tensors are the same, names are unique within a file, and bytes are
    restored."""
    made = Shape.parse(serializer, granularity).apply(files)
    assert payload(made) == payload(files)
    assert len({spec.path for spec in made}) == len(made)
    for spec in made:
        assert len({tensor.name for tensor in spec.tensors}) == len(spec.tensors)
        assert serializer in (None, spec.format)
    replay = Replay(made, pool_bytes=16 * MIB, seed=1)
    writer = make("buffered")
    replay.prepare()
    replay.save(writer, tmp_path)
    for spec, size in zip(made, replay.file_bytes, strict=True):
        assert size == (tmp_path / spec.path).stat().st_size
        assert size == spec.size_bytes or not spec.exact
    replay.scrub()
    replay.restore(writer, tmp_path)
    assert replay.verify(writer, tmp_path).mismatches == 0


def test_how_many_files(files: tuple[FileSpec, ...]) -> None:
    """One for a blob, one per tensor, and for shards as many as their size asks for."""
    tensors = sum(payload(files).values())
    counts = {
        text: len(Shape.parse(None, text).apply(files))
        for text in ("blob", "tensor", "shard=100GB", "shard=1MiB")
    }
    assert (counts["blob"], counts["tensor"], counts["shard=100GB"]) == (1, tensors, 1)
    for spec in Shape.parse("raw", "shard=1MiB").apply(files):
        assert spec.payload_bytes <= MIB or len(spec.tensors) == 1


def test_layers_are_kept_together() -> None:
    """Weights and optimizer state of a layer share a file, what is of no layer is in another."""
    files = workloads.load("llama7b-export").scaled(2**30).files()
    made = Shape.parse(None, "layer").apply(files)
    for spec in made:
        stem = spec.path.split(".")[0]
        for tensor in spec.tensors:
            number = stem.removeprefix("layer-")
            assert (f".layers.{number}." in tensor.name) is (stem != "rest")
    assert len(made) > 1


def test_a_granularity_as_text(files: tuple[FileSpec, ...]) -> None:
    """The shown text can be parsed again. Nothing asked, nothing changed."""
    for text in ("blob", "shard=5GB", "shard=16MiB", "layer", "tensor"):
        assert Granularity.parse(str(Granularity.parse(text))) == Granularity.parse(text)
    assert tuple(Shape().apply(files)) == files
