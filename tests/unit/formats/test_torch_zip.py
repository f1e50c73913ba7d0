"""The directory of a torch zip, as zipfile and torch have it, of any size."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iobench.errors import DataMismatchError
from iobench.formats.torch_file import TorchIndex
from iobench.formats.torch_image import TorchLayout, torch_ending
from iobench.formats.torch_zip import Recorded, ZipDirectory
from iobench.writers.base import ImageSource, LocalSource
from iobench.writers.image import FileImage


def _saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _source(data: bytes) -> ImageSource:
    return ImageSource(FileImage.of("f", [data]))


class _Counting(ImageSource):
    """Counts the local headers that are read."""

    headers = 0

    def read_at(self, offsets: Any, size: int) -> list[bytes]:
        listed = list(offsets)
        self.headers += len(listed)
        return super().read_at(listed, size)


def _starts_of_headers(data: bytes, names: list[str]) -> list[int]:
    """Return where zipfile finds the data of each record."""
    found = []
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in names:
            at = archive.getinfo(name).header_offset
            found.append(at + 30 + sum(struct.unpack_from("<2H", data, at + 26)))
    return found


def test_like_zipfile() -> None:
    """The records are those that zipfile finds; two local headers of 1200 storages are read."""
    data = _saved([torch.full((n % 7,), n) for n in range(1400)])
    source = _Counting(FileImage.of("f", [data]))
    found = ZipDirectory.read(source)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        wanted = [(i.filename, i.file_size, i.CRC, i.header_offset) for i in archive.infolist()]
    assert [*zip(found.names, found.sizes, found.checksums, found.headers, strict=True)] == wanted
    assert not found.compressed
    numbers = [n for n, size in enumerate(found.sizes) if size and "/data/" in found.names[n]]
    starts = found.data_starts(source, numbers)
    assert source.headers == 2
    assert starts == _starts_of_headers(data, [found.names[n] for n in numbers])


def _zipped_anew(data: bytes) -> bytes:
    copy = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(copy, "w") as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
        target.comment = b"by another program"
    return copy.getvalue()


def test_another_layout() -> None:
    """Data that are not aligned: every local header is read."""
    data = _zipped_anew(_saved([torch.full((9,), n) for n in range(20)]))
    source = _Counting(FileImage.of("f", [data]))
    index = TorchIndex.read("f", source)
    names = [f"archive/data/{key}" for key in range(20)]
    assert index.starts == _starts_of_headers(data, names)
    assert source.headers >= 20


@given(shift=st.integers(1, 63))
def test_padding_that_torch_does_not_write(shift: int) -> None:
    """A longer extra field of the last record moves its data; its header has the length."""
    data = bytearray(_saved([torch.full((64,), n) for n in range(5)]))
    index = TorchIndex.read("f", _source(bytes(data)))
    at = index.directory.headers[index.directory.names.index("archive/data/4")]
    (extra,) = struct.unpack_from("<H", data, at + 28)
    struct.pack_into("<H", data, at + 28, extra + shift)
    assert TorchIndex.read("f", _source(bytes(data))).starts[4] == index.starts[4] + shift


_LARGE = [9, 5 << 30, 7, 0, 6 << 30, 64]


def _layout(folder: str, sizes: list[int], *, crc: bool = True) -> TorchLayout:
    host = torch.device("cpu")
    storages: Any = [SimpleNamespace(device=host, nbytes=lambda n=n: n) for n in sizes]
    records = [Recorded("data.pkl", b"abc")]
    return TorchLayout.of("f", folder, records, storages, alignment=64, crc=crc)


def test_sizes_and_offsets_of_64_bits(tmp_path: Path) -> None:
    """A file of 11 GiB, of which only the text takes room; zipfile agrees."""
    layout = _layout("folder", _LARGE)
    with open(tmp_path / "f", "wb") as file:
        for start, text in layout._texts():
            file.seek(start)
            file.write(text)
        assert file.tell() == layout.size_bytes
    source = LocalSource(tmp_path / "f")
    # torch's records of a state besides these have no influence on where the storages are.
    found = ZipDirectory.read(source)
    numbers = [found.names.index(f"folder/data/{key}") for key, n in enumerate(_LARGE) if n]
    assert found.data_starts(source, numbers) == [*layout.sizes]
    assert [found.sizes[n] for n in numbers] == [*layout.sizes.values()]
    with zipfile.ZipFile(tmp_path / "f") as archive:
        assert archive.namelist() == found.names
        assert archive.read("folder/version") == torch_ending(("data.pkl",), 0)[0].data
    source.close()


class _SparseText(io.BytesIO):
    """A file that keeps what torch's zip writer writes, and leaves out what it skips."""

    skipped = 0

    def tell(self) -> int:
        return super().tell() + self.skipped

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.skipped += offset if whence == io.SEEK_CUR else offset - self.tell()
        return self.tell()


@pytest.mark.parametrize("sizes", [_LARGE, [0] * 66_000], ids=["large", "many"])
def test_what_exceeds_32_and_16_bits(sizes: list[int]) -> None:
    """Sizes, offsets and counts are in the file like those of torch. No data are written."""
    sink: Any = _SparseText()
    stock: Any = torch._C.PyTorchFileWriter(sink, False, 64)
    stock.write_record("data.pkl", b"abc", 3)
    for key, size in enumerate(sizes):
        stock.write_record_metadata(f"data/{key}", size)
    stock.write_end_of_file()
    layout = _layout("archive", sizes, crc=False)
    assert (bytes(layout.text), layout.size_bytes) == (sink.getvalue(), sink.tell())


@pytest.mark.parametrize("field", [32, 40, 48], ids=["count", "length", "offset"])
def test_a_directory_elsewhere(field: int) -> None:
    """The end of the directory is damaged."""
    data = bytearray(_saved(torch.ones(3)))
    data[data.rindex(b"PK\x06\x06") + field] ^= 1
    with pytest.raises(DataMismatchError, match="not a torch zip file"):
        TorchIndex.read("f", _source(bytes(data)))
