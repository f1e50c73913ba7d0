"""A state becomes JSON and tensors and is restored bit for bit, with its aliases."""

from __future__ import annotations

import json
import warnings
from collections import defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from iobench.checkpoint.rebuild import unflatten
from iobench.checkpoint.serialized import Serialized
from iobench.checkpoint.state_tree import flatten
from iobench.errors import DataMismatchError, StateError
from iobench.formats.tensors import torch_dtype


def _round_trip(state: Any) -> Any:
    taken = Serialized.of(state)
    image = taken.image()
    block = np.empty(image.size_bytes, dtype=np.uint8)
    image.gather(0, image.size_bytes, block)
    return unflatten(json.loads(taken.skeleton), load(block.tobytes()))


def _file(state: Any) -> dict[str, int]:
    """Return the bytes of each tensor of the file, by name."""
    pieces = Serialized.of(state).structure.pieces
    return dict(zip(pieces.names[1:], pieces.sizes[1:], strict=True))


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=20)
    | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(
            st.text(max_size=5) | st.integers() | st.booleans() | st.none() | st.just("$tensor"),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(_values)
def test_plain_values(expect_same: Callable[..., None], state: Any) -> None:
    """Plain values are restored unchanged, with the types of keys."""
    expect_same(state, _round_trip(state))


@pytest.mark.parametrize(
    "dtype",
    [
        *("float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "bool", "uint8", "uint16", "complex64", "complex128"),
    ],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 5), (3, 0)])
def test_dtypes(expect_same: Callable[..., None], dtype: str, shape: tuple[int, ...]) -> None:
    """Every dtype and shape, also those without a name in safetensors."""
    tensor = (torch.rand(shape) * 100).to(torch_dtype(dtype))
    expect_same({"t": tensor}, _round_trip({"t": tensor}))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6)[::-2],
        np.array(7, dtype=np.int8),
        np.zeros((0, 2)),
        np.arange(3, dtype=">i4"),
        np.array(["2031-05-06"], dtype="M8[D]"),
        np.array(["a", "bcd"]),
        np.arange(4, dtype=np.longdouble),
        np.array([True, False]),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays(expect_same: Callable[..., None], array: np.ndarray) -> None:
    """numpy arrays stay numpy arrays, of their own dtype and byte order."""
    expect_same([array], _round_trip([array]))


@pytest.mark.parametrize(
    "value",
    [
        *(np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("x"), torch.Size([2, 3])),
        *(torch.bfloat16, torch.device("cuda:1"), torch.get_rng_state()),
    ],
)
def test_other_values(expect_same: Callable[..., None], value: Any) -> None:
    """numpy scalars keep their type; sizes, dtypes and devices of torch are values too."""
    expect_same(value, _round_trip(value))


def test_modules_and_optimizers(expect_same: Callable[..., None]) -> None:
    """Stock state dicts: OrderedDict with its metadata, integer keys, generators' states."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "numpy": np.random.default_rng(1).bit_generator.state,
    }
    found = _round_trip(state)
    expect_same(state, found)
    assert found["model"]._metadata == state["model"]._metadata
    optimizer.load_state_dict(found["optimizer"])


def test_tied_tensors_stay_tied() -> None:
    """One weight under two names, also turned or flat, is one tensor of the file and one memory
    again."""
    weight = torch.randn(4, 6)
    state = {"turned": weight.t(), "embedding": weight, "head": weight, "flat": weight.view(-1)}
    assert list(_file({**state, "other": weight.clone()})) == ["embedding", "other"]
    found = _round_trip(state)
    found["head"][0, 1] = 77
    assert [found["embedding"][0, 1], found["turned"][1, 0], found["flat"][1]] == [77] * 3
    array = np.arange(10.0)
    one, other = _round_trip([torch.from_numpy(array), torch.from_numpy(array)])
    one[0] = 77
    assert other[0] == 77


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@given(st.data())
def test_views_of_one_memory(expect_same: Callable[..., None], data: st.DataObject) -> None:
    """Overlapping tensors, of any stride and dtype, have the right values; equal ones are tied."""
    dtype = data.draw(st.sampled_from([torch.int16, torch.complex32, torch.complex128]))
    base = torch.arange(64 * dtype.itemsize // 2, dtype=torch.int16).view(dtype)
    views = []
    for _ in range(data.draw(st.integers(1, 5))):
        start = data.draw(st.integers(0, 60))
        step = data.draw(st.integers(1, 4))
        view = base[start::step]
        if data.draw(st.booleans()) and len(view) % 2 == 0:
            view = view.reshape(2, -1).t() if step > 1 else view.view(2, -1).t()
        if data.draw(st.booleans()) and view.is_contiguous() and view.stride(-1) == 1:
            view = view.view(torch.uint8)
        views.append(view)
    found = _round_trip(views)
    expect_same(views, found)
    for one, other in ((a, b) for a in range(len(views)) for b in range(a)):
        if all(
            getattr(views[one], what)() == getattr(views[other], what)()
            for what in ("data_ptr", "size", "stride")
        ):
            assert found[one].data_ptr() == found[other].data_ptr()


def test_slices_of_older_versions() -> None:
    """They described a slice by the bytes of its base. One outside of the base is damage."""
    row = {"$tensor": "w", "dtype": "float32", "shape": [2], "stride": [3], "offset": 4}
    state = unflatten({"w": {"$tensor": "w"}, "row": row}, {"w": torch.arange(6.0)})
    state["w"][4] = 7
    assert state["row"].tolist() == [1, 7]
    with pytest.raises(DataMismatchError, match="a view at 16 is outside w"):
        unflatten({"row": {**row, "offset": 16}}, {"w": torch.arange(6.0)})


def test_a_slice_is_saved_alone() -> None:
    """A small view of a large tensor saves its own bytes, not the whole storage."""
    assert _file({"part": torch.zeros(1000)[10:12]}) == {"part": 8}


def test_names_are_paths() -> None:
    """Tensors are named after their place, and no two names are equal."""
    state = {"a": {"b.c": torch.zeros(1), 3: torch.zeros(2)}, "a.b": {"c": torch.zeros(3)}}
    state["list"] = [torch.zeros(4), np.zeros(5)]
    names = list(flatten(state).tensors)
    assert sorted(names) == ["a.3", "a.b.c", "a.b.c#2", "list.0", "list.1"]
    assert list(flatten(torch.zeros(1)).tensors) == ["tensor"]
    assert list(flatten({"__metadata__": torch.zeros(1)}).tensors) == ["tensor.__metadata__"]


_Pair = namedtuple("_Pair", "a b")


class _Subclass(torch.Tensor):
    """Like DTensor: torch accepts it as a Parameter."""


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will remove them
        return torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that they are a prototype
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


@pytest.mark.parametrize(
    "bad",
    [
        {1, 2},
        object(),
        lambda: None,
        defaultdict(list),
        _Pair(1, 2),
        np.array([object()]),
        np.zeros(2, dtype=[("a", "i4")]),
        torch.zeros(3).to_sparse(),
        torch.zeros(3, device="meta"),
        _quantized(),
        _nested(),
        torch.zeros(3).as_subclass(_Subclass),
        torch.nn.Parameter(torch.zeros(3).as_subclass(_Subclass)),
        torch.nn.parameter.UninitializedParameter(),
        {object(): 1},
    ],
    ids=lambda bad: type(bad).__name__,
)
def test_unsupported_objects_are_named(bad: Any) -> None:
    """The error has the path of the object in the state."""
    with pytest.raises(StateError, match=r"state\['model'\]\[0\]"):
        flatten({"model": [bad], "fine": 1})


@pytest.mark.parametrize("make", [lambda dtype: np.zeros(3, dtype), lambda dtype: dtype.type(1)])
def test_dtypes_that_are_not_of_numpy(make: Callable[[Any], Any]) -> None:
    """bfloat16 of ml_dtypes, used by JAX, would be restored as bytes, and is refused."""
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    with pytest.raises(StateError, match=r"state\['model'\]\[0\] is .*bfloat16"):
        flatten({"model": [make(dtype)]})


def test_a_state_that_holds_itself() -> None:
    """A cycle is refused; the same list twice is not a cycle."""
    state: dict[str, Any] = {"a": {}}
    state["a"]["b"] = state
    with pytest.raises(StateError, match=r"state\['a'\]\['b'\] contains itself"):
        flatten(state)
    shared = [1]
    assert _round_trip([shared, shared]) == [[1], [1]]
