"""The writer gds with a fake cuFile on a fake device, and real files."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import inspect
from pathlib import Path

import numpy as np
import pytest
from support.check_groups import check_groups, run_checks
from support.fake_cufile import Fails, FakeCuFile
from support.fake_device import FakeDevice, on_device

from iobench import linux
from iobench.errors import TransferError, UnavailableError
from iobench.testing import Check, content
from iobench.writers import gds
from iobench.writers.device import cufile
from iobench.writers.device.cufile import CuFile, compatibility_reason
from iobench.writers.gds import GdsWriter
from iobench.writers.image import FileImage
from iobench.writers.transfer import Fallback


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> FakeCuFile:
    """A machine with a GPU and cuFile."""
    fake = FakeCuFile()
    _use(fake, monkeypatch)
    return fake


def _use(fake: FakeCuFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds, "cufile_missing", lambda: None)
    monkeypatch.setattr(gds, "open_cufile", functools.cache(lambda: CuFile(fake)))


def _require_direct(directory: Path) -> None:
    answer = GdsWriter().available(directory)
    if not answer.ok:
        pytest.skip(f"{answer.reason} {answer.remedy}")


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True], ids=["device", "mixed"])
@pytest.mark.parametrize("checks", check_groups().values(), ids=check_groups())
def test_conforms(
    checks: tuple[Check, ...], mixed: bool, played: FakeCuFile, tmp_path: Path
) -> None:
    """Each claim of the suite holds, short operations continued; nothing stays registered."""
    _require_direct(tmp_path)
    played.most = 3 * linux.PAGE
    device = FakeDevice()
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
    device, data = FakeDevice(), content(300_000)
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


def test_host_memory_is_a_fallback(played: FakeCuFile, tmp_path: Path) -> None:
    """An image without device memory takes the path of odirect, and the Transfer records it;
    streams too."""
    writer, moved = _saved(tmp_path, content(300_000))
    assert set(moved.paths) == {"direct"}
    assert [(f.wanted, f.used) for f in moved.fallbacks] == [("gds", "direct")]
    with writer.open(tmp_path / "s") as stream:
        stream.write(b"x" * 100_000)
    assert [(f.wanted, f.used) for f in stream.transfer.fallbacks] == [("gds", "direct")]
    assert not played.operations


def test_buffers_are_registered_once(played: FakeCuFile, tmp_path: Path) -> None:
    """Blocks on the GPU are reused by the next transfer, and released with the writer."""
    device = FakeDevice()
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


@pytest.mark.parametrize(
    ("nvfs", "p2pdma", "forced", "reason"),
    [
        ((2, 22), False, False, ""),
        ((0, 0), True, False, ""),
        ((0, 0), False, False, "nvidia-fs is not loaded"),
        ((2, 22), False, True, "configured for it"),
    ],
)
def test_compatibility_mode_is_a_fallback(
    nvfs: tuple[int, int],
    p2pdma: bool,
    forced: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """cuFile's own report becomes a fallback of each Transfer, and part of `available`."""
    fake = FakeCuFile(nvfs=nvfs, p2pdma=p2pdma, forced=forced)
    _use(fake, monkeypatch)
    _, moved = _saved(tmp_path, FakeDevice().upload(content(100_000)))
    reported = [f for f in moved.fallbacks if f.used == "cuFile compatibility mode"]
    assert len(reported) == bool(reason)
    assert (reason in reported[0].reason) if reason else not moved.fallbacks
    answer = GdsWriter().available(tmp_path)
    assert answer.ok
    assert reason in answer.reason
    assert compatibility_reason(nvfs_version=nvfs, p2pdma=p2pdma, forced=forced) == (
        reported[0].reason if reported else ""
    )


def test_a_file_that_goes_through_the_host_is_a_fallback(monkeypatch, tmp_path: Path) -> None:
    """nvidia-fs is loaded, but cuFile's statistics show that this file went through the host."""
    _use(FakeCuFile(posix=True), monkeypatch)
    _, moved = _saved(tmp_path, FakeDevice().upload(content(100_000)))
    assert [(f.wanted, f.used) for f in moved.fallbacks] == [("gds", "cuFile compatibility mode")]
    assert "2 operations" in moved.fallbacks[0].reason


def test_a_file_that_cufile_refuses(played: FakeCuFile, tmp_path: Path) -> None:
    """It is written like by odirect, and the fallback has cuFile's name of the error."""
    played.refuse["handle_register"] = 5008
    data = content(100_000)
    _, moved = _saved(tmp_path, FakeDevice().upload(data))
    assert set(moved.paths) == {"direct"}
    assert moved.fallbacks[0].used == "direct"
    assert "IO_NOT_SUPPORTED (5008)" in moved.fallbacks[0].reason
    assert (tmp_path / "f").read_bytes() == data.tobytes()


def test_memory_that_cannot_be_registered(played: FakeCuFile, tmp_path: Path) -> None:
    """cuFile then uses its own buffers, and a fallback records it."""
    played.refuse["buf_register"] = 5036
    data = content(100_000)
    _, moved = _saved(tmp_path, FakeDevice().upload(data))
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
        (Fails(5022), r"INVALID_VALUE \(5022\)", None),
        (-5024, "MEMORY_NOT_REGISTERED", None),
        (-4321, "error -4321", None),
        (Fails(28), "No space left on device", 28),
        (0, "took 0 bytes", 5),
        (100, "took 100 bytes", 5),
    ],
)
def test_errors_of_a_write(
    answer: int | Fails, message: str, number: int | None, played: FakeCuFile, tmp_path: Path
) -> None:
    """cuFile's errors have their name, the kernel's their errno; no file is published."""
    _require_direct(tmp_path)
    writer, device = GdsWriter(block_size="64KiB", threads=2), FakeDevice()
    image = FileImage.of("f", [device.upload(content(400_000))])
    played.answer["write"] = [answer]
    with pytest.raises(TransferError, match=message) as caught:
        writer.write(image, tmp_path)
    assert caught.value.errno == number
    assert not list(tmp_path.iterdir())
    assert not played.files
    assert not device.pending


def test_a_short_file(played: FakeCuFile, tmp_path: Path) -> None:
    """A read of 0 bytes means that the file has ended."""
    _require_direct(tmp_path)
    writer, device = GdsWriter(block_size="64KiB"), FakeDevice()
    writer.write(FileImage.of("f", [device.upload(content(400_000))]), tmp_path)
    played.answer["read"] = [0]
    with pytest.raises(Exception, match="ended at"):
        writer.read(FileImage.of("f", [device.allocate(400_000)]), tmp_path)


def test_no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reason is cuFile's refusal to open; a save does not try another path."""
    fake = FakeCuFile()
    fake.refuse["driver_open"] = 5010
    _use(fake, monkeypatch)
    answer = GdsWriter().available(tmp_path)
    assert not answer.ok
    assert "NVFS_DRIVER_ERROR (5010)" in answer.reason
    assert "modprobe nvidia-fs" in answer.remedy
    with pytest.raises(UnavailableError, match="NVFS_DRIVER_ERROR"):
        GdsWriter().write(FileImage.of("f", [FakeDevice().upload(content(10))]), tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Driver and package: each is named with its remedy, and cuFile is not started."""
    monkeypatch.setattr(cufile, "_DRIVER", tmp_path / "version")
    answer = GdsWriter().available(tmp_path)
    assert not answer.ok
    assert "no NVIDIA driver" in answer.reason
    assert "odirect" in answer.remedy
    (tmp_path / "version").write_text("NVRM version: ...")
    monkeypatch.setattr(cufile.importlib, "import_module", _no_module)
    answer = GdsWriter().available(tmp_path)
    assert "cuda-bindings is not installed" in answer.reason
    assert "iobench[gds]" in answer.remedy
    with pytest.raises(UnavailableError, match="cuda-bindings"):
        cufile.open_cufile()


def _no_module(name: str) -> None:
    raise ModuleNotFoundError(f"No module named {name!r}")


@pytest.fixture
def real():
    """cuda.bindings.cufile, which can be imported without a GPU and without libcufile."""
    try:
        return importlib.import_module("cuda.bindings.cufile")
    except ImportError as error:
        pytest.skip(f"needs the extra gds ({error})")


class TestRealBindings:
    """The fake module has the names and parameters of cuda.bindings.cufile. It needs no GPU."""

    def test_signatures(self, real) -> None:
        """Each fake function accepts the parameters of the real one."""
        functions = [n for n, _ in inspect.getmembers(FakeCuFile, inspect.isfunction)]
        played = FakeCuFile()
        for name in (n for n in functions if not n.startswith("_")):
            ours = list(inspect.signature(getattr(played, name)).parameters)
            assert ours == list(inspect.signature(getattr(real, name)).parameters), name

    def test_numbers(self, real) -> None:
        """Enumerations have the same numbers; errors have the same form, and no errno."""
        for name in ("OpError", "FileHandleType", "BoolConfigParameter"):
            for member in getattr(FakeCuFile, name):
                assert int(getattr(getattr(real, name), member.name)) == member, member
        for module in (real, FakeCuFile):
            assert "NVFS_DRIVER_ERROR (5010)" in str(module.cuFileError(5010))
            with pytest.raises(ValueError, match="28 is not a valid"):
                module.cuFileError(28)

    def test_the_descriptor(self, real) -> None:
        """cuFile reads the fields of a Descr where the bindings write them."""
        for module in (real, FakeCuFile):
            descriptor = module.Descr()
            descriptor.type = module.FileHandleType.OPAQUE_FD
            descriptor.handle.fd = 7
            descriptor.fs_ops = 0
            raw = (ctypes.c_int * 6).from_address(descriptor.ptr)
            assert (raw[0], raw[2], raw[4], raw[5]) == (1, 7, 0, 0), module

    def test_statistics(self, real) -> None:
        """The counters of operations through the host exist."""
        stats = real.StatsLevel3()
        assert int(stats.num_gpus) == 0
        assert stats.per_gpu_stats.n_posix_reads[:0].sum() == 0
        assert len(stats.per_gpu_stats.n_posix_writes) == 16
