"""Staging: device memory is copied through pinned blocks of the host."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_device import FakeBytes, FakeDevice

from iobench.errors import TransferError, UsageError
from iobench.testing import content
from iobench.units import MIB
from iobench.writers import registry
from iobench.writers.device import staging
from iobench.writers.device.staging import StagedImage, staged
from iobench.writers.image import AnyMemory, FileImage, HostBytes
from iobench.writers.transfer import Meter


def _mixed(device: FakeDevice, lengths: list[int]) -> tuple[FileImage, np.ndarray]:
    """Return an image of segments of these lengths, every second one on the host, and all its
    bytes."""
    pieces = [content(length, seed) for seed, length in enumerate(lengths)]
    memories = [p if n % 2 else device.upload(p) for n, p in enumerate(pieces)]
    return FileImage.of("f", memories), np.concatenate([*pieces, content(0)])


@given(st.lists(st.integers(0, 3000), max_size=8), st.data())
def test_every_range_comes_out_and_goes_in(lengths: list[int], data: st.DataObject) -> None:
    """outgoing and gather return that slice of all bytes; incoming and scatter fill only that
    slice."""
    device, meter = FakeDevice(), Meter()
    image, whole = _mixed(device, lengths)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    with staged(image, meter) as within:
        with within.outgoing(start, stop, meter) as views:
            assert b"".join(view.tobytes() for view in views) == whole[start:stop].tobytes()
        block = np.full(stop - start + 5, 0xEE, dtype=np.uint8)
        assert within.gather(start, stop, block) == stop - start
        assert block.tobytes() == whole[start:stop].tobytes() + b"\xee" * 5
        new = content(stop - start, 99)
        with within.incoming(start, stop, meter) as views:
            position = 0
            for view in views:
                view[:] = new[position : position + len(view)]
                position += len(view)
    whole[start:stop] = new
    memories = [segment.memory for segment in image.segments]
    found = [device.download(m) if isinstance(m, FakeBytes) else m for m in memories]
    assert b"".join(part.tobytes() for part in found) == whole.tobytes()
    assert not device.pending


@pytest.mark.parametrize("name", ["buffered", "uncached"])
def test_one_block_is_copied_while_another_is_stored(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by writers whose default is one worker: with device memory they have two."""
    meeting = threading.Barrier(2, timeout=60)
    gather = StagedImage.gather

    def gathered(image: StagedImage, start: int, stop: int, block: AnyMemory) -> int:
        meeting.wait()  # for the other worker
        return gather(image, start, stop, block)

    writer, device = registry.make(name, block_size="64KiB"), FakeDevice()
    monkeypatch.setattr(StagedImage, "gather", gathered)
    data = content(4 * 65536)
    writer.write(FileImage.of("f", [device.upload(data)]), tmp_path)
    assert (tmp_path / "f").read_bytes() == data.tobytes()


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_no_byte_is_copied_twice(threads: int, tmp_path: Path) -> None:
    """However many workers share the blocks."""
    writer = registry.make("buffered", block_size="64KiB", threads=threads)
    device = FakeDevice()
    writer.write(FileImage.of("f", [device.upload(content(64 * 65536))]), tmp_path)
    assert device.copies == 64


def test_pinned_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that many workers used at once are freed, but for those that are kept."""
    monkeypatch.setattr(staging, "_KEPT_BYTES", 4 * MIB)
    device = FakeDevice()
    image = FileImage.of("f", [device.upload(content(16 * MIB))])
    with staged(image, Meter()) as within, contextlib.ExitStack() as held:
        for start in range(0, 16 * MIB, 2 * MIB):
            held.enter_context(within.outgoing(start, start + 2 * MIB, Meter()))
    pool = staging._pools[device]
    assert len(pool._free) * pool.block_size == 4 * MIB
    with staged(image, Meter()) as within, within.outgoing(0, 5 * MIB, Meter()):
        assert staging._pools[device].block_size == 6 * MIB
    assert pool not in staging._pools.values()


def test_hooks_of_an_image_are_called(tmp_path: Path) -> None:
    """Those of a subclass, also when its memory is on a device."""
    seen: list[tuple[str, int, int]] = []

    class Watched(FileImage):
        def filled(self, start: int, stop: int) -> None:
            seen.append(("filled", start, stop))

        def taken(self, start: int, stop: int, host_bytes: HostBytes) -> None:
            seen.append(("taken", start, stop))
            assert b"".join(part.tobytes() for part in host_bytes(0, stop)) == data[:stop].tobytes()

    data, device = content(150_000), FakeDevice()
    writer = registry.make("buffered", block_size="64KiB")
    memory = device.upload(data)
    device.download(memory)
    writer.write(Watched.of("f", [memory]), tmp_path)
    writer.read(Watched.of("f", [device.allocate(150_000)]), tmp_path)
    ranges = [(0, 65536), (65536, 131072), (131072, 150_000)]
    assert sorted(seen) == [(name, *one) for name in ("filled", "taken") for one in ranges]


def test_blocks_are_used_again() -> None:
    """A second transfer, also after a failure, pins hardly any new memory."""
    device = FakeDevice()

    def save(breaks_at: int | None) -> None:
        memory = device.upload(content(8 << 20))
        memory.breaks_at = breaks_at
        with staged(FileImage.of("f", [memory]), Meter()) as within:
            for start in range(0, 8 << 20, 1 << 20):
                with within.outgoing(start, start + (1 << 20), Meter()):
                    pass

    save(None)
    pinned = sum(device.pinned.values())
    for _ in range(3):
        save(None)
    assert sum(device.pinned.values()) == pinned
    for _ in range(3):
        with pytest.raises(TransferError, match="is broken"):
            save(5 << 20)
    save(None)
    assert not device.pending


def test_memory_that_cannot_be_pinned_is_a_fallback(tmp_path) -> None:
    """It works without pinned memory, and the Transfer records the fallback."""
    device = FakeDevice(pinnable=False)
    data = content(300_000)
    for name in ("buffered", "odirect"):
        writer = registry.make(name)
        moved = writer.write(FileImage.of("f", [device.upload(data)]), tmp_path)
        assert [(f.wanted, f.used) for f in moved.fallbacks] == [
            ("pinned memory", "pageable memory")
        ]
        assert (tmp_path / "f").read_bytes() == data.tobytes()


def test_two_devices_in_one_image() -> None:
    """Segments of each device are copied by a stream of their own."""
    one, two = FakeDevice("fake:0"), FakeDevice("fake:1")
    parts = [content(5000, seed) for seed in range(3)]
    image = FileImage.of("f", [one.upload(parts[0]), two.upload(parts[1]), one.upload(parts[2])])
    with staged(image, Meter()) as within, within.outgoing(0, 15_000, Meter()) as views:
        assert views[0].tobytes() == np.concatenate(parts).tobytes()
    assert (one.copies, two.copies) == (2, 1)


def test_views_of_device_memory_are_refused() -> None:
    """A writer without support for devices gets an error, not wrong bytes."""
    image = FileImage.of("f", [b"host", FakeDevice().upload(content(10))])
    assert image.on_device
    assert image.views(0, 4)[0].tobytes() == b"host"
    with pytest.raises(UsageError, match="memory of a device"):
        image.views(0, 5)
    with pytest.raises(UsageError, match="memory of a device"):
        image.gather(0, 14, np.empty(14, dtype=np.uint8))
