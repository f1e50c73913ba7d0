"""Staging: device memory is copied through pinned blocks of the host."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_device import FakeBytes, FakeDevice

from iobench.errors import TransferError, UsageError
from iobench.testing import content
from iobench.writers import registry
from iobench.writers.device.staging import StagedImage, staged
from iobench.writers.image import FileImage
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


def test_host_images_are_left_alone() -> None:
    """An image of host memory is its own staged image, and its views are the memory."""
    memory = content(1000)
    image = FileImage.of("f", [memory])
    with staged(image, Meter()) as within, within.outgoing(10, 20, Meter()) as views:
        assert within is image
        assert np.shares_memory(views[0], memory)


def test_the_next_range_is_under_way() -> None:
    """While a block is written, the copy of the next one has been queued."""
    device = FakeDevice()
    image = FileImage.of("f", [device.upload(content(4 << 20))])
    with staged(image, Meter()) as within, within.outgoing(0, 1 << 20, Meter()):
        assert device.pending == 1
        assert device.copies == 2


def test_a_block_that_was_read_is_still_under_way() -> None:
    """incoming returns before the device has the bytes; the end of `staged` waits for them."""
    device = FakeDevice()
    memory = device.upload(content(1 << 20))
    with staged(FileImage.of("f", [memory]), Meter()) as within:
        with within.incoming(0, 1 << 20, Meter()) as views:
            views[0][:] = 7
        assert device.copies == 1
        assert device.pending
    assert not device.pending
    assert set(device.download(memory)) == {7}


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


def test_a_failed_copy_is_reported_even_if_its_bytes_are_unused() -> None:
    """A failed copy of bytes that were fetched ahead makes the transfer fail at its end."""
    device = FakeDevice()
    memory = device.upload(content(2 << 20))
    memory.breaks_at = (1 << 20) + 1
    image = FileImage.of("f", [memory])
    with (
        pytest.raises(TransferError, match="is broken"),
        staged(image, Meter()) as within,
        within.outgoing(0, 1 << 20, Meter()),
    ):
        pass


def test_an_error_of_the_caller_passes_and_all_copies_end() -> None:
    """An exception of the writer propagates, and no copy stays in flight."""
    device = FakeDevice()
    image = FileImage.of("f", [device.upload(content(4 << 20))])
    with (
        pytest.raises(OSError, match="disk full"),
        staged(image, Meter()) as within,
        within.outgoing(0, 1 << 20, Meter()),
    ):
        raise OSError("disk full")
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
    """Segments of each device are copied by a lane of their own."""
    one, two = FakeDevice("fake:0"), FakeDevice("fake:1")
    parts = [content(5000, seed) for seed in range(3)]
    image = FileImage.of("f", [one.upload(parts[0]), two.upload(parts[1]), one.upload(parts[2])])
    with staged(image, Meter()) as within, within.outgoing(0, 15_000, Meter()) as views:
        assert views[0].tobytes() == np.concatenate(parts).tobytes()
    assert one.copies >= 2
    assert two.copies >= 1


def test_views_of_device_memory_are_refused() -> None:
    """A writer without support for devices gets an error, not wrong bytes."""
    image = FileImage.of("f", [b"host", FakeDevice().upload(content(10))])
    assert image.on_device
    assert image.views(0, 4)[0].tobytes() == b"host"
    with pytest.raises(UsageError, match="memory of a device"):
        image.views(0, 5)
    with pytest.raises(UsageError, match="memory of a device"):
        image.gather(0, 14, np.empty(14, dtype=np.uint8))


def test_a_staged_image_is_an_image() -> None:
    """It has the path, size and segments of the original."""
    image = FileImage.of("f", [FakeDevice().upload(content(10))])
    with staged(image, Meter()) as within:
        assert isinstance(within, StagedImage)
        assert (within.path, within.size_bytes, within.segments) == ("f", 10, image.segments)


def test_host_memory_is_not_copied() -> None:
    """Ranges without device memory are views of the image, to be written and to be filled."""
    host = np.zeros(5000, np.uint8)
    image = FileImage.of("f", [FakeDevice().upload(content(5000)), host])
    meter = Meter()
    with staged(image, meter) as within:
        for provide in (within.outgoing, within.incoming):
            with provide(6000, 8000, meter) as (view,):
                assert view.ctypes.data == host.ctypes.data + 1000
                assert len(view) == 2000
