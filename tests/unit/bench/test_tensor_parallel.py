"""Restores of what one rank of tensor parallelism loads: the bytes, and that these are right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from iobench.bench.axes import Axes
from iobench.bench.choose import choose
from iobench.bench.contenders.base import Contender, WriterContender
from iobench.bench.data.replay import Replay
from iobench.bench.planning import make_plan
from iobench.errors import OptionError
from iobench.formats.safetensors import SafetensorsFile
from iobench.units import MIB
from iobench.workloads import Workload
from iobench.workloads.specs import FileSpec
from iobench.writers.registry import make


def contender(name: str) -> Contender:
    if name == "fresh":
        return WriterContender(make("buffered"), fresh=True)
    return choose(name, ".")[0][0]


def _sizes(files: Sequence[FileSpec], ranks: int) -> int:
    """Bytes of a rank's slices, of lengths that the ranks divide."""
    return sum(
        one.size_bytes // (1 if one.split is None else ranks)
        for spec in files
        if spec.format == "safetensors"
        for one in spec.tensors
    )


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("name", ["buffered", "fresh", "peer:safetensors", "peer:torch-save"])
def test_what_a_tensor_parallel_rank_loads(
    tmp_path: Path, tiny: Workload, name: str, rank: int
) -> None:
    """Its slices of the safetensors file, which are compared; no other tensor or file."""
    files = tiny.files()
    replay = Replay(files, pool_bytes=MIB, seed=3, rank=rank)
    replay.want(4)
    one = contender(name)
    replay.prepare()
    one.save(replay, tmp_path)
    replay.scrub()
    moved = one.restore(replay, tmp_path).bytes
    assert moved == sum(replay.restored_bytes) == _sizes(files, 4)
    verified = one.verify(replay, tmp_path)
    assert (verified.mismatches, verified.bytes) == (0, moved)
    assert verified.tensors == sum(map(len, replay.wanted)) > 10
    # Small tensors have small gaps, which our writers read too. Peers do not say what they read.
    told = "of columns the gaps between rows were read too" in " ".join(one.notes(replay))
    assert told is not one.is_peer
    replay.want(None)
    assert "gaps" not in " ".join(one.notes(replay))


def test_a_wrong_byte_of_a_tensor_parallel_rank(tmp_path: Path, tiny: Workload) -> None:
    """It is found by the rank that loads it, and by no other one."""
    names = {"model.layers.0.self_attn.q_proj.weight": 0, "model.layers.1.mlp.down_proj.weight": 1}
    (spec,) = (one for one in tiny.files() if one.format == "safetensors")
    one = contender("buffered")
    for rank in range(4):
        replay = Replay([spec], pool_bytes=MIB, seed=3, rank=rank)
        replay.want(4)
        replay.prepare()
        digests = replay.digests()
        one.save(replay, tmp_path)
        for name, dim in names.items():
            stored = SafetensorsFile(spec.path, tmp_path, make("buffered")).tensors[name]
            size, itemsize = stored.kind.shape[dim], stored.kind.dtype.itemsize
            step = stored.slice().stride()[dim] * itemsize
            path = tmp_path / spec.path
            right = path.read_bytes()
            at = stored.start + (size // 4 + 1) * step  # of rank 1
            path.write_bytes(right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :])
            replay.scrub()
            replay.expect(digests)  # as of another process
            one.restore(replay, tmp_path)
            assert one.verify(replay, tmp_path).mismatches == (rank == 1)
            path.write_bytes(right)


def test_a_layout_that_tensor_parallelism_cannot_load(tmp_path: Path) -> None:
    """Files of torch.save: the message says what to choose."""
    with pytest.raises(OptionError, match="no safetensors file of llama7b-zero3 has"):
        make_plan(
            workload="llama7b-zero3",
            writers="null",
            target=tmp_path,
            size="64MiB",
            axes=Axes.parse(restore_as="same,tp=8"),
        )


@pytest.mark.parametrize("text", ["all", "same=1", "tp", "tp=1", "tp=2.5", "tp=9999"])
def test_what_cannot_be_meant(text: str) -> None:
    with pytest.raises(OptionError, match="must be same, or tp=RANKS"):
        Axes.parse(restore_as=text)
