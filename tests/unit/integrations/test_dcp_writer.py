"""StorageWriter: what it stores of any item is what stock DCP stores, or equal to it for torch."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from iobench.formats import torch_image
from iobench.integrations.dcp import StorageWriter
from iobench.units import MIB

Item = torch.Tensor | io.BytesIO


class _Planner:
    """Returns the data of items that are numbered by their names."""

    def __init__(self, items: list[Item]) -> None:
        self._items = items

    def resolve_data(self, item: WriteItem) -> Item:
        return self._items[int(item.index.fqn)]


def _stored(items: list[Item], directory: Path) -> list[bytes]:
    """Save `items`, and return the bytes of each."""
    writer = StorageWriter(directory, "buffered", thread_count=1)
    plan = writer.prepare_global_plan(
        [
            SavePlan(
                [
                    WriteItem(index=MetadataIndex(str(number)), type=WriteItemType.BYTE_IO)
                    for number in range(len(items))
                ]
            )
        ]
    )[0]
    planner: Any = _Planner(items)
    found = {
        int(one.index.fqn): one.storage_data for one in writer.write_data(plan, planner).wait()
    }
    (file,) = directory.iterdir()
    data = file.read_bytes()
    assert len(writer.transfers) == 1
    assert sum(one.length for one in found.values()) <= len(data)
    return [
        data[found[number].offset : found[number].offset + found[number].length]
        for number in range(len(items))
    ]


def _stock(item: Item) -> bytes:
    """Return the bytes that torch's FileSystemWriter stores for an item."""
    if isinstance(item, io.BytesIO):
        return item.getvalue()
    tensor = item.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


_WIDE = torch.arange(10_000.0).reshape(100, 100)
_PLAIN: list[Item] = [torch.full((2500,), float(n)) for n in range(300)]
_ITEMS: list[Item] = [
    *_PLAIN,
    *(_WIDE[5], torch.tensor(2), _WIDE[:0], torch.nn.Parameter(_WIDE), _WIDE.bfloat16()),
    *(_WIDE.bool(), torch.ones(3).to(torch.cfloat), torch.ones(3, dtype=torch.cfloat).conj()),
    *(torch._neg_view(torch.ones(3)), torch.ones(3).to(torch.float8_e5m2), torch.ones(MIB)),
    *(io.BytesIO(b"any object"), io.BytesIO(bytes(2 * MIB)), torch.ones((1 << 18) + 1)),
    *_PLAIN,
]


@pytest.mark.parametrize("known", [True, False])
def test_the_bytes_of_stock(known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any items in a row, also of a torch version whose files have no image."""
    if not known:
        monkeypatch.setattr(torch_image, "is_like_stock", lambda: False)
    assert _stored(_ITEMS, tmp_path) == list(map(_stock, _ITEMS))


def test_tensors_that_are_not_contiguous(tmp_path: Path) -> None:
    """They are stored contiguous: the same values for torch."""
    items = [_WIDE.T, _WIDE[:, 3:9], torch.ones(1).expand(7), torch.rand(2, 1, 3).mT]
    items.append(torch.rand(1, 2).T)  # contiguous, with other strides than the usual ones
    for item, data in zip(items, _stored([*items], tmp_path), strict=True):
        found = torch.load(io.BytesIO(data), weights_only=True)
        assert torch.equal(found, item)
        assert found.untyped_storage().nbytes() == item.nbytes


@pytest.mark.filterwarnings("ignore:.*are deprecated and will be removed:UserWarning")
def test_a_tensor_that_torch_serializes(tmp_path: Path) -> None:
    """A quantized one: what torch.save writes."""
    item = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    assert _stored([item, torch.ones(2)], tmp_path) == [_stock(item), _stock(torch.ones(2))]


@pytest.mark.parametrize("item", [torch.eye(3).to_sparse(), torch.ones(3, device="meta")])
def test_an_item_that_stock_refuses(item: torch.Tensor, tmp_path: Path) -> None:
    """The error is the same, and no file is left."""
    with pytest.raises(NotImplementedError) as ours:
        _stored([torch.ones(2), item], tmp_path)
    with pytest.raises(NotImplementedError) as stock:
        item.cpu().untyped_storage()
    assert str(ours.value) == str(stock.value)
    assert not list(tmp_path.iterdir())
