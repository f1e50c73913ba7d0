"""A damaged or foreign safetensors file is a DataMismatchError of one line, never another error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iobench.errors import DataMismatchError, TransferError
from iobench.formats import safetensors as ours


def _file(header: Any, data_bytes: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def _entry(**changed: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changed


def _one(**changed: Any) -> bytes:
    return _file({"a": _entry(**changed)})


_ENTRY = json.dumps(_entry()).encode()
_DAMAGED = {
    "empty": b"",
    "length cut off": b"\x10\x00",
    "length beyond the file": (100).to_bytes(8, "little") + b"{}",
    "length of 2^64": b"\xff" * 8,
    "header not JSON": _file(b'{"a":'),
    "header not UTF-8": _file(b'{"\xff":1}'),
    "header nested too deep": _file(b"[" * 100_000),
    "number too long": _file(b'{"a":' + b"1" * 5000 + b"}"),
    "header a list": _file([1]),
    "metadata a number": _file({"__metadata__": 3, "a": _entry()}),
    "metadata of numbers": _file({"__metadata__": {"a": 3}, "a": _entry()}),
    "metadata without a comma": _file(b'{"__metadata__":{"a":"b"}"a":' + _ENTRY + b"}"),
    "metadata with a comma too many": _file(b'{"__metadata__":{"a":"b"},}', 0),
    "metadata not closed": _file(b'{"__metadata__":{"a":"b"', 0),
    "metadata twice, a number": _file(
        b'{"__metadata__":{"a":"b"},"a":' + _ENTRY + b',"__metadata__":3}'
    ),
    "entry a number": _file({"a": 3}),
    "no dtype": _file({"a": {"shape": [2], "data_offsets": [0, 8]}}),
    "no offsets": _file({"a": {"dtype": "F32", "shape": [2]}}),
    "dtype unknown": _one(dtype="F33"),
    "dtype a list": _one(dtype=[]),
    "shape text": _one(shape="2"),
    "shape null": _one(shape=None),
    "shape of floats": _one(shape=[2.0]),
    "shape of booleans": _one(shape=[True, 2]),
    "shape negative": _one(shape=[-1]),
    "shape too small": _one(shape=[1]),
    "shape too large": _one(shape=[2, 2]),
    "shape of nothing": _one(shape=[0]),
    "odd packed shape": _one(dtype="F4", shape=[15]),
    "shape beyond any integer": _file({"a": _entry(shape=[0, 2**63], data_offsets=[0, 0])}, 0),
    "shape beyond any size": _file({"a": _entry(shape=[2**62, 4, 0], data_offsets=[0, 0])}, 0),
    "shape of no length": _file({"a": _entry(shape=[2**70, 0], data_offsets=[0, 0])}, 0),
    "name a surrogate": _file({"\ud800": _entry()}),
    "name a raw surrogate": _file(
        json.dumps({"?": _entry()}).encode().replace(b"?", b"\xed\xa0\x80")
    ),
    "metadata a surrogate": _file({"__metadata__": {"a": "\udfff"}, "a": _entry()}),
    "header UTF-16": _file(json.dumps({"a": _entry()}).encode("utf-16-le")),
    "offsets text": _one(data_offsets="08"),
    "offsets of text": _one(data_offsets=["0", 8]),
    "offsets three": _one(data_offsets=[0, 8, 16]),
    "offsets backwards": _one(data_offsets=[8, 0]),
    "offsets negative": _one(data_offsets=[0, -8]),
    "offsets infinite": _file(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,Infinity]}}'),
    "offsets beyond any memory": _one(shape=[2**60], data_offsets=[0, 2**62]),
    "gap before": _file({"a": _entry(data_offsets=[1, 9])}, 9),
    "gap between": _file({"a": _entry(), "b": _entry(data_offsets=[9, 17])}, 17),
    "overlap": _file({"a": _entry(), "b": _entry(data_offsets=[4, 12])}, 12),
    "same place": _file({"a": _entry(), "b": _entry()}),
    "data cut off": _file({"a": _entry()}, 7),
    "data left over": _file({"a": _entry()}, 9),
}


@pytest.mark.parametrize("content", _DAMAGED.values(), ids=_DAMAGED.keys())
def test_damaged(content: bytes, buffered, tmp_path: Path) -> None:
    """Each kind of damage is a mismatch that names the file in one line."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DataMismatchError, match=r"model\.safetensors") as caught:
        ours.load("model.safetensors", tmp_path, buffered)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":' + _ENTRY + b"}",  # without damage: so the damage above is what is found
        b'{"__metadata__":{"a":"}"},"a":' + _ENTRY + b"}",
        b'{"__metadata__":{"dtype":"F16","shape":"x"},"a":' + _ENTRY + b"}",
        b'{"__metadata__": {}, "a": ' + _ENTRY + b"}",
        b'{"a":' + _ENTRY + b',"__metadata__":{"a":"b"}}  ',
        b'{"a":' + _ENTRY[:-1] + b',"more":[1.5]}}',
    ],
)
def test_unusual_headers(header: bytes, buffered, tmp_path: Path) -> None:
    """Metadata anywhere and of any text, and keys that are not known, are no damage."""
    (tmp_path / "file").write_bytes(_file(header))
    tensors, _ = ours.load("file", tmp_path, buffered)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"a": [0.0, 0.0]}


_SOUND = safetensors.torch.save({"a": torch.arange(5.0), "b": torch.arange(3)}, {"format": "pt"})


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, len(_SOUND) - 1), value=st.integers(0, 255))
def test_any_byte_changed(position: int, value: int, buffered, tmp_path: Path) -> None:
    """Whatever byte is changed, the file loads or is a mismatch."""
    damaged = bytearray(_SOUND)
    damaged[position] = value
    (tmp_path / "file").write_bytes(damaged)
    try:
        ours.load("file", tmp_path, buffered)
    except DataMismatchError as error:
        assert "file" in str(error)  # noqa: PT017 -- loading is right too


_LENGTHS = st.sampled_from(
    [0, 1, 2, 3, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, -1, None, 1.0]
)
_NAMES = st.text(st.characters(categories=["L", "Cs", "Cc"]), max_size=3) | st.just("__metadata__")
_ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "F4", "C64", "BOOL"]),
        "shape": st.lists(_LENGTHS, max_size=4),
        "data_offsets": st.sampled_from([[0, 0], [0, 4], [0, 8]]),
    }
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(_NAMES, _ENTRIES | st.dictionaries(_NAMES, _NAMES), max_size=2))
def test_any_header(header: dict[str, Any], buffered, tmp_path: Path) -> None:
    """What loads, the library loads too, to the same names and shapes; all else is a mismatch."""
    ends = [entry["data_offsets"][1] for entry in header.values() if "data_offsets" in entry]
    (tmp_path / "file").write_bytes(_file(header, max(ends, default=0)))
    try:
        tensors, _ = ours.load("file", tmp_path, buffered)
    except DataMismatchError:
        return
    stock = safetensors.torch.load_file(tmp_path / "file")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tensor.shape for name, tensor in stock.items()
    }


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(0, len(_SOUND) - 1))
def test_cut_anywhere(size: int, buffered, tmp_path: Path) -> None:
    """Cut off anywhere, the file is a mismatch."""
    (tmp_path / "file").write_bytes(_SOUND[:size])
    with pytest.raises(DataMismatchError):
        ours.load("file", tmp_path, buffered)


def test_missing(buffered, tmp_path: Path) -> None:
    """A file that is not there, or is a directory, is a failed transfer that names it."""
    for path in ("none", "."):
        with pytest.raises(TransferError, match="opening") as caught:
            ours.load(path, tmp_path, buffered)
        assert caught.value.filename is not None
