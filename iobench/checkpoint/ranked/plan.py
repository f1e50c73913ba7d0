"""Which rank writes which part of each tensor: rank 0 makes the WholePlan, once, for all ranks.

RankPlan: the part of one rank. RankContent: what it writes in a save, before any copy.
CutPlanner: replicated tensors are saved once, cut over the ranks that hold them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from iobench.checkpoint.content import Content
from iobench.checkpoint.ranked.structure import Held, LocalState, RankStructure, local_state
from iobench.errors import StateError, UsageError
from iobench.formats.collector import collector_paused
from iobench.formats.dcp_file import DcpFile
from iobench.formats.many_parts import Numbers
from iobench.formats.tensor_layouts import numbers
from iobench.formats.tensors import dtype_name, tensor_bytes, tensor_memory, torch_dtype
from iobench.ranks.control import Control
from iobench.ranks.restore_plan import Range, fitting_align, slices, writers_of
from iobench.units import MIB
from iobench.writers.image import Bytes, FileImage

BLOCK_SIZE = 8 * MIB
"""The block of the writer, to which the parts of a replicated tensor are aligned."""


def _item(
    name: str, kind: str, dtype: str, shape: list[int], offsets: list[int], sizes: list[int]
) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType[kind],
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties(dtype=torch_dtype(dtype)),
            size=torch.Size(shape),
        ),
    )


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
    sizes: tuple[int, ...]
    narrow: tuple[tuple[int, int], ...] | None


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

    `file` is the layout of the file. `sources` is where this rank has the boxes with elements;
    `numbers` and `shifts` are the same as arrays, and `apart` those that must be copied. `whole`
    has the boxes of all ranks, in rank 0 only.
    """

    boxes: list[Box] = field(repr=False)
    whole: WholePlan | None = field(repr=False)
    file: DcpFile = field(repr=False)
    sources: list[BoxSource] = field(repr=False)
    numbers: Numbers = field(repr=False)
    shifts: Numbers = field(repr=False)
    apart: list[int] = field(repr=False)


def local_plan(state: LocalState) -> str:
    """Return what this rank holds, as DCP would plan it, in JSON for `whole_plan`.

    It is one text in the messages of the ranks: the hub need not take it apart.
    """
    wholes = dict(zip(state.structure.names, state.wholes, strict=False))
    rows = []
    for name, (dtype, *box) in state.structure.held.items():
        whole = wholes.get(name)
        outside = whole is not None and whole.device_mesh.get_coordinate() is None
        if not outside and name not in state.structure.tied:
            kind = WriteItemType.TENSOR if whole is None else WriteItemType.SHARD
            rows.append((name, kind.name, dtype_name(dtype), *box))
    return json.dumps(rows)


def whole_plan(planner: SavePlanner, texts: Sequence[str], first: Sequence[int]) -> WholePlan:
    """Return the plan of all ranks. The local plan of a rank is `texts[first[rank]]`.

    Raises StateError for tensors that differ between ranks or do not fit together.
    """
    with collector_paused():
        read = {
            number: SavePlan([_item(*row) for row in json.loads(texts[number])], planner_data={})
            for number in dict.fromkeys(first)
        }
        _check_equal(read)
        try:
            plans, metadata = planner.create_global_plan([read[number] for number in first])
        except (ValueError, AssertionError) as error:
            raise StateError(f"the states of the ranks do not fit together: {error}") from error
        return WholePlan([_boxes(plan) for plan in plans], metadata)


def made_plan(structure: RankStructure, text: str, whole: WholePlan | None) -> RankPlan:
    """Return the plan of this rank, which writes the boxes in `text`."""
    boxes = [
        Box(name, torch_dtype(dtype), tuple(offsets), tuple(sizes))
        for name, dtype, offsets, sizes in json.loads(text)
    ]
    number_of = {name: at for at, name in enumerate(structure.names)}
    sources = [
        _source(box, number_of[box.name], structure.held[box.name], structure.strides[box.name])
        for box in boxes
        if 0 not in box.sizes
    ]
    return RankPlan(
        boxes=boxes,
        whole=whole,
        file=DcpFile([(box.dtype, box.sizes) for box in boxes]),
        sources=sources,
        numbers=numbers(source.number for source in sources),
        shifts=numbers(source.shift for source in sources),
        apart=[at for at, source in enumerate(sources) if source.narrow is not None],
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
    shift = int(view.storage_offset()) * box.dtype.itemsize
    return BoxSource(number, shift, box.sizes, None if view.is_contiguous() else narrow)


def data_file(rank: int) -> str:
    """Return the name of a rank's file, as in stock DCP."""
    return f"__{rank}_0.distcp"


@dataclass(frozen=True, kw_only=True)
class RankContent(Content):
    """The parts of tensors that this rank writes.

    `number` is -1 before all ranks have agreed to it. `alike`: all ranks have the same skeleton,
    PerRank excepted.
    """

    rank: int
    structure: RankStructure = field(repr=False)
    plan: RankPlan = field(repr=False)
    alike: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of this rank's tensors in its file."""
        return self.plan.file.size_bytes

    @property
    def job_bytes(self) -> int:
        """Bytes of the tensors of all ranks, in rank 0."""
        assert self.plan.whole is not None
        return self.plan.whole.size_bytes

    def _view(self, source: BoxSource) -> torch.Tensor:
        tensor = self.tensors[source.number].detach()
        if source.narrow is not None:
            for dim, (begin, size) in enumerate(source.narrow):
                tensor = tensor.narrow(dim, begin, size)
            return tensor
        strides, step = list[int](), 1
        for size in reversed(source.sizes):
            strides.insert(0, step)
            step *= size
        offset = tensor.storage_offset() + source.shift // tensor.element_size()
        return tensor.as_strided(source.sizes, strides, offset)

    def image(self) -> FileImage:
        """Return the file on the trainer's memory, without the checksums in torch's format."""
        if not self.on_cpu:
            return self._on_memory(checked=False)
        plan = self.plan
        apart = {at: tensor_bytes(self._view(plan.sources[at])) for at in plan.apart}
        addresses = self.located.addresses[plan.numbers] + plan.shifts
        owners = (self.located.owners, self.tensors)
        return plan.file.image(data_file(self.rank), addresses, apart, owners)

    def piece_end(self, position: int) -> int:
        """Return the end of the item that begins before `position` and ends after it.

        Or `position`, if there is none.
        """
        items = self.plan.file.items
        return next((one.stop for one in items if one.start < position < one.stop), position)

    def whole_image(self, end: bytes = b"") -> FileImage:
        """Return the file with its checksums, and then `end`, on the trainer's memory.

        A checksum is computed when a writer takes its bytes.
        """
        return self._on_memory(checked=True, end=end)

    def _on_memory(self, *, checked: bool, end: bytes = b"") -> FileImage:
        data = [tensor_memory(self._view(one)) for one in self.plan.sources]
        return self.plan.file.image_of(data_file(self.rank), data, checked=checked, end=end)

    def image_in(self, memory: Bytes, end: bytes) -> FileImage:
        """Return the file whose snapshot is in `memory`, and then `end`.

        A checksum is computed, and written into `memory`, when a writer takes its bytes.
        """
        path, file = data_file(self.rank), self.plan.file
        if self.streamed is None:
            return file.image_in(path, memory, end)
        return self.streamed.image(file.image_in(path, memory, end, begin=self.streamed.begin))


class Planning:
    """Makes the contents of saves.

    The ranks compare a hash of what each of them holds. They exchange plans when one of these
    hashes differs from that of the last save.
    """

    def __init__(self, ranks: Control, planner: Callable[[], SavePlanner]) -> None:
        self._ranks, self._planner = ranks, planner
        self._last: RankStructure | None = None
        self._plan: RankPlan | None = None
        self._keys: list[str] = []

    def local(self, state: Any) -> LocalState:
        """Return the state of this rank. Raises StateError with the path of what cannot be saved.

        No other rank is asked.
        """
        found = local_state(state, self._ranks.world.rank, self._last)
        self._last = found.structure
        return found

    def facts(self, local: LocalState) -> dict[str, Any]:
        """Return what the other ranks must know about the state of this rank."""
        return {"key": local.structure.key, "plain": local.plain_digest}

    def content(
        self, number: int, local: LocalState, every: list[Mapping[str, str]]
    ) -> RankContent:
        """Return what this rank writes. `every` has the facts of each rank.

        Raises StateError, in all ranks, for states that do not fit together.
        """
        keys = [one["key"] for one in every]
        if self._plan is None or keys != self._keys:
            self._plan = self._agreed(local, keys)
            self._keys = keys
        alike = len({one["plain"] for one in every}) == 1
        return self._content(number, local, self._plan, alike)

    def content_ahead(self, local: LocalState) -> RankContent | None:
        """Return what this rank writes if no rank has a new structure; None if this one has.

        It has no number yet, and no other rank is asked.
        """
        if self._plan is None or self._keys[self._ranks.world.rank] != local.structure.key:
            return None
        return self._content(-1, local, self._plan, alike=False)

    def _content(self, number: int, local: LocalState, plan: RankPlan, alike: bool) -> RankContent:
        world = self._ranks.world
        return RankContent(
            number=number,
            rank=world.rank,
            processes=world.local_size,
            structure=local.structure,
            plan=plan,
            skeleton=local.skeleton,
            alike=alike,
            tensors=local.tensors,
            located=local.located,
        )

    def _agreed(self, local: LocalState, keys: list[str]) -> RankPlan:
        """Make a plan with the other ranks: rank 0 makes it, and tells each rank its own part.

        Ranks with equal keys have equal local plans: the first of them sends it.
        """
        self._plan = None  # also if this fails
        rank = self._ranks.world.rank
        first = [keys.index(key) for key in keys]

        def own() -> str | None:
            return local_plan(local) if first[rank] == rank else None

        _, sent = self._ranks.together("plan", own, kind="gather")

        def made() -> WholePlan | StateError | None:
            try:
                return None if rank else whole_plan(self._planner(), sent, first)
            except StateError as error:  # every rank raises it as its own
                return error

        def parts(whole: WholePlan | StateError | None) -> list[dict[str, str]] | None:
            if isinstance(whole, StateError):
                return [{"error": str(whole)}] * len(keys)
            return None if whole is None else [{"boxes": text} for text in whole.texts()]

        whole, (part,) = self._ranks.together("parts of the plan", made, parts, kind="scatter")
        if "error" in part or isinstance(whole, StateError):
            raise StateError(part["error"])
        return made_plan(local.structure, part["boxes"], whole)


class _Box(NamedTuple):
    """Elements [offset, offset + size) in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> list[_Box]:
    """Return the boxes of elements [start, stop) of a tensor of `shape`, in row-major order.

    They are disjoint and each is contiguous in memory. Rows that are whole form one box; a part of
    a row at either end adds boxes of the inner dimensions: 2 * len(shape) - 1 at most.
    """
    if start >= stop:
        return []
    if not shape:
        return [_Box((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # all in one row
        return _in_row(shape, last, start - last * row, stop - last * row)
    found = _in_row(shape, first - 1, row - (first * row - start), row)
    if first < last:
        inner = tuple(shape[1:])
        found.append(_Box((first, *(0 for _ in inner)), (last - first, *inner)))
    return found + _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[_Box]:
    return [
        _Box((row, *box.offsets), (1, *box.sizes))
        for box in boxes(shape[1:], start, stop)
        if start < stop
    ]


def cut_bytes(shape: Sequence[int], itemsize: int, align: int) -> int:
    """Return the step in bytes, at most `align`, at which a tensor is cut into the fewest boxes.

    It is a multiple of the largest inner block (a row, or the rows of an inner dimension) that is
    not larger than `align`. Never less than one element.
    """
    block = math.prod(shape) * itemsize
    for size in shape:
        if block <= align:
            break
        block //= size
    return max(block, align - align % block) if block else align


class CutPlanner(DefaultSavePlanner):
    """Cuts what several ranks hold over these ranks, in the plan of all of them.

    SlicePlanner of iobench.integrations.dcp, which plans whole saves of stock DCP, has the options.
    """

    def __init__(
        self,
        *,
        nodes: Sequence[int] | None = None,
        block_size: int = BLOCK_SIZE,
        writers_per_node: int | None = None,
        **stock: Any,
    ) -> None:
        super().__init__(**stock)
        self._nodes = nodes
        self._block_size = block_size
        self._writers_per_node = writers_per_node

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        nodes = self._nodes if self._nodes is not None else [0] * len(all_plans)
        if len(nodes) != len(all_plans):
            raise UsageError(f"nodes={list(nodes)}: {len(all_plans)} ranks save, list each")
        cut = [list[WriteItem]() for _ in all_plans]
        replicated = set[MetadataIndex]()
        for holders, items in _replicated(all_plans).items():
            found = self._cut(items, [nodes[rank] for rank in holders])
            for rank, parts in zip(holders, found, strict=True):
                cut[rank] += parts
            replicated.update(item.index for item in items)
        plans = [
            dataclasses.replace(
                plan, items=[*(i for i in plan.items if i.index not in replicated), *parts]
            )
            for plan, parts in zip(all_plans, cut, strict=True)
        ]
        deduplicated: list[SavePlan] = super()._dedup_save_plans(plans)
        return deduplicated

    def _cut(self, items: list[WriteItem], nodes: list[int]) -> list[list[WriteItem]]:
        """Return the parts of `items` that each of the ranks writes which hold all of them."""
        sizes = [_size_bytes(item) for item in items]
        writers = sum(map(len, writers_of(nodes, self._writers_per_node)))
        align = fitting_align(sum(sizes), writers, self._block_size)
        steps = [cut_bytes(chunk_of(item).sizes, _itemsize(item), align) for item in items]
        found = slices(sizes, nodes, align=steps, writers_per_node=self._writers_per_node)
        return [[part for r in ranges for part in _parts(items[r.item], r)] for ranges in found]


def _replicated(plans: Sequence[SavePlan]) -> dict[tuple[int, ...], list[WriteItem]]:
    """Return the tensors that several ranks list, by these ranks, in the order of the first one.

    Left out, and with that to stock DCP: tensors without elements, tensors whose memory is not
    rows of elements, and those of which ranks list different shapes or types.
    """
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    first: dict[MetadataIndex, WriteItem] = {}
    differ = set[MetadataIndex]()
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            if data is None or data.properties.layout != torch.strided or not _size_bytes(item):
                continue
            known = first.setdefault(item.index, item).tensor_data
            assert known is not None
            if (data.chunk, data.properties.dtype) != (known.chunk, known.properties.dtype):
                differ.add(item.index)
            holders[item.index].append(rank)
    groups: dict[tuple[int, ...], list[WriteItem]] = defaultdict(list)
    for index, ranks in holders.items():
        if len(ranks) > 1 and index not in differ:
            groups[tuple(ranks)].append(first[index])
    return groups


def _parts(item: WriteItem, part: Range) -> list[WriteItem]:
    """Return the write items of a range of bytes of `item`: `item` itself for all of it."""
    if part.size_bytes == _size_bytes(item):
        return [item]
    assert item.tensor_data is not None
    chunk, itemsize = chunk_of(item), _itemsize(item)
    found = []
    for offsets, sizes in boxes(chunk.sizes, part.start // itemsize, part.stop // itemsize):
        at = torch.Size(o + inner for o, inner in zip(chunk.offsets, offsets, strict=True))
        data = dataclasses.replace(
            item.tensor_data, chunk=ChunkStorageMetadata(offsets=at, sizes=torch.Size(sizes))
        )
        index = MetadataIndex(item.index.fqn, at)
        found.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    return found


def chunk_of(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _itemsize(item: WriteItem) -> int:
    assert item.tensor_data is not None
    itemsize: int = item.tensor_data.properties.dtype.itemsize
    return itemsize


def _size_bytes(item: WriteItem) -> int:
    return math.prod(chunk_of(item).sizes) * _itemsize(item)
