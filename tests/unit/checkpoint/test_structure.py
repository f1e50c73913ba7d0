"""A state that is like the last one reuses its structure; any other one is serialized anew."""

from __future__ import annotations

import gc
import json
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from iobench.checkpoint import serialized
from iobench.checkpoint.rebuild import unflatten
from iobench.checkpoint.serialized import Serialized, Serializer
from iobench.errors import StateError
from iobench.formats.tensors import resolved
from iobench.writers.image import FileImage

State = dict[Any, Any]


def _bytes(one: Serialized) -> bytes:
    return _gathered(one.image())


def _gathered(image: FileImage) -> bytes:
    block = np.zeros(image.size_bytes, dtype=np.uint8)
    image.gather(0, image.size_bytes, block)
    return block.tobytes()


def _restored(one: Serialized) -> Any:
    """The state as its two files give it back."""
    return unflatten(json.loads(one.skeleton), load(_bytes(one)))


def _is_same_as_anew(serializer: Serializer, state: Any) -> Serialized:
    """Serialize a state; its files are those of a serializer that has seen no other state."""
    found = serializer.serialize(state)
    anew = Serialized.of(state)
    assert found.skeleton == anew.skeleton
    assert vars(found.structure.pieces) == vars(anew.structure.pieces)
    assert _bytes(found) == _bytes(anew)
    # A state on a device is copied leaf by leaf.
    assert _gathered(found.structure.leaf_by_leaf("f", found.tensors)) == _bytes(found)
    return found


_DTYPES = [torch.float32, torch.int32, torch.bfloat16, torch.complex64, torch.complex128]


def _tensor(number: int) -> torch.Tensor:
    return (torch.arange(24) + number).to(torch.float32)


# Each takes a dense tensor of a state and returns what replaces it.
_CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "values": lambda t: t if 0 in t.stride() else t.add_(1),
    "new memory": lambda t: t.clone(),
    "detached": lambda t: t.detach(),
    "shape": lambda t: t.reshape(-1, 1),
    "half": lambda t: t.reshape(-1)[: t.numel() // 2],
    "strided": lambda t: t.reshape(-1)[::2],
    "offset": lambda t: t.reshape(-1)[1:],
    "transposed": lambda t: t.reshape(2, -1).t() if t.numel() % 2 == 0 else t,
    "expanded": lambda t: t.reshape(-1)[:1].expand(3, min(1, t.numel())),
    "empty": lambda t: t.reshape(-1)[:0],
    "bytes": lambda t: t.reshape(-1).contiguous().view(torch.uint8),
    "resized": lambda t: t.clone().resize_(t.numel() + 5).zero_(),
    "conjugate": lambda t: t.to(torch.complex64).conj(),
    "negative": lambda t: t.to(torch.complex64).conj().imag,
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
    "from_numpy": lambda _: torch.from_numpy(_POOL[1:9]),
    "again from_numpy": lambda _: torch.from_numpy(_POOL[3:11]),
    "array": lambda t: np.arange(t.numel(), dtype=">i4"),
    "other array": lambda t: np.arange(t.numel(), dtype="<i4").reshape(-1, 1),
    "plain": lambda _: 1,
    **{str(dtype): lambda t, d=dtype: (t.real if t.is_complex() else t).to(d) for dtype in _DTYPES},
}
_POOL = np.arange(20, dtype=np.int64)

_PLAIN = [1, True, 1.0, "1", None, -0.0, 0.0, float("nan"), (1,), [1], b"1", 1j, torch.float32]
_KEYS = [1, True, "1", b"1", None, 1.0, 0.0, -0.0, (1, "a"), "$a", 2, "x"]
_CONTAINERS: list[Callable[[dict[Any, Any]], Any]] = [
    dict,
    OrderedDict,
    lambda items: list(items.values()),
    lambda items: tuple(items.values()),
    lambda items: dict(reversed(items.items())),
]


class _Trainer:
    """A state of a few tensors, arrays and plain values that changes at random."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self.values: State = {name: _tensor(at) for at, name in enumerate("abcd")}
        self.values |= {"e": self.values["a"], "f": self.values["b"][2:9], "n": 1, 3: "x"}
        self._container: Callable[[dict[Any, Any]], Any] = dict
        self._metadata: Any = None

    def state(self, *, restored: bool = False) -> Any:
        """Return the state, or with `restored` what a load returns: no Parameter."""
        plain = {
            name: resolved(value) if restored and isinstance(value, torch.Tensor) else value
            for name, value in self.values.items()
        }
        inner = self._container(plain)
        if isinstance(inner, OrderedDict) and self._metadata is not None:
            inner._metadata = self._metadata
        return {"model": inner, "optimizer": [{"lr": 0.1, "w": plain.get("a")}, (1, 2)]}

    def change(self) -> None:
        draw = self._data.draw
        kind = draw(
            st.sampled_from(["tensor", "tensor", "object", "alias", "plain", "key", "box", "none"])
        )
        names = list(self.values)
        name, other = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        value = self.values[name]
        if kind == "tensor":
            tensor = resolved(value) if isinstance(value, torch.Tensor) else _tensor(7)
            self.values[name] = _CHANGES[draw(st.sampled_from(list(_CHANGES)))](tensor)
        elif kind == "object" and isinstance(value, torch.Tensor):
            # The same tensor object gets other memory: `.data =`, as FSDP and others use it.
            flat = resolved(value).clone().reshape(-1)
            others = [flat, flat[::2], flat[1:], flat.reshape(-1, 1)]
            value.data = others[draw(st.integers(0, 3))]
        elif kind == "alias":
            shared = self.values[other]
            if isinstance(shared, torch.Tensor) and shared.numel() and draw(st.booleans()):
                shared = resolved(shared).reshape(-1)[draw(st.integers(0, shared.numel() - 1)) :]
            self.values[name] = shared
        elif kind == "plain":
            self.values["n"] = draw(st.sampled_from(_PLAIN))
        elif kind == "key":
            key = draw(st.sampled_from(_KEYS))
            self.values = {key if old == name else old: one for old, one in self.values.items()}
        elif kind == "box":
            self._container = draw(st.sampled_from(_CONTAINERS))
            self._metadata = draw(st.sampled_from([None, {}, {"v": 1}, {"v": True}]))


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data())
def test_every_change_is_seen(expect_same: Callable[..., None], data: st.DataObject) -> None:
    """Whatever changes between two saves, each save holds the state of its own time exactly."""
    trainer, serializer = _Trainer(data), Serializer()
    for _ in range(data.draw(st.integers(1, 8))):
        found = _is_same_as_anew(serializer, trainer.state())
        expect_same(trainer.state(restored=True), _restored(found))
        trainer.change()


def _ordered(**attributes: Any) -> OrderedDict[str, torch.Tensor]:
    made = OrderedDict(w=_tensor(0))
    vars(made).update(attributes)
    return made


_SQUARE, _COMPLEX, _ARRAY = torch.randn(4, 4), torch.randn(6, dtype=torch.complex64), np.arange(9.0)
_ALIKE: dict[str, tuple[Any, Any]] = {
    "strides": (_SQUARE, _SQUARE.t()),
    "negation": (_SQUARE, torch._neg_view(_SQUARE)),
    "conjugation": (_COMPLEX, _COMPLEX.conj()),
    "storages": (
        [_SQUARE.view(-1)[:9], _SQUARE.view(-1)[2:9]],
        [torch.from_numpy(_ARRAY).float(), torch.from_numpy(_ARRAY[2:]).float()],
    ),
    "two storages of one memory": (
        [(one := torch.from_numpy(_ARRAY)), one[2:]],
        [torch.from_numpy(_ARRAY), torch.from_numpy(_ARRAY[2:])],
    ),
    "no more aliases": ([_SQUARE, _SQUARE], [_SQUARE, _SQUARE.clone()]),
    "new aliases": ([_SQUARE, _SQUARE.clone()], [_SQUARE, _SQUARE]),
    "distance of aliases": ([_SQUARE, _SQUARE[1:2]], [_SQUARE, _SQUARE[2:3]]),
    "byte order": ([_SQUARE, np.arange(3, dtype="<i4")], [_SQUARE, np.arange(3, dtype=">i4")]),
    "array": ([_SQUARE, np.arange(3)], [_SQUARE, np.arange(3).tolist()]),
    "attributes": (_ordered(), _ordered(_metadata={"version": 1})),
    "no attributes": (_ordered(_metadata={"version": 1}), _ordered()),
    "sign of a key": ({0.0: _SQUARE}, {-0.0: _SQUARE}),
    "types in a key": ({(1,): _SQUARE}, {(True,): _SQUARE}),
    "type of a key": ({1: _SQUARE}, {True: _SQUARE}),
    "order of keys": ({"a": _SQUARE, "b": _SQUARE[0]}, {"b": _SQUARE[0], "a": _SQUARE}),
    "list": ([_SQUARE, 1], (_SQUARE, 1)),
    "longer list": ([_SQUARE], [_SQUARE, _SQUARE]),
    "dict": ({"a": _SQUARE}, OrderedDict(a=_SQUARE)),
    "a tensor among plain values": ([_SQUARE, [1]], [_SQUARE, [_SQUARE]]),
    "an array for a tensor": ({"a": _SQUARE}, {"a": _SQUARE.numpy()}),
}


@pytest.mark.parametrize("difference", list(_ALIKE))
def test_one_difference(expect_same: Callable[..., None], difference: str) -> None:
    """States that differ in one thing only, in either order."""
    for states in (_ALIKE[difference], _ALIKE[difference][::-1]):
        serializer = Serializer()
        for state in (*states, *states):
            expect_same(state, _restored(_is_same_as_anew(serializer, state)))


def _state() -> State:
    weight = torch.randn(4, 6)
    model = OrderedDict(weight=weight, tied=weight, part=weight[1:3], turned=weight[:, :3].t())
    model._metadata = {"": {"version": 1}}
    moments = {n: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3)} for n in range(3)}
    groups = [{"lr": 0.1, "params": [0, 1, 2]}]
    arrays = {"rng": np.arange(5), "numbers": (np.float32(1.5), float("inf"))}
    return {"model": model, "optimizer": {"state": moments, "groups": groups}, **arrays}


def test_a_state_like_the_last_is_not_flattened(expect_same: Callable[..., None]) -> None:
    """Values, memory and plain values may differ: no name, header or skeleton is made again."""
    serializer = Serializer()
    serializer.serialize(_state())
    state = _state()
    state["optimizer"]["groups"][0]["lr"] = 0.2
    state["model"]["part"].mul_(3)
    with mock.patch.object(serialized, "flatten", side_effect=AssertionError):
        expect_same(state, _restored(serializer.serialize(state)))
        parameters = {**state, "model": OrderedDict(state["model"])}
        parameters["model"]._metadata = {"": {"version": 2}}
        expect_same(parameters, _restored(serializer.serialize(parameters)))


def test_no_tensor_is_kept() -> None:
    """The structure of the last state holds nothing of its memory."""
    serializer, state = Serializer(), {"w": torch.ones(3), "x": [torch.ones(2), np.ones(2)]}
    for _ in range(2):
        serializer.serialize(state)
    held = [weakref.ref(one) for one in (state["w"], *state["x"])]
    del state
    gc.collect()
    assert [one() for one in held] == [None] * 3


@pytest.mark.parametrize("begin", [0, 3])
def test_a_storage_that_lost_its_memory(begin: int) -> None:
    """FSDP frees the storage of a parameter that keeps its shape: its name is in the error."""
    serializer, weight = Serializer(), torch.ones(10)
    state = {"a": torch.ones(2), "weight": weight[begin:]}
    serializer.serialize(state)
    weight.untyped_storage().resize_(8)
    for one in (serializer, Serializer()):
        with pytest.raises(StateError, match="weight: its storage is smaller"):
            one.serialize(state)


def test_what_cannot_be_saved_any_more() -> None:
    """A later state is refused like a first one, and the one after it is saved."""
    serializer, good = Serializer(), {"w": torch.ones(3), "n": 1}
    serializer.serialize(good)
    looped: State = {"w": torch.ones(3), "n": []}
    looped["n"].append(looped["n"])
    for bad in ({**good, "n": object()}, {**good, "w": torch.ones(3).to_sparse()}, looped):
        with pytest.raises(StateError) as caught:
            serializer.serialize(bad)
        with pytest.raises(StateError) as anew:
            Serialized.of(bad)
        assert str(caught.value) == str(anew.value)
    _is_same_as_anew(serializer, good)


@pytest.mark.parametrize("key", ["\ud800", "\N{GREEK SMALL LETTER ALPHA}", 1e300, 2**70, (2**70,)])
def test_keys_that_other_json_libraries_lack(expect_same: Callable[..., None], key: Any) -> None:
    """The JSON around the plain values has every key that a state may have."""
    serializer = Serializer()
    for value in (1, 2):
        state = {"weight": torch.ones(3), key: value}
        expect_same(state, _restored(serializer.serialize(state)))


def _many(kind: type, key: Callable[[int], Any]) -> State:
    made = kind((key(number), _tensor(number)) for number in range(40))
    if kind is OrderedDict:
        made.note = {"version": 1}
    return made


def _tied(state: State) -> State:
    state["w5"] = state["w3"]
    state["w7"] = state["w9"][3:5]
    return state


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize(
    ("make", "together"),
    [
        (lambda kind: _many(kind, lambda number: f"w{number}"), True),
        (lambda kind: _tied(_many(kind, lambda number: f"w{number}")), False),
        (lambda kind: _many(kind, lambda number: number), False),
        (lambda kind: _many(kind, lambda number: f"${number}"), False),
        (lambda kind: _many(kind, lambda number: "m.w" if number else "m"), False),
    ],
    ids=["strings", "tied", "numbers", "tags", "few"],
)
def test_dicts_of_many_tensors(
    expect_same: Callable[..., None], make: Callable[[type], State], kind: type, together: bool
) -> None:
    """One entry of the skeleton has them all, unless a tensor or a key needs one of its own."""
    state = {"model": make(kind), "other": make(dict), "step": 3}
    serializer = Serializer()
    for _ in range(2):
        found = serializer.serialize(state)
        assert ('"$tensors":["model.","w0","w1"' in found.skeleton) == together
        expect_same(state, _restored(found))
