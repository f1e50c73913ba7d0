"""Restores of some tensors: the bytes that they read, and that these are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from iobench.bench.axes import Axes
from iobench.bench.contenders.base import Contender, WriterContender
from iobench.bench.contenders.choose import choose
from iobench.bench.data.replay import Replay
from iobench.bench.planning import make_plan
from iobench.errors import OptionError
from iobench.units import KIB, MIB
from iobench.workloads import Workload
from iobench.workloads.reshape import Shape
from iobench.writers.registry import make


def contender(name: str) -> Contender:
    if name == "fresh":
        return WriterContender(make("buffered"), fresh=True)
    return choose(name, ".")[0][0]


@pytest.mark.parametrize("pool_bytes", [MIB, 8 * KIB])
@pytest.mark.parametrize("name", ["buffered", "fresh", "peer:torch-save", "peer:torch-save-mmap"])
@pytest.mark.parametrize("serializer", [None, "safetensors", "torch", "raw"])
def test_some_tensors(
    tmp_path: Path, tiny: Workload, serializer: str | None, name: str, pool_bytes: int
) -> None:
    """About the requested part is restored correctly, and no other byte is counted."""
    files = Shape.parse(serializer, None).apply(tiny.files())
    replay = Replay(files, pool_bytes=pool_bytes, seed=3, subset=0.3)
    one = contender(name)
    replay.prepare()
    one.save(replay, tmp_path)
    replay.scrub()
    moved = one.restore(replay, tmp_path).bytes
    payload = sum(spec.payload_bytes for spec in files)
    largest = max(tensor.size_bytes for spec in files for tensor in spec.tensors)
    assert moved == sum(replay.restored_bytes)
    assert 0.3 * payload <= moved < 0.3 * payload + largest
    verified = one.verify(replay, tmp_path)
    assert verified.mismatches == 0
    assert verified.bytes == moved
    assert verified.tensors == sum(len(state) for state in replay.wanted) > 1
    assert "%" not in " ".join(replay.notes)  # the report has the part


@pytest.mark.parametrize("name", ["buffered", "fresh"])
def test_a_wrong_byte_in_one_of_them(tmp_path: Path, tiny: Workload, name: str) -> None:
    """A wrong byte is found in a restored tensor, and does not matter elsewhere."""
    files = Shape.parse("raw", "tensor").apply(tiny.files())
    replay = Replay(files, pool_bytes=MIB, seed=3, subset=0.3)
    one = contender(name)
    replay.prepare()
    one.save(replay, tmp_path)
    for spec, wanted in zip(files, replay.wanted, strict=True):
        if not spec.payload_bytes:
            continue
        path = tmp_path / spec.path
        right = path.read_bytes()
        path.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
        replay.scrub()
        one.restore(replay, tmp_path)
        assert one.verify(replay, tmp_path).mismatches == bool(wanted)
        path.write_bytes(right)


@pytest.mark.parametrize("text", ["all", "subset", "subset=0", "subset=1", "subset=x", "same=1"])
def test_what_cannot_be_meant(tmp_path: Path, text: str) -> None:
    """Only a part between none and all is allowed."""
    with pytest.raises(OptionError, match="must be same, or subset"):
        make_plan(
            workload="llama7b",
            writers="null",
            target=tmp_path,
            size="64MiB",
            axes=Axes.parse(restore_as=text),
        )
