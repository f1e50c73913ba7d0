"""Scaling down: what is kept, how it is described, and what is impossible."""

from __future__ import annotations

import functools
from collections import Counter
from itertools import product

import pytest

from iobench import workloads
from iobench.errors import UsageError
from iobench.units import GIB, MIB
from iobench.workloads import Workload


def test_limits() -> None:
    """A workload within the limit, to the byte, is not scaled. A limit below the small files alone
    is a usage error that names a size that then works."""
    workload = workloads.load("llama7b")
    assert workload.scaled(workload.size_bytes()) is workload
    assert workload.scale is None
    assert workload.scaled(workload.size_bytes() - 1).scale is not None
    with pytest.raises(UsageError, match="smallest is") as caught:
        workload.scaled(MIB)
    smallest = int(str(caught.value).split("smallest is ")[1].split()[0])
    assert workload.scaled(smallest).size_bytes() <= smallest
    with pytest.raises(UsageError):
        workload.scaled(smallest - 1)


@functools.cache
def _scaled(name: str, limit: int) -> Workload:
    return workloads.load(name).scaled(limit)


@pytest.mark.slow
@pytest.mark.parametrize("name", workloads.names())
def test_every_workload_scales_below_the_limit(name: str) -> None:
    """Rank 0 of every workload that ships comes within the limit, and near it."""
    workload = workloads.load(name)
    full = workload.size_bytes()
    for size_gib in (1, 3):
        limit = min(size_gib * GIB, full - 1)
        scaled = _scaled(name, limit)
        size = scaled.size_bytes()
        assert scaled.scale is not None
        assert scaled.scale.size_bytes == size <= limit
        assert scaled.scale.full_bytes == full
        assert size > 0.4 * limit


@pytest.mark.slow
def test_no_combination_of_blocks_is_much_larger() -> None:
    """Of all combinations of blocks none that fits is more than 5% larger than the one chosen."""
    workload = workloads.load("llama7b")
    sizes = [
        12 * model.num_parameters + 2_400_000  # about the bytes of rank 0, with its small files
        for layers, embedding, head in product(range(1, 33), (True, False), (True, False))
        for model in [workload.model.kept(layers=layers, embedding=embedding, head=head)]
    ]
    for max_bytes in range(3 * GIB, 75 * GIB, 3 * GIB - 1):
        chosen = workload.scaled(max_bytes).size_bytes()
        assert all(size > max_bytes or chosen >= 0.949 * size for size in sizes)


@pytest.mark.parametrize(
    ("name", "size_gib", "text"),
    [
        # Half the layers with embedding and head are preferred to one more layer without.
        ("llama7b", 40, "16 of 32 layers"),
        ("llama7b-zero3", 4, "13 of 32 layers, no embedding"),
        ("synthetic-1t", 20, "64 of 128 layers"),  # every pipeline stage loses as many
        ("synthetic-1t", 8, "128 of 128 layers, 1/2 of the width"),  # no layer of full width fits
        ("llama7b", 3, "1 of 32 layers, no embedding, no head"),
    ],
)
def test_what_is_kept_is_named(name: str, size_gib: int, text: str) -> None:
    """The text names the missing blocks, and their tensors are not in the workload; every rank
    still exists."""
    full = workloads.load(name)
    scaled = full.scaled(size_gib * GIB)
    assert scaled.scale is not None
    assert str(scaled.scale) == scaled.scale.text == text
    assert (scaled.scale.width_divisor > 1) is ("width" in text)
    names = {parameter.name for parameter in scaled.model.parameters()}
    assert any("embed" in one for one in names) is ("no embedding" not in text)
    assert scaled.world_size == full.world_size
    assert scaled.files(scaled.world_size - 41 if "1t" in name else 0)[0].tensors


def test_scaling_drops_experts_before_it_narrows_tensors() -> None:
    """Of Qwen3-30B-A3B in 3 GiB, most tensors are those of experts, each of the real size."""
    scaled = _scaled("qwen3-30b-a3b", 3 * GIB)
    assert scaled.scale is not None
    assert scaled.scale.width_divisor == 1
    assert 8 <= scaled.scale.experts < scaled.scale.full_experts == 128
    assert f"{scaled.scale.experts} of 128 experts" in scaled.scale.text
    shapes = Counter(p.shape for p in scaled.model.parameters() if p.expert is not None)
    assert set(shapes) == {(768, 2048), (2048, 768)}
    assert sum(shapes.values()) > 0.9 * len(list(scaled.model.parameters()))


def test_small_files_stay_as_they_are() -> None:
    """The small files are those of the full workload, except for the index of the shards."""
    full, scaled = workloads.load("llama7b"), workloads.load("llama7b").scaled(8 * GIB)
    index = "model.safetensors.index.json"
    tails = [
        {f for f in workload.files() if f.format == "raw" and f.path != index}
        for workload in (full, scaled)
    ]
    assert tails[0] == tails[1]
