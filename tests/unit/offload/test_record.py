"""GenerationRecord: what is read back is what was written, or nothing."""

from __future__ import annotations

import numpy as np
import pytest

from iobench.offload.layout import (
    BLOCK,
    UNIT,
    GenerationRecord,
    ParameterSpec,
    Pin,
    StateLayout,
    area_bytes,
    empty_rows,
)

_LAYOUT = StateLayout(
    parameters=(ParameterSpec(name="a", shape=(5000,), dtype="bfloat16", group=0),),
    chunk_elements=UNIT,
    pins=2,
    tensors=("master",),
)


def _record() -> GenerationRecord:
    rows = empty_rows(_LAYOUT)
    rows["slot"], rows["state"] = 1, 2**64 - 1
    return GenerationRecord(
        sequence=7,
        generation=6,
        updates=5,
        rows=rows,
        counts=np.array([4], dtype=np.uint64),
        groups=[{"lr": 0.1 + 0.2, "betas": [0.9, 0.999]}],
        pins=(Pin(50, generation=3), Pin(100, "f" * 16, "e" * 16, 6, 7)),
        extra=b"any bytes",
        time_s=1.5,
    )


def test_written_and_read() -> None:
    """Every field, and floats to the last bit."""
    record = _record()
    data = record.encode(area_bytes(_LAYOUT))
    assert len(data) % BLOCK == 0
    found = GenerationRecord.decode(data + bytes(BLOCK), _LAYOUT)
    assert found is not None
    assert (found.rows == record.rows).all()
    assert found.counts.tolist() == [4]
    for name in ("sequence", "generation", "updates", "groups", "pins", "extra", "time_s"):
        assert getattr(found, name) == getattr(record, name)


def test_any_damage_is_found() -> None:
    """A flipped bit anywhere in it, and a torn write at any block, is no record."""
    data = _record().encode(area_bytes(_LAYOUT))
    used = len(data.rstrip(b"\0"))
    for position in range(0, used, 7):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        assert GenerationRecord.decode(bytes(flipped), _LAYOUT) is None, position
    assert GenerationRecord.decode(bytes(len(data)), _LAYOUT) is None
    assert GenerationRecord.decode(data[: used // 2], _LAYOUT) is None
    assert GenerationRecord.decode(b"", _LAYOUT) is None


def test_too_much_does_not_fit() -> None:
    """Values of the groups have limited room, and the error says how much."""
    with pytest.raises(ValueError, match="there is room for"):
        _record().encode(256)
