"""Which rank writes which part of each tensor: rank 0 makes the WholePlan, once, for all ranks.

RankPlan: the part of one rank.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from iobench.checkpoint.ranked.plan_json import read_plan, write_plan
from iobench.checkpoint.ranked.structure import Held, LocalState, RankStructure
from iobench.errors import StateError
from iobench.formats.collector import collector_paused
from iobench.formats.dcp_file import DcpFile
from iobench.formats.many_parts import Numbers
from iobench.formats.tensor_layouts import numbers
from iobench.formats.tensors import dtype_name, torch_dtype

__all__ = [
    *("Box", "BoxSource", "RankPlan", "WholePlan"),
    *("local_plan", "made_plan", "whole_plan"),
]


class Box(NamedTuple):
    """Elements [offset, offset + size) of the tensor `name` in each dimension."""

    name: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class BoxSource(NamedTuple):
    """Where this rank has a box: in its tensor `number`, `shift` bytes after its beginning.

    One that is not contiguous there is `narrow` (begin, size) in each dimension.
    """

    number: int
    shift: int
    narrow: tuple[tuple[int, int], ...] | None


class _Places(NamedTuple):
    """The sources of the boxes with elements, as arrays; `apart` are those that must be copied."""

    numbers: Numbers
    shifts: Numbers
    apart: list[int]

    @classmethod
    def of(cls, boxes: Sequence[Box], sources: Sequence[BoxSource]) -> _Places:
        stored = [source for box, source in zip(boxes, sources, strict=True) if 0 not in box.sizes]
        return cls(
            numbers(source.number for source in stored),
            numbers(source.shift for source in stored),
            [at for at, source in enumerate(stored) if source.narrow is not None],
        )


@dataclass(frozen=True)
class WholePlan:
    """The boxes by rank, in the order of each rank's file, and DCP's metadata of the tensors."""

    boxes: list[list[Box]]
    metadata: Metadata

    @functools.cached_property
    def size_bytes(self) -> int:
        """Bytes of the tensors of all ranks."""
        return sum(
            math.prod(box.sizes) * box.dtype.itemsize for boxes in self.boxes for box in boxes
        )

    def texts(self) -> list[str]:
        """Return the boxes of each rank as JSON, for `made_plan`."""
        with collector_paused():
            return [
                json.dumps([(box.name, dtype_name(box.dtype), *box[2:]) for box in boxes])
                for boxes in self.boxes
            ]


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The boxes that this rank writes, in the order of its file.

    `file` is the layout of the file, `sources` where this rank has the boxes. `whole` has those of
    all ranks, in rank 0 only. `uniform`: the skeletons of all ranks are the same, PerRank excepted.
    """

    boxes: list[Box] = field(repr=False)
    whole: WholePlan | None = field(repr=False)
    file: DcpFile = field(repr=False)
    sources: list[BoxSource] = field(repr=False)
    places: _Places = field(repr=False)
    uniform: bool


def local_plan(planner: SavePlanner, state: LocalState) -> str:
    """Return what this rank holds, as JSON for `whole_plan`. `planner` is DCP's.

    It is one text in the messages of the ranks: the hub need not take it apart.
    """
    structure = state.structure
    named = dict(zip(structure.names, state.tensors, strict=True))
    for name, whole in zip(structure.names, state.wholes, strict=False):
        if whole is not None:
            named[name] = whole.detach()
    for name in structure.tied:
        del named[name]
    planner.set_up_planner(named, None, True)
    with collector_paused():
        return json.dumps(write_plan(planner.create_local_plan()))


def whole_plan(planner: SavePlanner, texts: Sequence[str], first: Sequence[int]) -> WholePlan:
    """Return the plan of all ranks. The local plan of a rank is `texts[first[rank]]`.

    Raises StateError for tensors that differ between ranks or do not fit together.
    """
    with collector_paused():
        read = {number: read_plan(json.loads(texts[number])) for number in dict.fromkeys(first)}
        _check_equal(read)
        try:
            plans, metadata = planner.create_global_plan([read[number] for number in first])
        except (ValueError, AssertionError) as error:
            raise StateError(f"the states of the ranks do not fit together: {error}") from error
        return WholePlan([_boxes(plan) for plan in plans], metadata)


def made_plan(
    structure: RankStructure, text: str, whole: WholePlan | None, uniform: bool
) -> RankPlan:
    """Return the plan of this rank, which writes the boxes in `text`."""
    boxes = [
        Box(name, torch_dtype(dtype), tuple(offsets), tuple(sizes))
        for name, dtype, offsets, sizes in json.loads(text)
    ]
    number_of = {name: at for at, name in enumerate(structure.names)}
    sources = [
        _source(box, number_of[box.name], structure.held[box.name], structure.strides[box.name])
        for box in boxes
    ]
    return RankPlan(
        boxes=boxes,
        whole=whole,
        file=DcpFile([(box.dtype, box.sizes) for box in boxes]),
        sources=sources,
        places=_Places.of(boxes, sources),
        uniform=uniform,
    )


def _boxes(plan: SavePlan) -> list[Box]:
    boxes = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None
        chunk = data.chunk
        boxes.append(
            Box(item.index.fqn, data.properties.dtype, tuple(chunk.offsets), tuple(chunk.sizes))
        )
    return boxes


def _check_equal(plans: Mapping[int, SavePlan]) -> None:
    """Raise StateError for a tensor with another dtype or shape on another rank."""
    first: dict[str, tuple[int, Any]] = {}
    for rank, plan in plans.items():
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            found = (data.properties.dtype, tuple(data.size), item.type)
            other, expected = first.setdefault(item.index.fqn, (rank, found))
            if found != expected:
                raise StateError(
                    f"{item.index.fqn} is {_shown(*expected)} on rank {other} and "
                    f"{_shown(*found)} on rank {rank}; wrap state of one rank in iobench.PerRank"
                )


def _shown(dtype: torch.dtype, shape: tuple[int, ...], kind: Any) -> str:
    return f"a {'DTensor' if kind.name == 'SHARD' else 'tensor'} of {dtype} {list(shape)}"


def _source(box: Box, number: int, held: Held, stride: tuple[int, ...]) -> BoxSource:
    narrow = tuple(
        (at - begin, size)
        for at, begin, size in zip(box.offsets, held.offsets, box.sizes, strict=True)
    )
    view = torch.empty_strided(held.sizes, stride, device="meta", dtype=box.dtype)
    for dim, (begin, size) in enumerate(narrow):
        view = view.narrow(dim, begin, size)
    if not math.prod(box.sizes):
        return BoxSource(number, 0, None)
    shift = int(view.storage_offset()) * box.dtype.itemsize
    return BoxSource(number, shift, None if view.is_contiguous() else narrow)
