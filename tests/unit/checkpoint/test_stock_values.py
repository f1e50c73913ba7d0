"""Names of values are those of stock DCP, and the skeletons of several ranks become one."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from iobench import PerRank
from iobench.checkpoint.manifest import FileRecord
from iobench.checkpoint.ranked.dcp_files import merged
from iobench.checkpoint.ranked.messages import Part
from iobench.checkpoint.ranked.structure import (
    name_of,
    own_skeletons,
    stock_paths,
    stock_values,
    value_file,
)
from iobench.checkpoint.rebuild import unflatten
from iobench.checkpoint.state_tree import flatten
from iobench.checkpoint.stored import one_by_one
from iobench.errors import DataMismatchError, StateError

_STATE: dict[str, Any] = {
    "model": OrderedDict(weight=torch.ones(2), bias=torch.zeros(1)),
    "optimizer": {
        "state": {0: {"step": 3, "moment": torch.ones(2)}, 1: {}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}],
    },
    "list": [1, [2, 3], "x"],
    "mixed": [torch.ones(1), 5, [torch.zeros(1), None]],
    "nested": [[{"a": 1}], (1, {"b": 2})],
    "size": torch.Size([2, 3]),
    "nothing": {},
    "none": None,
    "nan": float("inf"),
}


def _part(rank: int, skeleton: Any, own: list[Any]) -> Part:
    file = FileRecord(path=f"{rank}", size_bytes=0, pieces=())
    return Part(rank=rank, file=file, values=(), skeleton=skeleton, own=own)


def test_names_and_values_are_those_of_stock_dcp() -> None:
    """For everything that torch's flatten_state_dict knows."""
    expected, paths = flatten_state_dict(_STATE)
    skeleton = flatten(_STATE).skeleton
    found = {name_of(one.path): one for one in stock_values(skeleton, 0)}
    tensors = {name_of(path): path for path, _ in stock_paths(skeleton, [0])}
    assert found.keys() | tensors.keys() == expected.keys()
    for name, value in found.items():
        assert value.path == paths[name]
        assert torch.load(io.BytesIO(value_file(value))) == expected[name]
        assert not value.own
    assert all(paths[name] == path for name, path in tensors.items())


def test_names_of_tensors() -> None:
    """Tuples of tensors have names like lists. A state_dict of one process lists its tensors at
    once in its skeleton."""
    skeleton = flatten({"a": (torch.ones(1), 2)}).skeleton
    assert stock_paths(skeleton, [0]) == [(("a", 0), "a.0")]
    assert [one.path for one in stock_values(skeleton, 0)] == [("a", 1)]
    listed = {"model": {"$ordered": {"$tensors": ["model.", "a", "b"]}, "attributes": {}}}
    found = stock_paths(one_by_one(listed), [0])
    assert found == [(("model", "a"), "model.a"), (("model", "b"), "model.b")]


def _skeletons(states: list[Any]) -> list[Any]:
    return [flatten(state, rank=rank).skeleton for rank, state in enumerate(states)]


@pytest.mark.parametrize("whole", [True, False])
def test_the_values_of_all_ranks_are_listed(whole: bool) -> None:
    """Whether each part has its skeleton, or its values of each PerRank only."""
    states = [{"rng": PerRank((rank, torch.ones(1))), "n": [PerRank(rank)]} for rank in range(3)]
    skeletons = _skeletons(states)
    parts = [
        _part(
            rank,
            skeleton if whole or rank == 0 else None,
            [own[0] for own in own_skeletons(skeleton)],
        )
        for rank, skeleton in enumerate(skeletons)
    ]
    found = merged(parts)
    tensors = {f"rng.rank{rank}.1": torch.ones(1) for rank in range(3)}
    for rank in range(3):
        state = unflatten(found, tensors, rank=rank, ranks=3)
        assert state["rng"][0] == rank
        assert state["n"] == [rank]
    assert [value[0] for value in unflatten(found, tensors)["rng"].values] == [0, 1, 2]


def test_ranks_with_other_keys() -> None:
    """Pipeline parallelism: each rank has layers of its own, and the skeleton has all of them."""
    states: list[dict[Any, Any]] = [
        {
            "model": {f"layer{rank}": rank, "shared": 7},
            "module": OrderedDict({f"layer{rank}": rank, "shared": 7}),
            5: {rank: 0},
            "optimizer": {0: 1} if rank else {},  # of a stage without parameters
            "mixed": {"a" if rank else 0: 1, "b": 2},
        }
        for rank in range(2)
    ]
    skeletons = _skeletons(states)
    found = unflatten(merged([_part(r, one, []) for r, one in enumerate(skeletons)]), {})
    layers = {"layer0": 0, "shared": 7, "layer1": 1}
    assert found == {
        "model": layers,
        "module": OrderedDict(layers),
        5: {0: 0, 1: 0},
        "optimizer": {0: 1},
        "mixed": {0: 1, "b": 2, "a": 1},
    }


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, r"state\['a'\]\['b'\] differs between rank 0 \(1\)"),
        ({"a": [1, 2]}, {"a": [1]}, r"state\['a'\] differs between"),
        ({"a": (1, 2)}, {"a": [1, 2]}, r"state\['a'\] differs between"),
        ({"a": PerRank(1), "b": 1}, {"b": 1}, r"state\['a'\] is a PerRank that some ranks lack"),
    ],
)
def test_other_differences_are_errors(first: Any, second: Any, message: str) -> None:
    parts = [_part(rank, one, []) for rank, one in enumerate(_skeletons([first, second]))]
    with pytest.raises(StateError, match=message):
        merged(parts)


def test_a_part_is_compared_with_its_vote() -> None:
    part = _part(1, {"a": 1}, [[1]])
    text = part.to_json()
    checksum = xxhash.xxh3_64_hexdigest(text)
    assert Part.parse(text, checksum, "here") == part
    with pytest.raises(DataMismatchError, match="here: differs from what its rank wrote"):
        Part.parse(text + b" ", checksum, "here")
