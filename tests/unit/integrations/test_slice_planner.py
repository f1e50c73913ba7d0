"""SlicePlanner: what each rank writes of a state that all ranks hold."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from iobench.errors import UsageError
from iobench.integrations.slice_planner import SlicePlanner
from iobench.linux import PAGE
from iobench.ranks.restore_plan import MAX_IMBALANCE

_DTYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64])
_SHAPES = st.lists(st.integers(0, 40), max_size=4).map(tuple)


def _planned(
    states: list[dict[str, Any]], **options: Any
) -> tuple[list[SlicePlanner], list[SavePlan], Metadata]:
    """Plan a save like DCP does, each state in its rank; plans travel as pickles."""
    planners = [SlicePlanner(**options) for _ in states]
    plans = []
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, is_coordinator=rank == 0)
        plans.append(pickle.loads(pickle.dumps(planner.create_local_plan())))
    merged, metadata = planners[0].create_global_plan(plans)
    merged = pickle.loads(pickle.dumps(merged))
    finished = [planner.finish_plan(plan) for planner, plan in zip(planners, merged, strict=True)]
    return planners, finished, metadata


def _assembled(planners: list[SlicePlanner], plans: list[SavePlan]) -> dict[str, torch.Tensor]:
    """Return the tensors that the parts of all ranks add up to; each element is written once."""
    whole: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    for planner, plan in zip(planners, plans, strict=True):
        for item in plan.items:
            if item.tensor_data is None:
                continue
            data = planner.resolve_data(item)
            assert isinstance(data, torch.Tensor)
            assert data.shape == item.tensor_data.chunk.sizes
            name, size = item.index.fqn, item.tensor_data.size
            whole.setdefault(name, torch.zeros(size, dtype=data.dtype))
            count = written.setdefault(name, torch.zeros(size, dtype=torch.int32))
            chunk = item.tensor_data.chunk
            where = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[name][where] = data
            count[where] += 1
    assert all((count == 1).all() for count in written.values())
    return whole


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 100, shape).to(dtype)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(_SHAPES, _DTYPES), min_size=1, max_size=5),
    st.integers(1, 5),
    st.sampled_from([16, 512, PAGE]),
    st.none() | st.integers(1, 2),
)
def test_the_parts_of_all_ranks_are_the_state(
    tensors: list[tuple[tuple[int, ...], torch.dtype]],
    ranks: int,
    block_size: int,
    writers_per_node: int | None,
) -> None:
    """Scalars, empty tensors, few rows, many dimensions: each element is written once."""
    state = {f"t{number}": _tensor(*given) for number, given in enumerate(tensors)}
    planners, plans, _ = _planned(
        [state] * ranks,
        nodes=[rank // 2 for rank in range(ranks)],
        block_size=block_size,
        writers_per_node=writers_per_node,
    )
    found = _assembled(planners, plans)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_write_equal_shares_of_a_realistic_state(ranks: int) -> None:
    """A transformer's weights and moments on `meta`: shares differ by 1 % at most."""
    hidden, rows = 768, 50257
    shapes = {"wte": (rows, hidden), "wpe": (1024, hidden), "few": (3, 9_000_000)}
    for layer in range(6):
        shapes |= {f"{layer}.qkv": (3 * hidden, hidden), f"{layer}.mlp": (4 * hidden, hidden)}
        shapes |= {f"{layer}.norm": (hidden,), f"{layer}.step": ()}
    state = {
        f"{kind}.{name}": torch.empty(shape, device="meta")
        for kind in ("model", "exp_avg", "exp_avg_sq")
        for name, shape in shapes.items()
    }
    _, plans, metadata = _planned(
        [state] * ranks, nodes=[rank * 2 // ranks if ranks != 3 else rank for rank in range(ranks)]
    )
    shares = [
        sum(
            item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
            for item in plan.items
            if item.tensor_data
        )
        for plan in plans
    ]
    assert sum(shares) == sum(tensor.nbytes for tensor in state.values())
    assert max(shares) <= sum(shares) / ranks * (1 + MAX_IMBALANCE)
    chunks = [
        chunk
        for one in metadata.state_dict_metadata.values()
        if isinstance(one, TensorStorageMetadata)
        for chunk in one.chunks
    ]
    assert len(chunks) <= len(state) + 3 * ranks  # a cut in a row makes up to 3 boxes


def test_parts_are_views_with_their_own_storage() -> None:
    """torch.save copies a view of a larger storage: the parts do not need that."""
    state = {"t": torch.arange(6 * PAGE, dtype=torch.float32).reshape(-1, 64)}
    planners, plans, _ = _planned([state] * 2, block_size=PAGE)
    for planner, plan in zip(planners, plans, strict=True):
        (item,) = plan.items
        data = planner.resolve_data(item)
        assert isinstance(data, torch.Tensor)
        assert data.untyped_storage().nbytes() == data.nbytes == state["t"].nbytes // 2
        first = state["t"].data_ptr()
        assert first <= data.data_ptr() < first + state["t"].nbytes


def test_objects_are_written_once_and_small_tensors_are_whole() -> None:
    """What stock DCP gives to one rank goes to one rank."""
    state = {"step": 3, "names": ["a", "b"], "rng": torch.arange(5056, dtype=torch.uint8)}
    _, plans, _ = _planned([state] * 4)
    names = Counter(item.index.fqn for plan in plans for item in plan.items)
    assert names["step"] == names["rng"] == 1
    assert max(names.values()) == 1


def test_state_of_some_ranks_is_cut_over_these_ranks() -> None:
    """Ranks 1 and 2 hold a tensor: they share it; the rank with its own tensor writes that."""
    shared = torch.randn(64, 1024)
    states = [{"own": torch.randn(10, 100)}, {"t": shared}, {"t": shared}]
    planners, plans, _ = _planned(states, block_size=PAGE)
    shares = [
        sum(item.tensor_data.chunk.sizes.numel() for item in plan.items if item.tensor_data)
        for plan in plans
    ]
    assert shares == [1000, shared.numel() // 2, shared.numel() // 2]
    assert torch.equal(_assembled(planners, plans)["t"], shared)


def test_tensors_that_differ_in_shape_are_left_to_stock_dcp() -> None:
    """One name, several shapes: stock DCP keeps one version whole, and so do we."""
    states = [{"t": torch.ones(4096)}, {"t": torch.ones(4096)}, {"t": torch.ones(5000)}]
    planners, plans, _ = _planned(states, block_size=PAGE)
    assert sum(len(plan.items) for plan in plans) == 1
    assert (_assembled(planners, plans)["t"] == 1).all()


def test_nodes_of_other_ranks_than_those_that_save() -> None:
    """A list of nodes that does not fit the ranks is an error, and not a guess."""
    with pytest.raises(UsageError, match="2 ranks save"):
        _planned([{"t": torch.ones(4)}] * 2, nodes=[0, 0, 1])
