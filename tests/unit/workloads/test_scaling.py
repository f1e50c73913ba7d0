"""Scaling down: what is kept, how it is described, and what is impossible."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iobench import workloads
from iobench.errors import UsageError
from iobench.units import GIB, MIB
from iobench.workloads import Workload


def test_what_fits_is_returned_as_it_is() -> None:
    """A workload within the limit, to the byte, is not scaled."""
    workload = workloads.load("llama7b")
    assert workload.scaled(workload.size_bytes()) is workload
    assert workload.scale is None
    assert workload.scaled(workload.size_bytes() - 1).scale is not None


@pytest.mark.parametrize("name", workloads.names())
def test_every_workload_scales_below_the_limit(name: str) -> None:
    """Rank 0 of every workload that ships comes within the limit, and near it."""
    workload = workloads.load(name)
    full = workload.size_bytes()
    for size_gib in (1, 3):
        limit = min(size_gib * GIB, full - 1)
        scaled = workload.scaled(limit)
        size = scaled.size_bytes()
        assert scaled.scale is not None
        assert scaled.scale.size_bytes == size <= limit
        assert scaled.scale.full_bytes == full
        assert size > 0.4 * limit


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(max_bytes=st.integers(3 * GIB, 75 * GIB))
def test_no_combination_of_blocks_is_much_larger(max_bytes: int) -> None:
    """Of all combinations of blocks none that fits is more than 5% larger than the one chosen."""
    workload = workloads.load("llama7b")
    chosen = workload.scaled(max_bytes).size_bytes()
    for layers, embedding, head in product(range(1, 33), (True, False), (True, False)):
        size = _estimate(workload, layers, embedding, head)
        assert size > max_bytes or chosen >= 0.949 * size


def test_near_ties_keep_more_kinds_of_blocks() -> None:
    """At 40 GiB half the layers with embedding and head are preferred to one more layer without."""
    scale = workloads.load("llama7b").scaled(40 * GIB).scale
    assert scale is not None
    assert (scale.layers, scale.embedding, scale.head) == (16, True, True)
    assert str(scale) == scale.text == "16 of 32 layers"


def test_dropped_blocks_are_named() -> None:
    """The text names the missing blocks, and their tensors are not in the workload."""
    scaled = workloads.load("llama7b-zero3").scaled(4 * GIB)
    assert scaled.scale is not None
    assert scaled.scale.text == "13 of 32 layers, no embedding"
    names = {parameter.name for parameter in scaled.model.parameters()}
    assert "model.embed_tokens.weight" not in names
    assert "lm_head.weight" in names


def test_pipeline_stages_keep_equally_many_layers() -> None:
    """Under pipelining every stage loses the same number of layers, and every rank still exists."""
    scaled = workloads.load("synthetic-1t").scaled(20 * GIB)
    assert scaled.scale is not None
    assert scaled.scale.text == "64 of 128 layers"
    assert scaled.world_size == 3072
    assert scaled.files(3071 - 40)[0].tensors


def test_width_is_divided_only_when_no_layer_fits() -> None:
    """Below one layer of full width the width is divided, and the text says so."""
    scale = workloads.load("synthetic-1t").scaled(8 * GIB).scale
    assert scale is not None
    assert scale.text == "128 of 128 layers, 1/2 of the width"
    one_layer = workloads.load("llama7b").scaled(3 * GIB).scale
    assert one_layer is not None
    assert one_layer.width_divisor == 1


def test_small_files_stay_as_they_are() -> None:
    """The small files are those of the full workload, except for the index of the shards."""
    full, scaled = workloads.load("llama7b"), workloads.load("llama7b").scaled(8 * GIB)
    index = "model.safetensors.index.json"
    tails = [
        {f for f in workload.files() if f.format == "raw" and f.path != index}
        for workload in (full, scaled)
    ]
    assert tails[0] == tails[1]


def test_the_error_names_the_smallest_size() -> None:
    """A limit below the small files alone is a usage error that names a size that then works."""
    workload = workloads.load("llama7b")
    with pytest.raises(UsageError, match="smallest is") as caught:
        workload.scaled(MIB)
    smallest = int(str(caught.value).split("smallest is ")[1].split()[0])
    assert workload.scaled(smallest).size_bytes() <= smallest
    with pytest.raises(UsageError):
        workload.scaled(smallest - 1)


def _estimate(workload: Workload, layers: int, embedding: bool, head: bool) -> int:
    """Return about the bytes of rank 0 with these blocks: 12 per parameter and 2.4 MB of small
    files."""
    model = workload.model.kept(layers=layers, embedding=embedding, head=head)
    return 12 * model.num_parameters + 2_400_000
