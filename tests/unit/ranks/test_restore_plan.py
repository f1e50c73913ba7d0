"""Restore plans: every rank gets every byte it wants, and the modes read as often as they say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.errors import OptionError
from iobench.ranks.restore_plan import (
    MODES,
    Range,
    ReadMode,
    check_restore_mode,
    head,
    held_plan,
    merged,
    plan,
    shared,
)

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
    assert sum(part.size_bytes for part in taken) <= sample
    found: list[list[tuple[int, int]]] = [[] for _ in wanted]
    read = 0
    for parts in (taken, left):
        made = plan(parts, mode, nodes, piece_bytes=piece_bytes)
        read += made.read_bytes
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


def test_who_reads() -> None:
    """Two nodes of two ranks want one file: the readers of each mode, and the ring by node."""
    nodes, wanted = [0, 1, 0, 1], [[Range(0, 0, 80)]] * 4
    parts = shared(wanted, nodes)
    assert [part.ring for part in parts] == [(0, 2, 1, 3)]
    shares = {
        mode: [
            sum(part.size_bytes for part in ranges)
            for ranges in plan(parts, mode, nodes, piece_bytes=10).reads
        ]
        for mode in MODES
    }
    assert shares == {
        "all": [80, 80, 80, 80],
        "broadcast": [80, 0, 0, 0],
        "all-gather": [20, 20, 20, 20],
    }


def test_another_mode_is_refused() -> None:
    """A word that is not a mode is an error that lists the modes."""
    with pytest.raises(OptionError, match="broadcast"):
        check_restore_mode("tree")


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
