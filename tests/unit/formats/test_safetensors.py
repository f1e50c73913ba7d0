"""safetensors files: ours are the library's byte for byte, and each reads the other's."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iobench.errors import UsageError
from iobench.formats import safetensors as ours
from iobench.formats.safetensors_header import DTYPES
from iobench.writers import registry

_NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
_DTYPES = [getattr(torch, name) for name in DTYPES if name != "float4_e2m1fn_x2"]
_SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(_DTYPES)), draw(_SHAPES)
    count = torch.Size(shape).numel()
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    raw = torch.tensor(list(data), dtype=torch.uint8)
    if dtype is torch.bool:
        raw &= 1
    return raw.view(dtype).reshape(shape)


_STATES = st.dictionaries(_NAMES, _tensors(), max_size=5)


def _bytes(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    image = ours.image("file", tensors, metadata)
    return b"".join(view.tobytes() for view in image.views(0, image.size_bytes))


@settings(deadline=None)
@given(_STATES)
def test_both_directions(tensors: dict[str, torch.Tensor]) -> None:
    """The library reads what we wrote and we read what it wrote, bit for bit."""
    writer = registry.make("buffered")
    with tempfile.TemporaryDirectory() as directory:
        ours.save(tensors, "ours", directory, writer, durable=False)
        theirs = safetensors.torch.load_file(Path(directory) / "ours")
        safetensors.torch.save_file(tensors, Path(directory) / "theirs")
        loaded, _ = ours.load("theirs", directory, writer)
    for found in (theirs, loaded):
        assert found.keys() == tensors.keys()
        assert all(found[n].dtype == t.dtype for n, t in tensors.items())
        assert all(found[n].shape == t.shape for n, t in tensors.items())
    assert _bytes(theirs) == _bytes(loaded) == _bytes(tensors)


def test_packed_floats(writer, tmp_path: Path) -> None:
    """float4, of which torch packs two in a byte, agrees with the library and comes back."""
    packed = torch.arange(24, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(3, 8)
    ours.save({"w": packed}, "file", tmp_path, writer)
    assert (tmp_path / "file").read_bytes() == safetensors.torch.save({"w": packed})
    back, _ = ours.load("file", tmp_path, writer)
    assert back["w"].shape == (3, 8)
    assert back["w"].view(torch.uint8).flatten().tolist() == list(range(24))


def test_many_of_few_kinds(random_tensor, same, buffered, tmp_path: Path, monkeypatch) -> None:
    """Tensors that are made together are those of the library, each with its own storage."""
    monkeypatch.setattr(ours, "RUN_BYTES", 100)
    shapes = [(), (3,), (5, 2), (0, 3), (60,)]
    state = {
        name: random_tensor(dtype, *shape, seed=number)
        for dtype in (torch.bfloat16, torch.float32, torch.float8_e5m2, torch.int64, torch.bool)
        for shape in shapes
        for number in range(7)
        for name in (f"{number}.{shape}.{dtype}", f"{shape}.{number}.{dtype}")  # alternating or not
    }
    safetensors.torch.save_file(state, tmp_path / "file")
    found, _ = ours.load("file", tmp_path, buffered)
    stock = safetensors.torch.load_file(tmp_path / "file")
    assert _filled(found) == _filled(stock)  # the library gives empty ones in any order
    for name, tensor in state.items():
        assert same(found[name], tensor)
        assert found[name].untyped_storage().nbytes() == tensor.nbytes


def _filled(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.numel()]


def test_a_dtype_that_this_torch_lacks(buffered, tmp_path: Path, monkeypatch) -> None:
    """The file is sound: the error names the dtype, so that torch is updated."""
    ours.save({"w": torch.zeros(2, dtype=torch.uint16)}, "file", tmp_path, buffered)
    monkeypatch.delattr(torch, "uint16")
    with pytest.raises(UsageError, match="has no dtype 'uint16'"):
        ours.load("file", tmp_path, buffered)


def test_no_copy_of_the_payload() -> None:
    """The image's segments are the tensors' own memory."""
    tensor = torch.zeros(1000)
    image = ours.image("file", {"t": tensor})
    assert [s.memory.ctypes.data for s in image.segments][1:] == [tensor.data_ptr()]


def test_memory_comes_from_the_caller(buffered, random_tensor, tmp_path: Path) -> None:
    """`allocate` is asked once for each tensor, in file order, and the tensors live there."""
    state = {"b": random_tensor(torch.int8, 3), "a": random_tensor(torch.float64, 2)}
    ours.save(state, "file", tmp_path, buffered)
    given_out: list[int] = []

    def allocate(size_bytes: int):
        memory = torch.empty(size_bytes, dtype=torch.uint8)
        given_out.append(memory.data_ptr())
        return memory.numpy()

    tensors, _ = ours.load("file", tmp_path, buffered, allocate=allocate)
    assert [tensors["a"].data_ptr(), tensors["b"].data_ptr()] == given_out


def test_what_safetensors_cannot_hold() -> None:
    """A dtype that the format lacks, and the reserved name, are refused with the reason."""
    with pytest.raises(UsageError, match="'t' has dtype 'complex128'"):
        ours.image("file", {"t": torch.zeros(1, dtype=torch.complex128)})
    with pytest.raises(UsageError, match="'__metadata__' is reserved"):
        ours.image("file", {"__metadata__": torch.zeros(1)})
    for tensor in (torch.ones(3).to_sparse(), torch.ones(3, device="meta")):
        with pytest.raises(UsageError):
            ours.image("file", {"w": tensor})


@pytest.mark.parametrize(
    ("name", "metadata"),
    [
        *((name, None) for name in (1, True, None, b"a", ("a",))),
        *(
            ("w", one)
            for one in ({"a": 1}, {"a": None}, {"a": ["x"]}, {1: "a"}, {"a": "b", 2: "c"})
        ),
    ],
    ids=str,
)
def test_what_is_no_text(name: Any, metadata: Any, tmp_path: Path) -> None:
    """A name, or metadata. The library refuses it; so do we, before anything is written, and write
    no text for it: {1: t} is not {"1": t}."""
    says = f"tensor name {re.escape(repr(name))} is not a str" if not metadata else "both must be"
    for tensors in ({"t": torch.ones(2), name: torch.zeros(2)}, {name: torch.zeros(2)}):
        with pytest.raises(TypeError):
            safetensors.torch.save_file(tensors, tmp_path / "stock", metadata=metadata)
        with pytest.raises(UsageError, match=says):
            ours.save(tensors, "ours", tmp_path, registry.make("buffered"), metadata=metadata)
    assert not (tmp_path / "ours").exists()


_SQUARE = torch.randn(4, 6)
_COMPLEX = torch.randn(6, dtype=torch.complex64)
_TENSORS = [
    _SQUARE,
    _SQUARE.clone(),
    _SQUARE.t().contiguous().t(),
    _SQUARE.reshape(6, 4),
    _SQUARE.t().reshape(4, 6),
    _SQUARE[:, ::2],
    torch._neg_view(_SQUARE),
    _SQUARE.double(),
    _SQUARE.view(torch.int32),
    torch.nn.Parameter(_SQUARE),
    _COMPLEX,
    _COMPLEX.conj(),
    torch.empty(0, 3),
    torch.tensor(1.5),
    _SQUARE.new_ones(1).expand(3, 2),
]
_FILES = st.dictionaries(
    st.sampled_from(["a", "b", "ä", "layers.10", "layers.9"]), st.sampled_from(range(len(_TENSORS)))
)


def _of_library(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> bytes:
    plain = {
        name: tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
        for name, tensor in tensors.items()
    }
    return safetensors.torch.save(plain, metadata)


@given(_FILES, st.sampled_from([None, {"a": "1"}]))
def test_the_bytes_of_the_library(numbers: dict[str, int], metadata: dict[str, str] | None) -> None:
    """Of any names, shapes, dtypes, strides and metadata."""
    tensors = {name: _TENSORS[number] for name, number in numbers.items()}
    assert _bytes(tensors, metadata) == _of_library(tensors, metadata)


def test_a_tensor_that_lost_its_memory() -> None:
    """No byte after the end of a storage is read."""
    weight = torch.ones(100)
    _bytes({"w": weight})
    weight.untyped_storage().resize_(8)
    with pytest.raises(RuntimeError, match="out of bounds"):
        ours.image("f", {"w": weight})
