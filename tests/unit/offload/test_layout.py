"""StateLayout: every element of every parameter has one place, and places do not overlap."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.errors import DataMismatchError, StateMismatchError, UsageError
from iobench.offload.files import file_sizes
from iobench.offload.layout import (
    ALIGN,
    BLOCK,
    DATA_FILES,
    DTYPE_BYTES,
    UNIT,
    ParameterSpec,
    StateLayout,
)
from iobench.units import GIB, MIB

_TENSORS = ("master", "exp_avg", "exp_avg_sq")


def _spec(name: str, *shape: int, dtype: str = "bfloat16", group: int = 0) -> ParameterSpec:
    return ParameterSpec(name=name, shape=shape, dtype=dtype, group=group)


def _layout(*specs: ParameterSpec, chunk: int = UNIT, pins: int = 1) -> StateLayout:
    return StateLayout(parameters=specs, chunk_elements=chunk, pins=pins, tensors=_TENSORS)


_specs = st.lists(
    st.builds(
        ParameterSpec,
        name=st.just("p"),
        shape=st.tuples(st.integers(0, 5000)),
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
        group=st.just(0),
    ),
    min_size=1,
    max_size=8,
).filter(lambda specs: any(one.elements for one in specs))


@given(specs=_specs, chunk=st.integers(1, 4), pins=st.integers(0, 2))
def test_places(specs: list[ParameterSpec], chunk: int, pins: int) -> None:
    """Pieces cover each parameter once; slots cover both files without gaps or overlaps."""
    layout = _layout(*specs, chunk=chunk * UNIT, pins=pins)
    covered = [0] * len(specs)
    for number in range(layout.chunks):
        at = bytes_at = 0
        assert layout.elements(number) % UNIT == 0
        for piece in layout.pieces(number):
            assert piece.begin == covered[piece.parameter] < piece.end
            assert piece.begin % ALIGN == piece.at % ALIGN == 0
            assert piece.at >= at
            assert piece.bytes_at >= bytes_at
            covered[piece.parameter] = piece.end
            at = piece.at + piece.end - piece.begin
            item = DTYPE_BYTES[specs[piece.parameter].dtype]
            assert piece.bytes_at % item == 0
            bytes_at = piece.bytes_at + (piece.end - piece.begin) * item
        assert at <= layout.elements(number)
        assert bytes_at <= layout.slot_bytes("parameters", number)
        assert sum(layout.slot_bytes(name, number) for name in DATA_FILES) <= layout.buffer_bytes
    assert covered == [one.elements for one in specs]
    places = [(slot, n) for slot in range(layout.slots) for n in range(layout.chunks)]
    for name in DATA_FILES:
        end = 0
        for slot, number in places:
            assert layout.offset(name, number, slot) == end
            assert end % BLOCK == 0
            end += layout.slot_bytes(name, number)
        assert end == file_sizes(layout)[name]


def test_written_and_read() -> None:
    """`layout.json` gives the same layout back."""
    layout = _layout(_spec("a", 3, 4), _spec("b", 7, dtype="float32", group=1), pins=3)
    assert StateLayout.from_json(layout.to_json(), "there") == layout


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"version": 3}, UsageError, "format version 3; this iobench reads 1"),
        ({"version": 2}, UsageError, r"version 2; .*export .* a file for load_state_dict"),
        ({"tensors": ["master"]}, UsageError, "the state has master; only that of AdamW and Adam"),
        ({"format": "other"}, UsageError, "not a layout"),
        ({"parameters": 5}, DataMismatchError, "damaged"),
    ],
)
def test_other_files_are_refused(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    """A newer format, another file and a damaged one are different errors."""
    text = json.dumps(json.loads(_layout(_spec("a", 3)).to_json()) | change)
    with pytest.raises(error, match=message):
        StateLayout.from_json(text, "there")
    with pytest.raises(DataMismatchError, match="damaged"):
        StateLayout.from_json(text[: len(text) // 2], "there")


def test_another_model() -> None:
    """Names are compared where both sides have them; shapes, dtypes and groups always."""
    one, two = _spec("a", 3, 4), _spec("b", 7)
    layout = _layout(one, two)
    layout.check_same([one, two], "there")
    layout.check_same([replace(one, name="0"), replace(two, name="1")], "there")
    with pytest.raises(StateMismatchError, match=r"missing 1 \(c\); unexpected 1 \(b\)"):
        layout.check_same([one, replace(two, name="c")], "there")
    with pytest.raises(StateMismatchError, match=r"bfloat16 \[4, 3\] in group 0 expected"):
        layout.check_same([replace(one, shape=(4, 3)), two], "there")
    with pytest.raises(StateMismatchError, match="in group 1 expected"):
        layout.check_same([one, replace(two, group=1)], "there")
    with pytest.raises(StateMismatchError, match="float32"):
        layout.check_same([one, replace(two, dtype="float32")], "there")
    with pytest.raises(StateMismatchError, match="unexpected 1"):
        layout.check_same([one], "there")
    with pytest.raises(UsageError, match="another order"):
        layout.check_same([two, one], "there")


def test_the_chunk_size_follows_the_memory() -> None:
    """Five buffers fit the memory, if any do; chunks have 4 Mi elements at most."""
    large = [_spec("a", 1 << 30)]

    def planned(memory: int, **values: int) -> StateLayout:
        return StateLayout.plan(large, pins=1, memory_bytes=memory, **values)

    assert planned(2 * GIB).chunk_elements == 4 * MIB
    small = planned(100 * MIB)
    assert small.chunk_elements % UNIT == 0
    assert 5 <= small.buffers(100 * MIB) < 10
    with pytest.raises(UsageError, match="memory=1000: too small"):
        planned(1000)
    with pytest.raises(UsageError, match="multiple of 1024"):
        planned(GIB, chunk_elements=1000)
    with pytest.raises(UsageError, match="no elements"):
        StateLayout.plan([_spec("a", 0)], pins=1, memory_bytes=GIB)
