"""The writer gds with a fake cuFile on a fake device, and real files."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.check_groups import check_groups
from support.fake_cufile import FakeCuFile
from support.fake_device import FakeDevice, on_device
from support.forked import in_child

from iobench import linux
from iobench.environment import gpu
from iobench.errors import TransferError, UnavailableError
from iobench.testing import Check, content
from iobench.testing.suite import run_checks
from iobench.writers import gds
from iobench.writers.gds import GdsWriter
from iobench.writers.image import FileImage, WatchedImage
from iobench.writers.odirect import ODirectWriter
from iobench.writers.transfer import Fallback


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def played(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeCuFile:
    """A machine with a GPU and cuFile."""
    fake = FakeCuFile(device)
    fake.use(monkeypatch)
    return fake


def _require_direct(directory: Path) -> None:
    """Skip where direct I/O is refused; where it works, the fake cuFile must work too."""
    if not (answer := ODirectWriter().available(directory)).ok:
        pytest.skip(f"{answer.reason} {answer.remedy}")
    answer = GdsWriter().available(directory)
    assert answer.ok, answer


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True], ids=["device", "mixed"])
@pytest.mark.parametrize("checks", check_groups().values(), ids=check_groups())
def test_conforms(
    checks: tuple[Check, ...], mixed: bool, played: FakeCuFile, device: FakeDevice, tmp_path: Path
) -> None:
    """Each claim of the suite holds, short operations continued; nothing stays registered."""
    _require_direct(tmp_path)
    played.most = 3 * linux.PAGE
    make = functools.partial(
        on_device(GdsWriter, device, mixed=mixed), block_size="64KiB", threads=3
    )

    def expect_none_left() -> None:
        assert not device.pending
        assert not played.files
        gc.collect()
        assert not played.buffers

    run_checks(checks, make, lambda _: tmp_path, expect_none_left)


def _saved(tmp_path: Path, *memories: object, **options: object):
    _require_direct(tmp_path)
    writer = GdsWriter(block_size="64KiB", **options)
    return writer, writer.write(FileImage.of("f", memories), tmp_path)


def test_the_paths_taken(played: FakeCuFile, tmp_path: Path) -> None:
    """Blocks with device memory take the gds path, others the path of odirect."""
    device, data = played.device, content(300_000)
    head, tail = content(1000, 1), content(200_000, 2)
    writer, moved = _saved(tmp_path, head, device.upload(data), tail)
    assert set(moved.paths) == {"gds", "direct"}
    assert moved.paths["gds"].bytes == 5 * 65536
    assert moved.fallbacks == ()
    whole = np.concatenate([head, data, tail])
    assert (tmp_path / "f").read_bytes() == whole.tobytes()
    room = device.allocate(len(data))
    back = FileImage.of("f", [np.empty_like(head), room, np.empty_like(tail)])
    moved = writer.read(back, tmp_path)
    assert set(moved.paths) == {"gds", "direct"}
    assert device.download(room).tobytes() == data.tobytes()
    assert back.segments[2].memory.tobytes() == tail.tobytes()


def test_what_is_filled_is_noted(played: FakeCuFile, tmp_path: Path) -> None:
    """A restore checks each part of a file as soon as it is complete."""
    size, filled = 300_000, list[tuple[int, int]]()
    writer, _ = _saved(tmp_path, played.device.upload(content(size)), threads=1)
    back = FileImage.of("f", [played.device.allocate(size)])
    writer.read_ranges(
        WatchedImage(back, lambda *part: filled.append(part)), tmp_path, [(0, 1000), (70_000, size)]
    )
    assert filled[:2] == [(0, 1000), (70_000, 135_168)]
    assert filled[-1][1] == size


def test_host_memory_is_a_fallback(played: FakeCuFile, tmp_path: Path) -> None:
    """An image without device memory takes the path of odirect, and the Transfer records it;
    streams too."""
    writer, moved = _saved(tmp_path, content(300_000))
    before = played.operations
    writer.write(FileImage.of("f", [content(300_000)]), tmp_path)
    assert set(moved.paths) == {"direct"}
    assert [(f.wanted, f.used) for f in moved.fallbacks] == [("gds", "direct")]
    with writer.open(tmp_path / "s") as stream:
        stream.write(b"x" * 100_000)
    assert [(f.wanted, f.used) for f in stream.transfer.fallbacks] == [("gds", "direct")]
    assert played.operations == before


def test_buffers_are_registered_once(played: FakeCuFile, tmp_path: Path) -> None:
    """Blocks on the GPU are reused by the next transfer, and released with the writer."""
    device = played.device
    writer, _ = _saved(tmp_path, device.upload(content(600_000)), threads=3)
    held = dict(played.buffers)
    assert 1 <= len(held) <= 3
    for _ in range(3):
        writer.write(FileImage.of("f", [device.upload(content(600_000))]), tmp_path)
    assert len(played.buffers) <= 3
    assert held.items() <= played.buffers.items()
    del writer
    gc.collect()
    assert not played.buffers


def test_compatibility_mode_is_a_fallback(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """cuFile's settings become a fallback of each Transfer, and part of `available`."""
    monkeypatch.setenv("CUFILE_FORCE_COMPAT_MODE", "true")
    FakeCuFile(device).use(monkeypatch)
    _, moved = _saved(tmp_path, device.upload(content(100_000)))
    (reported,) = moved.fallbacks
    assert (reported.wanted, reported.used) == ("gds", "cuFile compatibility mode")
    assert "force_compat_mode" in reported.reason
    answer = GdsWriter().available(tmp_path)
    assert answer.ok
    assert "force_compat_mode" in answer.reason


def test_available_tries_cufile_on_the_target(
    played: FakeCuFile, device: FakeDevice, tmp_path: Path
) -> None:
    """A file system that cuFile refuses is reported before the first save."""
    _require_direct(tmp_path)
    assert played.operations
    assert not played.files
    assert GdsWriter().available(tmp_path).reason == ""
    played.refuse["cuFileHandleRegister"] = 5008
    answer = GdsWriter().available(tmp_path)
    assert answer.ok
    assert "direct is used in its place" in answer.reason
    assert "IO_NOT_SUPPORTED (5008)" in answer.reason
    del played.refuse["cuFileHandleRegister"]
    played.answer["cuFileWrite"] = [-5010]
    answer = GdsWriter().available(tmp_path)
    assert not answer.ok
    assert "NVFS_DRIVER_ERROR (5010)" in answer.reason
    assert not list(tmp_path.iterdir())


def test_a_file_that_cufile_refuses(played: FakeCuFile, tmp_path: Path) -> None:
    """It is written like by odirect, and the fallback has cuFile's name of the error."""
    played.refuse["cuFileHandleRegister"] = 5008
    data = content(100_000)
    _, moved = _saved(tmp_path, played.device.upload(data))
    assert set(moved.paths) == {"direct"}
    assert moved.fallbacks[0].used == "direct"
    assert "IO_NOT_SUPPORTED (5008)" in moved.fallbacks[0].reason
    assert (tmp_path / "f").read_bytes() == data.tobytes()


def test_memory_that_cannot_be_registered(played: FakeCuFile, tmp_path: Path) -> None:
    """cuFile then uses its own buffers, and a fallback records it. Short operations continue."""
    played.most = linux.PAGE
    played.refuse["cuFileBufRegister"] = 5036
    data = content(100_000)
    _, moved = _saved(tmp_path, played.device.upload(data))
    assert (tmp_path / "f").read_bytes() == data.tobytes()
    assert moved.fallbacks == (
        Fallback(
            wanted="registered GPU memory",
            used="cuFile's own buffers",
            reason="cuFile, registering a buffer: GPU_MEMORY_PINNING_FAILED (5036)",
        ),
    )


@pytest.mark.parametrize(
    ("answer", "message", "number"),
    [
        (-5022, r"INVALID_VALUE \(5022\)", None),
        (-5999, r"CUfileOpError \(5999\)", None),
        (-1, "No space left on device", 28),
        (-28, "No space left on device", 28),
        (0, "took 0 bytes", 5),
        (100, "took 100 bytes", 5),
    ],
)
def test_errors_of_a_write(
    answer: int, message: str, number: int | None, played: FakeCuFile, tmp_path: Path
) -> None:
    """cuFile's errors have their name, the kernel's their errno; no file is published."""
    _require_direct(tmp_path)
    writer, device, played.errno = GdsWriter(block_size="64KiB", threads=2), played.device, 28
    image = FileImage.of("f", [device.upload(content(400_000))])
    played.answer["cuFileWrite"] = [answer]
    with pytest.raises(TransferError, match=message) as caught:
        writer.write(image, tmp_path)
    assert caught.value.errno == number
    assert not list(tmp_path.iterdir())
    assert not played.files
    assert not device.pending


def test_a_short_file(played: FakeCuFile, tmp_path: Path) -> None:
    """A read of 0 bytes means that the file has ended."""
    _require_direct(tmp_path)
    writer, device = GdsWriter(block_size="64KiB"), played.device
    writer.write(FileImage.of("f", [device.upload(content(400_000))]), tmp_path)
    played.answer["cuFileRead"] = [0]
    with pytest.raises(Exception, match="ended at"):
        writer.read(FileImage.of("f", [device.allocate(400_000)]), tmp_path)


def test_no_driver(device: FakeDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reason is cuFile's refusal to open; a save does not try another path."""
    fake = FakeCuFile(device)
    fake.refuse["cuFileDriverOpen"] = 5010
    fake.use(monkeypatch)
    answer = GdsWriter().available(tmp_path)
    assert not answer.ok
    assert "NVFS_DRIVER_ERROR (5010)" in answer.reason
    assert "modprobe nvidia-fs" in answer.remedy
    with pytest.raises(UnavailableError, match="NVFS_DRIVER_ERROR"):
        GdsWriter().write(FileImage.of("f", [device.upload(content(10))]), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_forked_child(played: FakeCuFile, device: FakeDevice, tmp_path: Path) -> None:
    """It may not use the parent's cuFile, neither for a save nor to release memory."""
    writers = [_saved(tmp_path, device.upload(content(100_000)))[0]]
    held = dict(played.buffers)

    def use() -> None:
        with pytest.raises(UnavailableError, match="forked"):
            writers[0].write(FileImage.of("g", [device.upload(content(10))]), tmp_path)
        writers.clear()
        gc.collect()
        assert played.buffers == held

    in_child(use)
    assert not (tmp_path / "g").exists()


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Driver, GPU and library: each is named with its remedy, and cuFile is not started."""
    monkeypatch.setattr(gpu, "_DRIVER", tmp_path)
    answer = GdsWriter().available(tmp_path)
    assert not answer.ok
    assert "no NVIDIA driver" in answer.reason
    assert "odirect" in answer.remedy
    (tmp_path / "version").write_text("NVRM version: ...")
    with pytest.raises(UnavailableError, match="sees no CUDA device"):
        gds.open_cufile()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gds, "find_cufile", lambda: None)
    answer = GdsWriter().available(tmp_path)
    assert "libcufile was not found" in answer.reason
    assert "nvidia-cufile" in answer.remedy


def test_a_library_without_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version, or another library: it is unavailable, with the name of the function."""
    monkeypatch.setattr(gds, "cufile_missing", lambda: None)
    monkeypatch.setattr(gds.ctypes, "CDLL", lambda _path, **_how: object())
    gds.open_cufile.cache_clear()
    with pytest.raises(UnavailableError, match=r"cannot be used .*cuFileDriverOpen"):
        gds.open_cufile()


_REAL = """
import os, sys
from iobench.errors import TransferError
from iobench.writers import gds

real = gds.CuFile.__new__(gds.CuFile)  # without the driver
real._library, real._pid = gds.load_cufile(sys.argv[1]), os.getpid()
for writes in (True, False):
    try:
        real.move(0, 0, 4096, 0, 0, writes=writes)
    except OSError as error:
        print(error.errno)
answer = real._library.cuFileBufDeregister(4096)
print(answer.err > 5000, answer.cu_err)
fd = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT | os.O_DIRECT)
try:
    with real.file(fd):
        pass
except TransferError as error:
    print("registering the file" in str(error))
"""


def test_the_real_library(tmp_path: Path) -> None:
    """Its functions have the expected parameters and results. That needs no GPU."""
    library = gpu.find_cufile()
    if library is None:
        pytest.skip("needs libcufile (pip install nvidia-cufile-cu12)")
    if gpu.has_driver():
        pytest.skip("an NVIDIA driver is loaded: tests/integration/test_gpu.py uses the library")
    done = subprocess.run(
        [sys.executable, "-c", _REAL, library, str(tmp_path / "f")],
        cwd=tmp_path,  # cuFile makes a log there
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line in ("22", "True 0", "True")]
    assert said == ["22", "22", "True 0", "True"]
