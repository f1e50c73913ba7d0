"""A torch file that is damaged, foreign or refused, and the error of each."""

from __future__ import annotations

import errno
import io
import pickle
import random
import sys
import zipfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from iobench.errors import DataMismatchError, TransferError
from iobench.formats import torch_file
from iobench.writers import registry
from iobench.writers.base import LocalSource

_STATE = {"a": torch.arange(100.0), "b": torch.ones(10), "c": torch.arange(7)}


def _stock() -> bytes:
    buffer = io.BytesIO()
    torch.save(_STATE, buffer)
    return buffer.getvalue()


_STOCK = _stock()


def _unchanged(_: str, data: bytes) -> bytes:
    return data


def _rezipped(
    rename: Callable[[str], str | None] = str,
    change: Callable[[str, bytes], bytes] = _unchanged,
    compression: int = zipfile.ZIP_STORED,
) -> bytes:
    """The stock file, zipped again with renamed (None leaves one out) and changed records."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(_STOCK)) as source,
        zipfile.ZipFile(buffer, "w", compression) as copy,
    ):
        for entry in source.infolist():
            name = rename(entry.filename)
            if name is not None:
                copy.writestr(name, change(name, source.read(entry)))
    return buffer.getvalue()


def _without(record: str) -> bytes:
    return _rezipped(lambda name: None if name == f"archive/{record}" else name)


def _replaced(record: str, data: bytes) -> bytes:
    return _rezipped(change=lambda name, old: data if name == f"archive/{record}" else old)


def _legacy() -> bytes:
    buffer = io.BytesIO()
    torch.save(_STATE, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


_SWAP = {"archive/data/0": "archive/data/1", "archive/data/1": "archive/data/0"}
_OTHER_ORDER = b"big" if sys.byteorder == "little" else b"little"

_DAMAGED = {
    "empty": b"",
    "text": b"no zip at all",
    "before zips": _legacy(),
    "a zip of something else": _rezipped(lambda name: name.rpartition("/")[2]),
    "compressed": _rezipped(compression=zipfile.ZIP_DEFLATED),
    "storages in another order": _rezipped(lambda name: _SWAP.get(name, name)),
    "a storage missing": _without("data/2"),
    "first storage missing": _without("data/0"),
    "a storage too many": _rezipped(lambda n: n.replace(".data/serialization_id", "data/3")),
    "a storage too short": _replaced("data/1", bytes(39)),
    "no pickle": _without("data.pkl"),
    "no version": _without("version"),
    "pickle cut off": _replaced("data.pkl", b"\x80\x02}q\x00"),
    "other byte order": _replaced("byteorder", _OTHER_ORDER),
    "TorchScript": _rezipped(lambda n: n.replace(".data/serialization_id", "constants.pkl")),
}


@pytest.mark.parametrize("content", _DAMAGED.values(), ids=_DAMAGED.keys())
def test_damaged(content: bytes, buffered, tmp_path: Path) -> None:
    """Each kind of damage is a mismatch that names the file in one line."""
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(DataMismatchError, match=r"model\.pt") as caught:
        torch_file.load("model.pt", tmp_path, buffered)
    assert "\n" not in str(caught.value)


def test_zipped_anew(buffered, tmp_path: Path) -> None:
    """The same records, zipped again, can be loaded, so the tests above detect the damage. A
    missing file is a failed transfer that names it."""
    (tmp_path / "model.pt").write_bytes(_rezipped())
    found, _ = torch_file.load("model.pt", tmp_path, buffered)
    assert all(torch.equal(found[name], tensor) for name, tensor in _STATE.items())
    with pytest.raises(TransferError, match=r"none\.pt"):
        torch_file.load("none.pt", tmp_path, buffered)


@pytest.mark.parametrize("missing", [1, 22, 100, len(_STOCK) // 2, len(_STOCK) - 1])
def test_truncated(missing: int, buffered, tmp_path: Path) -> None:
    """A file that lacks its last bytes, however many, is a mismatch."""
    (tmp_path / "model.pt").write_bytes(_STOCK[:-missing])
    with pytest.raises(DataMismatchError):
        torch_file.load("model.pt", tmp_path, buffered)


def test_bytes_changed_anywhere(buffered, tmp_path: Path) -> None:
    """With any changed bytes the file loads, is a mismatch or is refused by torch."""
    chance = random.Random(1)
    outcomes = set()
    for _ in range(100):
        damaged = bytearray(_STOCK)
        for _ in range(chance.choice((1, 2, 4))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        (tmp_path / "model.pt").write_bytes(damaged)
        try:
            torch_file.load("model.pt", tmp_path, buffered)
            outcomes.add("loaded")
        except (DataMismatchError, pickle.UnpicklingError) as error:
            outcomes.add(type(error).__name__)
    assert outcomes == {"loaded", "DataMismatchError", "UnpicklingError"}


def test_weights_only_refusal(buffered, tmp_path: Path) -> None:
    """torch's refusal of an arbitrary class is raised: it names the class and the remedy."""
    torch.save({"a": Fraction(1, 3)}, tmp_path / "model.pt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only") as caught:
        torch_file.load("model.pt", tmp_path, buffered)
    assert "Fraction" in str(caught.value)
    found, _ = torch_file.load("model.pt", tmp_path, buffered, weights_only=False)
    assert found == {"a": Fraction(1, 3)}


def test_a_read_that_fails_is_no_damage(tmp_path, monkeypatch) -> None:
    """Whichever read fails, it is a TransferError."""
    writer = registry.make("buffered")
    torch_file.save({"w": torch.ones(1000)}, "model", tmp_path, writer)
    read, calls = LocalSource.read, []
    good = sys.maxsize

    def failing(source: LocalSource, size: int = -1) -> bytes:
        calls.append(size)
        if len(calls) > good:
            raise OSError(errno.EIO, "Input/output error")
        return read(source, size)

    monkeypatch.setattr(LocalSource, "read", failing)
    torch_file.load("model", tmp_path, writer)
    count = len(calls)
    assert count > 2
    for number in range(count):
        good = number
        calls.clear()
        with pytest.raises(TransferError) as caught:
            torch_file.load("model", tmp_path, writer)
        assert caught.value.errno == errno.EIO
