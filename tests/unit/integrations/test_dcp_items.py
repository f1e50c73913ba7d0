"""ItemStream: the bytes of stock DCP in few writes, in bounded memory, and no failure is lost."""

from __future__ import annotations

import io
from typing import Any, cast

import pytest
import torch
from support.fake_cuda import GpuTensor
from support.fake_device import FakeDevice

from iobench.integrations import dcp_items
from iobench.integrations.dcp_items import ItemStream, on_host
from iobench.units import MIB
from iobench.writers.device.staging import DeviceCopies
from iobench.writers.stream import BlockStream


class _Stream(io.BytesIO):
    """What a writer's stream gets; it has no room after `room` bytes."""

    room = 1 << 40

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def write(self, data: Any) -> int:
        self.sizes.append(len(data))
        if self.tell() + len(data) > self.room:
            raise OSError("no room")
        return super().write(data)


def _items() -> list[torch.Tensor | io.BytesIO]:
    wide = torch.arange(10_000.0).reshape(100, 100)
    plain = [torch.full((2500,), float(n)) for n in range(300)]
    others = [
        *(wide.T, wide[:, 3:9], wide[5], torch.ones(1).expand(7), torch.tensor(2), wide[:0]),
        *(torch.nn.Parameter(wide), wide.bfloat16(), wide.bool(), torch.ones(3).to(torch.cfloat)),
        *(torch.ones(3, dtype=torch.cfloat).conj(), torch.eye(3).to_sparse()),
        *(torch.ones(3).to(torch.float8_e5m2), torch.ones(MIB), torch.ones((1 << 18) + 1)),
    ]
    return [*plain, *others, io.BytesIO(b"any object"), io.BytesIO(bytes(2 * MIB)), *plain]


def _stock(item: torch.Tensor | io.BytesIO) -> bytes:
    """Return the bytes that torch's FileSystemWriter stores for an item."""
    if isinstance(item, io.BytesIO):
        return item.getvalue()
    tensor = item.detach().cpu()
    dense = tensor.layout is torch.strided
    if dense and tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def test_the_bytes_of_stock() -> None:
    """Any items in a row; `tell` is where each begins."""
    items = [i for i in _items() if isinstance(i, io.BytesIO) or i.layout is torch.strided]
    stream = _Stream()
    made = ItemStream(cast(BlockStream, stream))
    starts = []
    for item in items:
        starts.append(made.tell())
        made.append(item)
    made.end()
    wanted = [_stock(item) for item in items]
    whole = stream.getvalue()
    stops = [*starts[1:], len(whole)]
    assert [whole[a:b] for a, b in zip(starts, stops, strict=True)] == wanted
    assert len(stream.sizes) < 80
    small = sorted(size for size in stream.sizes if size < 2 * MIB)
    assert max(small) < MIB + (1 << 18)


def test_an_item_that_stock_refuses() -> None:
    """The error is the same."""
    tensor = torch.eye(3).to_sparse()
    made = ItemStream(cast(BlockStream, _Stream()))
    with pytest.raises(NotImplementedError) as ours:
        made.append(tensor)
    with pytest.raises(NotImplementedError) as stock:
        tensor.untyped_storage()
    assert str(ours.value) == str(stock.value)
    with pytest.raises(NotImplementedError):
        made.append(torch.ones(3, device="meta"))


def test_a_failure_is_raised() -> None:
    """By the write that finds no room, or by `end` for what is held."""
    stream = _Stream()
    stream.room = 3 * MIB
    made = ItemStream(cast(BlockStream, stream))
    with pytest.raises(OSError, match="no room"):
        list(map(made.append, [torch.ones(2500)] * 400))
    stream.room = 0
    held = ItemStream(cast(BlockStream, stream))
    held.append(torch.ones(2500))
    with pytest.raises(OSError, match="no room"):
        held.end()


def test_tensors_of_a_gpu_are_copied_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """All items come in order, with the right bytes; the next copies are in flight meanwhile."""
    device = FakeDevice()
    monkeypatch.setattr(dcp_items, "cuda_device", lambda _: device)
    monkeypatch.setattr(dcp_items, "_AHEAD", 3 * 4000)
    data: list[Any] = [torch.full((1000,), float(n)) for n in range(20)]
    items = [one.as_subclass(GpuTensor) for one in data]
    for at in (0, 7, 8, 15):
        items[at] = data[at]
    for at in (5, 19):
        items[at] = data[at] = io.BytesIO(b"any object")
    resolved = list[int]()

    def resolve(number: int) -> Any:
        resolved.append(number)
        return items[number]

    found = list[int]()
    with DeviceCopies([device]) as copies:
        for number, arrived in on_host(range(20), resolve, copies):
            found.append(number)
            assert resolved[-1] - number <= 5, "not more than the limit is ahead"
            if number in (1, 2, 10, 11):
                assert device.pending
            if isinstance(arrived, io.BytesIO):
                assert arrived is data[number]
            else:
                assert torch.equal(arrived.as_subclass(torch.Tensor), data[number])
    assert found == list(range(20))
    assert device.copies == 14
    assert not device.pending
