"""Files that are saved, restored and verified, for each tensor of each format."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest

from iobench.bench.data import digests
from iobench.bench.data.pool import RandomPool
from iobench.bench.data.replay import Replay
from iobench.errors import DataMismatchError
from iobench.formats import many_parts, safetensors, torch_file
from iobench.formats.tensors import allocate
from iobench.units import KIB, MIB
from iobench.workloads import FileSpec, TensorSpec, Workload
from iobench.writers.buffered import BufferedWriter
from iobench.writers.image import FileImage, Ranges
from iobench.writers.registry import make
from iobench.writers.transfer import Meter, Transfer

FORMATS = ("safetensors", "torch", "raw", "dcp")
SMALL_POOL = 64 * KIB
SIZES = (300, 5, 0, 16_000, 30_000, 1, 100_000, 0, 16_000, 9_000)
"""Elements of float32: five laps of the small pool, one tensor longer than it, two of no bytes."""
NON_EMPTY = [index for index, elements in enumerate(SIZES) if elements]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of these small files come from several threads too."""
    monkeypatch.setattr(digests, "_PART", 40_000)


def spec(file_format: str, sizes: Iterable[int] = SIZES) -> FileSpec:
    """One file of `sizes` elements each; a DCP file has headers between them."""
    tensors = tuple(
        TensorSpec(name=f"state/{index}/t", dtype="float32", shape=(elements,))
        for index, elements in enumerate(sizes)
    )
    size = sum(tensor.size_bytes for tensor in tensors) + (1234 if file_format == "dcp" else 0)
    return FileSpec(
        path=f"global/file.{file_format}",
        format=file_format,
        tensors=tensors,
        size_bytes=size,
        exact=file_format in ("raw", "dcp"),
    )


def replay(file_format: str, pool_bytes: int = MIB, seed: int = 1) -> Replay:
    return Replay([spec(file_format)], pool_bytes=pool_bytes, seed=seed)


def saved(made: Replay, directory: Path) -> Transfer:
    made.prepare()
    transfer = made.save(make("buffered"), directory)
    made.scrub()
    return transfer


def mismatches(made: Replay, directory: Path, writer: BufferedWriter | None = None) -> int:
    """Return the tensors that a restore by `writer` gets wrong."""
    writer = writer or BufferedWriter()
    made.scrub()
    made.restore(writer, directory)
    found = made.verify(writer, directory)
    assert found.tensors == len(made.files[0].tensors)
    assert found.bytes == made.files[0].payload_bytes
    return found.mismatches


def places(made: Replay, directory: Path) -> dict[str, tuple[int, int]]:
    """Return name -> [begin, end) in the file, found by the readers of the formats."""
    file = made.files[0]
    if file.format == "safetensors":
        _, image = safetensors.prepare(file.path, directory, allocate=allocate)
        found = image.segments[1:]
    elif file.format == "torch":
        _, image = torch_file.prepare(file.path, directory, allocate=allocate)
        found = image.segments[1::2]
    else:
        found = FileImage.of("x", [bytes(t.size_bytes) for t in file.tensors]).segments
    present = [tensor.name for tensor in file.tensors if tensor.size_bytes]
    return {
        name: (segment.offset, segment.offset + segment.length)
        for name, segment in zip(present, found, strict=True)
    }


def flip(path: Path, offset: int) -> None:
    """Invert one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("pool_bytes", [MIB, SMALL_POOL])
@pytest.mark.parametrize("file_format", FORMATS)
def test_one_byte_flipped_is_found(tmp_path: Path, file_format: str, pool_bytes: int) -> None:
    """A single wrong byte is found in every tensor, in any lap of the pool."""
    made = replay(file_format, pool_bytes)
    saved(made, tmp_path)
    path = tmp_path / made.files[0].path
    for name, (begin, end) in places(made, tmp_path).items():
        for offset in {begin, (begin + end) // 2, end - 1}:
            flip(path, offset)
            assert mismatches(made, tmp_path) == 1, f"byte {offset} of {name}"
            flip(path, offset)
    assert mismatches(made, tmp_path) == 0


def test_a_byte_in_every_part_of_a_tensor_longer_than_the_pool(tmp_path: Path) -> None:
    """It is read back in parts, and each part is compared."""
    made = replay("raw", SMALL_POOL)
    saved(made, tmp_path)
    begin, end = places(made, tmp_path)["state/6/t"]
    for offset in range(begin, end, SMALL_POOL // 2):
        flip(tmp_path / made.files[0].path, offset)
        assert mismatches(made, tmp_path) == 1
        flip(tmp_path / made.files[0].path, offset)


class _NoReads(BufferedWriter):
    """Reports reads, and reads nothing."""

    def read_ranges(self, image: FileImage, target: str | Path, ranges: Ranges) -> Transfer:
        size = sum(stop - start for start, stop in ranges)
        return Meter().transfer(self.name, "read", size, durable=True)


class _WholeReadsOnly(BufferedWriter):
    """Reads whole files; of a range it reads nothing."""

    def read_ranges(self, image: FileImage, target: str | Path, ranges: Ranges) -> Transfer:
        if list(ranges) != [(0, image.size_bytes)]:
            return Meter().transfer(self.name, "read", 0, durable=True)
        return super().read_ranges(image, target, ranges)


@pytest.mark.parametrize("pool_bytes", [MIB, SMALL_POOL])
@pytest.mark.parametrize("file_format", FORMATS)
def test_a_restore_that_does_nothing(tmp_path: Path, file_format: str, pool_bytes: int) -> None:
    """The saved bytes do not stay in memory, so a missing read is found."""
    made = replay(file_format, pool_bytes)
    saved(made, tmp_path)
    wrong = mismatches(made, tmp_path, _NoReads())
    assert wrong == len(NON_EMPTY) + (file_format == "dcp")


def test_bytes_that_a_restore_may_have_spoilt_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verified bytes are as random as before, and need only a new key. Others may be zeros."""
    refills, refill = [], RandomPool.refill
    monkeypatch.setattr(RandomPool, "refill", lambda pool: refills.append(refill(pool)))
    made = replay("raw")
    saved(made, tmp_path)
    saved(made, tmp_path)
    assert mismatches(made, tmp_path) == 0
    saved(made, tmp_path)
    assert len(refills) == 1
    assert mismatches(made, tmp_path, _NoReads()) > 0
    saved(made, tmp_path)
    assert len(refills) == 2
    made.restore(BufferedWriter(), tmp_path)
    saved(made, tmp_path)
    assert len(refills) == 3


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_second_read_that_does_nothing(tmp_path: Path, file_format: str) -> None:
    """Memory that a later tensor shares with an earlier one proves nothing."""
    made = replay(file_format, SMALL_POOL)
    saved(made, tmp_path)
    last_lap = 2  # tensors of the last lap: those that the pool still holds together
    assert mismatches(made, tmp_path, _WholeReadsOnly()) >= len(NON_EMPTY) - last_lap


@pytest.mark.parametrize("file_format", FORMATS)
def test_two_checkpoints_differ(tmp_path: Path, file_format: str) -> None:
    """Each checkpoint has new bytes in every tensor."""
    made = replay(file_format)
    for name in ("one", "two"):
        saved(made, tmp_path / name)
    one, two = ((tmp_path / name / made.files[0].path).read_bytes() for name in ("one", "two"))
    assert len(one) == len(two)
    for begin, end in places(made, tmp_path / "one").values():
        assert one[begin:end] != two[begin:end]


def test_size_bytes_is_what_is_written(tmp_path: Path, tiny: Workload) -> None:
    """The computed size, the transfers' sum and the size on disk are equal."""
    made = Replay(tiny.files(), pool_bytes=MIB, seed=1)
    expected = made.size_bytes()
    moved = saved(made, tmp_path)
    assert (moved.bytes, moved.files) == (expected, len(made.files))
    on_disk = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert len(on_disk) == len(made.files)
    assert sum(on_disk) == expected


def test_sizes_are_known_without_reading_a_tensor(
    monkeypatch: pytest.MonkeyPatch, tiny: Workload
) -> None:
    """Neither CRC32s nor a dry write: a full-size checkpoint would take minutes."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a tensor is read")

    made = Replay(tiny.files(), pool_bytes=MIB, seed=1)
    monkeypatch.setattr(FileImage, "pieces", refuse)
    monkeypatch.setattr(many_parts.isal_zlib, "crc32", refuse)
    assert made.size_bytes() > tiny.size_bytes() / 2
    assert {spec.format for spec in made.files} >= {"torch", "safetensors", "raw"}


@pytest.mark.parametrize("file_format", FORMATS)
def test_nothing_but_empty_tensors(tmp_path: Path, file_format: str) -> None:
    """A rank with only empty parts writes files that can be restored, like the last ranks of a
    mesh."""
    empty = spec(file_format, sizes=(0, 0))
    made = Replay([empty], pool_bytes=MIB, seed=1)
    saved(made, tmp_path)
    assert mismatches(made, tmp_path) == (0)


def test_another_file_in_its_place(tmp_path: Path) -> None:
    """A file of other tensors is refused, whatever its bytes."""
    made = replay("safetensors")
    saved(made, tmp_path)
    other = Replay([spec("safetensors", (7, 8))], pool_bytes=MIB, seed=1)
    with pytest.raises(DataMismatchError, match="other tensors"):
        other.restore(BufferedWriter(), tmp_path)


def test_the_pool_is_no_larger_than_needed() -> None:
    """A checkpoint smaller than the pool takes only the memory that it needs."""
    made = replay("raw", pool_bytes=1024 * MIB)
    assert made._pool.size_bytes < 2 * made.files[0].size_bytes


def test_notes_name_the_differences_from_real_files() -> None:
    """DCP as raw bytes has a note; otherwise there is none."""
    assert replay("raw").notes == ()
    (dcp,) = replay("dcp").notes
    assert "DCP" in dcp


def test_files_are_given_in_payload_order() -> None:
    """Tensors are taken in the order of their bytes in the file, so that restores match."""
    mixed = dataclasses.replace(
        spec("safetensors"),
        tensors=(
            TensorSpec(name="a", dtype="uint8", shape=(3,)),
            TensorSpec(name="b", dtype="float32", shape=(3,)),
        ),
    )
    made = Replay([mixed], pool_bytes=MIB, seed=1)
    assert [tensor.name for tensor in made.files[0].tensors] == ["b", "a"]


def test_a_directory_that_is_not_ascii(tmp_path: Path) -> None:
    """torch names the folder in the zip otherwise there; our files are the same everywhere."""
    made = replay("torch")
    directory = tmp_path / "\N{LATIN SMALL LETTER U WITH DIAERESIS}"
    assert saved(made, directory).bytes == made.size_bytes()
    assert (directory / made.files[0].path).stat().st_size == made.size_bytes()
    assert mismatches(made, directory) == 0
