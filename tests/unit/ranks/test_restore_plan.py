"""Restore plans: every rank gets every byte it wants, and the modes read as often as they say.
slices: every byte once, equal shares, cuts where they are allowed."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.checkpoint.ranked.plan import boxes, cut_bytes
from iobench.errors import OptionError
from iobench.ranks.restore_plan import (
    MAX_IMBALANCE,
    MODES,
    Range,
    ReadMode,
    check_restore_mode,
    fitting_align,
    head,
    held_plan,
    merged,
    plan,
    shared,
    slices,
    writers_of,
)
from iobench.units import GIB, KIB, MIB

_RANGES = st.lists(
    st.builds(
        lambda item, start, size: Range(item, start, start + size),
        st.integers(0, 2),
        st.integers(0, 60),
        st.integers(0, 30),
    ),
    max_size=4,
).map(merged)
_WANTED = st.lists(_RANGES, min_size=1, max_size=5)


def _bytes(ranges: list[Range]) -> set[tuple[int, int]]:
    return {(item, at) for item, start, stop in ranges for at in range(start, stop)}


@given(_WANTED, st.sampled_from(MODES), st.integers(1, 20), st.integers(1, 3), st.integers(0, 50))
def test_each_rank_gets_what_it_wants(
    wanted: list[list[Range]], mode: ReadMode, piece_bytes: int, per_node: int, sample: int
) -> None:
    """Pieces are followed from hop to hop: nothing twice, nothing that a rank does not want."""
    nodes = [rank // per_node for rank in range(len(wanted))]
    everything = shared(wanted, nodes)
    taken, left = head(everything, sample)
    assert sum(part.size_bytes for part, _ in taken) <= sample
    found: list[list[tuple[int, int]]] = [[] for _ in wanted]
    read = 0
    for parts in (taken, left):
        made = plan(parts, mode, nodes, piece_bytes=piece_bytes)
        read += sum(part.size_bytes for ranges in made.reads for part in ranges)
        for rank, ranges in enumerate(made.reads):
            found[rank] += _listed(ranges)
        for piece in made.pieces:
            assert 0 < piece.stop - piece.start <= piece_bytes
            assert _bytes([Range(*piece[:3])]) <= set(found[piece.reader])
            sender, receiver = piece.reader, piece.after(piece.reader)
            while receiver is not None:
                assert piece.before(receiver) == sender
                found[receiver] += _listed([Range(*piece[:3])])
                sender, receiver = receiver, piece.after(receiver)
    for rank, ranges in enumerate(wanted):
        assert len(found[rank]) == len(set(found[rank]))
        assert set(found[rank]) == _bytes(ranges)
    distinct = set().union(*(_bytes(ranges) for ranges in wanted))
    together = sum(len(_bytes(ranges)) for ranges in wanted)
    assert read == (together if mode == "all" else len(distinct))


def _listed(ranges: list[Range]) -> list[tuple[int, int]]:
    return [(item, at) for item, start, stop in ranges for at in range(start, stop)]


def test_a_ring_goes_node_by_node() -> None:
    """So the link of a node carries each byte once in each direction."""
    (part,) = shared([[Range(0, 0, 80)]] * 4, [0, 1, 0, 1])
    assert part.ring == (0, 2, 1, 3)


def test_what_makes_no_sense_is_refused() -> None:
    """A word that is not a mode, by an error that lists the modes. No ranks, no block and no
    writers are errors of the caller."""
    with pytest.raises(OptionError, match="broadcast"):
        check_restore_mode("tree")
    for nodes, align, writers in (([], 1, None), ([0], 0, None), ([0], 1, 0)):
        with pytest.raises(OptionError):
            slices([1], nodes, align=align, writers_per_node=writers)


@given(_WANTED, st.data(), st.integers(1, 20))
def test_files_in_memory(wanted: list[list[Range]], data: st.DataObject, piece_bytes: int) -> None:
    """Holders read what they need; all others get it from one holder, or read it if none has it."""
    ranks = range(len(wanted))
    some = st.lists(st.sampled_from(ranks), unique=True)
    holders = {file: data.draw(some) for file in range(3)}
    nodes = [0] * len(wanted)
    made = held_plan(shared(wanted, nodes), holders, nodes, piece_bytes=piece_bytes)
    for rank in ranks:
        got = _bytes(made.reads[rank])
        assert all(not holders[item] or rank in holders[item] for item, _ in got)
        for piece in made.pieces:
            assert piece.reader in holders[piece.file]
            if rank in piece.ring and piece.before(rank) is not None:
                got |= _bytes([Range(*piece[:3])])
        assert got == _bytes(wanted[rank])


_SIZES = st.lists(st.integers(0, 40 * MIB), max_size=12)
_LAYOUTS = st.lists(st.integers(1, 5), min_size=1, max_size=6)  # ranks of each node
_ALIGNS = st.sampled_from([1, 512, 4 * KIB, 100_000, MIB])


def _nodes(layout: list[int]) -> list[int]:
    return [node for node, ranks in enumerate(layout) for _ in range(ranks)]


def _size(ranges: list[Range]) -> int:
    return sum(part.size_bytes for part in ranges)


@given(_SIZES, _LAYOUTS, _ALIGNS, st.none() | st.integers(1, 6))
def test_every_byte_is_written_once_in_equal_shares(
    sizes: list[int], layout: list[int], align: int, writers_per_node: int | None
) -> None:
    """The ranges of all ranks, in rank order, are the items from begin to end, with aligned cuts.
    Nodes have equal shares, whatever their ranks; then the writers of each node do, up to a
    block."""
    nodes = _nodes(layout)
    found = slices(sizes, nodes, align=align, writers_per_node=writers_per_node)
    ranges = list(itertools.chain.from_iterable(found))
    assert len(found) == len(nodes)
    for item, size in enumerate(sizes):
        parts = [part for part in ranges if part.item == item]
        edges = [0, *(part.stop for part in parts)]
        assert [part.start for part in parts] == edges[:-1]
        assert edges[-1] == size
        assert all(edge % align == 0 for edge in edges[1:-1])
        assert all(part.size_bytes for part in parts)
    writers = writers_of(nodes, writers_per_node)
    allowed = set(itertools.chain.from_iterable(writers))
    assert all(rank in allowed for rank, parts in enumerate(found) if parts)
    share = sum(sizes) / len(layout)
    for ranks in writers:
        assert abs(sum(_size(found[rank]) for rank in ranks) - share) <= align
        assert all(abs(_size(found[rank]) - share / len(ranks)) <= align for rank in ranks)


@given(
    st.integers(20 * MIB, 400 * GIB), st.integers(1, 64), st.sampled_from([64 * KIB, 8 * MIB, GIB])
)
def test_shares_differ_by_one_percent_at_most(size: int, ranks: int, block_size: int) -> None:
    """The block is divided until the largest rank has at most 1 % above the mean."""
    align = fitting_align(size, ranks, block_size)
    shares = [_size(part) for part in slices([size], [0] * ranks, align=align)]
    mean = size / ranks
    assert align <= block_size
    assert max(shares) <= mean * (1 + MAX_IMBALANCE) or mean < 6.4 * MIB


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4))
def test_few_blocks_go_to_different_nodes(nodes: int, blocks: int, ranks_per_node: int) -> None:
    """No node has two blocks while another has none."""
    where = [node for node in range(nodes) for _ in range(ranks_per_node)]
    found = slices([blocks * MIB], where, align=MIB)
    by_node = [
        sum(_size(found[rank]) for rank, node in enumerate(where) if node == wanted) // MIB
        for wanted in range(nodes)
    ]
    assert max(by_node) - min(by_node) <= 1


def test_ranks_of_interleaved_nodes() -> None:
    """Ranks that are not numbered node by node count for the node that they are on."""
    found = slices([4 * MIB], [0, 1, 0, 1], align=MIB, writers_per_node=1)
    assert found == [[Range(0, 0, 2 * MIB)], [Range(0, 2 * MIB, 4 * MIB)], [], []]


@given(st.lists(st.integers(0, 6), max_size=4), st.data())
def test_boxes_are_the_elements_of_the_range(shape: list[int], data: st.DataObject) -> None:
    """Together the boxes have each element of the range once, in order, and are contiguous."""
    elements = np.arange(prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, elements.size))
    stop = data.draw(st.integers(start, elements.size))
    found = boxes(shape, start, stop)
    values = []
    for offsets, sizes in found:
        where = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        part = elements[where]
        assert part.size
        assert np.array_equal(part.ravel(), np.arange(part.size) + part.ravel()[0])
        values += part.ravel().tolist()
    assert values == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("shape", "align", "step"),
    [
        ((1000, 64), 4096, 4096),  # rows of 256 bytes: 16 rows
        ((1000, 33), 4096, 31 * 132),  # rows of 132 bytes: whole rows only
        ((3, 2**20), 4096, 4096),  # few rows: cut inside a row
        ((4096,), 4096, 4096),
        ((10, 10), 4096, 4000),  # smaller than a block: never cut
        ((), 4096, 4096),
        ((0, 5), 4096, 4096),
    ],
)
def test_step_of_a_tensor(shape: tuple[int, ...], align: int, step: int) -> None:
    """A tensor is cut at rows where rows are smaller than a block, otherwise inside them."""
    assert cut_bytes(shape, 4, align) == step
