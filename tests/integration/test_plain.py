"""The drop-ins and the stock functions: the same bytes, the same objects, the same files."""

import collections
import functools
import gc
import logging
import os
import pickle
import stat
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

import iobench
import iobench.safetensors
import iobench.torch
from iobench.errors import SaveError, UsageError
from iobench.formats import torch_image
from iobench.integrations import default_writer, safetensors_dropins
from iobench.writers.s3 import S3Writer

WRITER = "hybrid"
torch.manual_seed(7)


class Tagged(torch.Tensor):
    """A tensor subclass."""


def _optimizer() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n": [*range(5)]}


def _shared() -> Any:
    whole = torch.randn(100, 10)
    return {"whole": whole, "rows": whole[3:7], "t": whole.t(), "again": [whole, (whole[::2],)]}


def _attributed() -> Any:
    tensor = torch.randn(5)
    tensor.note = "kept"
    tagged = torch.randn(4).as_subclass(Tagged)
    return {"p": torch.nn.Parameter(torch.randn(3, 3)), "tagged": tagged, "n": tensor}


_BYTES = torch.ones(48, dtype=torch.uint8)
_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
STATES: dict[str, Callable[[], Any]] = {
    "optimizer": _optimizer,
    "shared": _shared,
    "subclasses": _attributed,
    "scalars": lambda: {"a": torch.tensor(3.5), "b": 7, "c": [None, "x", 2**70, 1.5j], "d": b"\0"},
    "dtypes": lambda: {name: _BYTES.view(getattr(torch, name)).clone() for name in _DTYPES},
    "not contiguous": lambda: [
        torch.randn(30, 40).t(),
        torch.randn(9, 9)[::2, ::3],
        torch.randn(2).expand(5, 2),
    ],
    "numpy": lambda: {"rng": np.random.default_rng(1).standard_normal(9), "s": np.float64(2)},
    "sparse": lambda: torch.eye(6).to_sparse(),
    "conjugated": lambda: torch.randn(6, dtype=torch.complex64).conj(),
    "another type's view": lambda: torch.randn(8).view(torch.int32),
    "empty": lambda: {"none": torch.zeros(0), "also": torch.zeros(3, 0), "no": {}},
    "storages": lambda: [torch.arange(4).untyped_storage(), torch.arange(8)],
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(9), 0.1, 3, torch.qint8),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
    "meta": lambda: torch.empty(3, device="meta"),
    "module": lambda: torch.nn.Linear(3, 4),
    "ordered": lambda: collections.OrderedDict(a=torch.ones(2), b=torch.ones(3)),
    "one tensor": lambda: torch.randn(300, 300),
}
STORAGES = (torch.UntypedStorage, torch.storage.TypedStorage, torch.Tensor)
pytestmark = [  # torch's own, of what is saved here
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def pieces(value: Any, seen: dict[int, int] | None = None) -> Any:
    """`value` as something that compares: types, values, and which storages are the same."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        about = [type(value), value.dtype, value.requires_grad, value.device]
        if value.layout != torch.strided or value.is_quantized or value.is_nested:
            return [*about, repr(value)]
        about += [
            value.shape,
            value.stride(),
            value.storage_offset(),
            value.is_conj(),
            pieces(vars(value)),
        ]
        if value.is_meta:
            return about
        return [*about, pieces(value.untyped_storage(), seen)]
    if isinstance(value, torch.storage.TypedStorage):
        return [value.dtype, pieces(value._untyped_storage, seen)]
    if isinstance(value, torch.UntypedStorage):
        same = seen.setdefault(value._cdata, len(seen))
        return [same, torch.empty(0, dtype=torch.uint8).set_(value).numpy().tobytes()]
    if isinstance(value, torch.nn.Module):
        return [type(value), pieces(value.state_dict(), seen)]
    if isinstance(value, dict):
        return [type(value), [(key, pieces(one, seen)) for key, one in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value), [pieces(one, seen) for one in value]]
    if isinstance(value, np.ndarray):
        return [value.dtype, value.tolist()]
    return [type(value), value]


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The calls that were left to the stock functions, from the log."""
    caplog.set_level(logging.WARNING, logger="iobench")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("kind", STATES)
def test_the_file_is_stock_torchs(kind: str, tmp_path, log_lines) -> None:
    """Byte for byte, whatever the state; and each side loads the other's as the same objects.
    Nothing is left to torch."""
    state = STATES[kind]()
    for side in ("stock", "ours"):
        (tmp_path / side).mkdir()
    stock, ours = tmp_path / "stock/state.pt", tmp_path / "ours/state.pt"
    torch.save(state, stock)
    iobench.torch.save(state, ours, writer=WRITER)
    assert ours.read_bytes() == stock.read_bytes()
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(stock.stat().st_mode)
    expected = pieces(torch.load(stock, weights_only=False))
    assert pieces(iobench.torch.load(stock, weights_only=False, writer=WRITER)) == expected
    assert os.listdir(tmp_path / "ours") == ["state.pt"]
    assert log_lines() == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pickle_protocol": 4},
        {"_disable_byteorder_record": True},
        {"_use_new_zipfile_serialization": False},
        {"pickle_module": pickle},
    ],
    ids=str,
)
def test_options_of_save(options: dict[str, Any], tmp_path, log_lines) -> None:
    """Each does what it does in stock torch. What has no image is left to torch, and a line says
    so."""
    (tmp_path / "a").mkdir()
    state = _optimizer()
    torch.save(state, tmp_path / "m.pt", **options)
    iobench.torch.save(state, tmp_path / "a/m.pt", writer=WRITER, **options)
    if options.get("_use_new_zipfile_serialization", True):
        assert (tmp_path / "a/m.pt").read_bytes() == (tmp_path / "m.pt").read_bytes()
    else:
        (line,) = log_lines()
        assert "the file format before torch 1.6" in line
    found = iobench.torch.load(tmp_path / "a/m.pt", weights_only=False, writer=WRITER)
    assert pieces(found) == pieces(torch.load(tmp_path / "m.pt", weights_only=False))


def test_torchs_settings_hold(tmp_path) -> None:
    """Without CRC32, and with another alignment of storages: stock's bytes still."""
    from torch.utils.serialization import config

    (tmp_path / "a").mkdir()
    state = _shared()
    torch.serialization.set_crc32_options(False)
    try:
        with config.patch({"save.storage_alignment": 4096}):
            torch.save(state, tmp_path / "m.pt")
            iobench.torch.save(state, tmp_path / "a/m.pt", writer=WRITER)
            assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert (tmp_path / "a/m.pt").read_bytes() == (tmp_path / "m.pt").read_bytes()
    loaded = iobench.torch.load(tmp_path / "m.pt", writer=WRITER)
    assert pieces(loaded) == pieces(torch.load(tmp_path / "m.pt"))


@pytest.mark.parametrize(
    "name",
    [
        *("m", "m.", ".m.pt", "..pt", "a.b.pt", "ünï.pt", "a b.pt", "x .y", "a\\b.pt", "a\\b.c.pt"),
        *("archive", "n" * 200),
    ],
)
def test_names_of_files(name: str, tmp_path) -> None:
    """The name is in the file, as torch makes it; directories beyond ASCII change that."""
    for directory in (tmp_path / "dir", tmp_path / "dïr"):
        for side in ("stock", "ours"):
            (directory / side).mkdir(parents=True)
        torch.save({"a": torch.ones(3)}, directory / "stock" / name)
        iobench.torch.save({"a": torch.ones(3)}, str(directory / "ours" / name), writer=WRITER)
        stock, ours = ((directory / side / name).read_bytes() for side in ("stock", "ours"))
        assert ours == stock


LOADS: dict[str, dict[str, Any]] = {
    "to cpu": {"map_location": "cpu"},
    "to a device": {"map_location": torch.device("cpu")},
    "by a dict": {"map_location": {"cpu": "cpu"}},
    "by a function": {"map_location": lambda storage, _: storage},
    "by none of it": {"map_location": lambda *_: None},
    "to copies": {"map_location": lambda storage, _: storage.clone()},
    "to meta": {"map_location": "meta"},
    "weights": {"weights_only": True},
    "anything": {"weights_only": False},
    "by pickle": {"weights_only": False, "pickle_module": pickle},
    "as latin1": {"weights_only": False, "encoding": "latin1"},
    "mapped": {"mmap": True},
    "as it is": {},
}


@pytest.mark.parametrize("how", LOADS)
def test_options_of_load(how: str, tmp_path) -> None:
    """Each gives what it gives in stock torch."""
    options = LOADS[how]
    torch.save(_optimizer(), tmp_path / "m.pt")
    expected = torch.load(tmp_path / "m.pt", **options)
    found = iobench.torch.load(tmp_path / "m.pt", writer=WRITER, **options)
    assert pieces(found) == pieces(expected)


def test_what_is_loaded_is_memory_like_any_other(tmp_path) -> None:
    """It grows, is shared between processes and written to; the file stays as it is."""
    iobench.torch.save({"a": torch.arange(6.0), "b": torch.ones(2)}, tmp_path / "m.pt")
    raw = (tmp_path / "m.pt").read_bytes()
    state = iobench.torch.load(tmp_path / "m.pt")
    state["a"].resize_(1000).fill_(2)
    state["b"].share_memory_().add_(1)
    assert (tmp_path / "m.pt").read_bytes() == raw
    iobench.torch.save(state, tmp_path / "m.pt")
    assert torch.equal(torch.load(tmp_path / "m.pt")["a"], torch.full((1000,), 2.0))


def test_another_default_device(tmp_path, log_lines) -> None:
    """Neither saving nor loading makes tensors where new ones would go."""
    torch_image.is_like_stock.cache_clear()
    with torch.device("meta"):
        iobench.torch.save({"a": torch.arange(6.0, device="cpu")}, tmp_path / "m.pt")
        state = iobench.torch.load(tmp_path / "m.pt")
    assert torch.equal(state["a"], torch.arange(6.0))
    assert log_lines() == []


def _error(call: Callable[[], Any]) -> tuple[type[BaseException], str] | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 -- whatever it is, it is compared
        return type(error), str(error)
    return None


@pytest.mark.parametrize("damage", ["missing", "short", "text", "script", "flipped", "legacy"])
def test_files_that_are_something_else(damage: str, tmp_path) -> None:
    """Stock torch has the last word, and its errors are what is raised."""
    path = tmp_path / "m.pt"
    torch.save({"a": torch.arange(5000.0)}, path)
    raw = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        path.write_bytes(raw[:-300])
    elif damage == "text":
        path.write_text("no checkpoint")
    elif damage == "script":
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))
    elif damage == "legacy":
        torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    else:
        raw[raw.index(b"PK\x01\x02") + 42] ^= 0xFF
        path.write_bytes(raw)
    expected = _error(lambda: torch.load(path))
    assert _error(lambda: iobench.torch.load(path, writer=WRITER)) == expected
    assert (expected is None) is (damage == "legacy")


@pytest.mark.parametrize(
    ("variable", "given", "allowed"),
    [
        ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None, True),
        ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", True, False),
        ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", False, False),
        ("HOME", False, True),
    ],
)
def test_the_environment_decides_weights_only(
    variable, given, allowed, tmp_path, log_lines, monkeypatch
) -> None:
    """As it does for stock torch, and the writer still reads what may be loaded."""
    monkeypatch.setenv(variable, "1")
    torch.save({"f": Fraction(1, 3), "t": torch.ones(3)}, tmp_path / "m.pt")
    if allowed:
        found = iobench.torch.load(tmp_path / "m.pt", weights_only=given, writer=WRITER)
        assert found["f"] == Fraction(1, 3)
        assert log_lines() == []
    else:
        with pytest.raises(pickle.UnpicklingError, match="weights_only"):
            iobench.torch.load(tmp_path / "m.pt", weights_only=given, writer=WRITER)


def test_what_is_loaded_is_freed_at_once(tmp_path) -> None:
    """Without the garbage collector: no cycle of objects keeps the storages."""
    torch.save([torch.full((9,), n) for n in range(50)], tmp_path / "m.pt")
    iobench.torch.load(tmp_path / "m.pt", writer=WRITER)
    gc.collect()
    gc.disable()
    try:
        before = sum(type(o) in STORAGES for o in gc.get_objects())
        found = iobench.torch.load(tmp_path / "m.pt", writer=WRITER)
        assert len(found) == 50
        del found
        assert sum(type(o) in STORAGES for o in gc.get_objects()) == before
    finally:
        gc.enable()


# What is at the path.


def test_file_objects_are_torchs(tmp_path, log_lines) -> None:
    """They are written and read at their current position, and nothing is logged."""
    with (tmp_path / "m.pt").open("w+b") as file:
        iobench.torch.save({"a": 1}, file, writer=WRITER)
        file.seek(0)
        assert iobench.torch.load(file, writer=WRITER) == {"a": 1}
    assert log_lines() == []


def _linked(path: Path) -> None:
    path.with_name("real.pt").write_bytes(b"old")
    path.symlink_to("real.pt")


def _hard(path: Path) -> None:
    path.write_bytes(b"old")
    os.link(path, path.with_name("other.pt"))


def _moded(mode: int) -> Callable[[Path], None]:
    def prepare(path: Path) -> None:
        path.write_bytes(b"old")
        path.chmod(mode)
        if not os.access(path, os.W_OK):
            pytest.skip("only root may write to a file of mode 0400")

    return prepare


def _attributes(path: Path) -> None:
    path.write_bytes(b"old")
    try:
        os.setxattr(path, "user.note", b"x")
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error}")


_OLD: dict[str, tuple[Callable[[Path], object], str]] = {
    "plain": (lambda path: path.write_bytes(b"old" * 10**6), ""),
    "link": (_linked, "a link"),
    "dangling": (lambda path: path.symlink_to("later.pt"), "a link"),
    "hard": (_hard, "hard links"),
    "private": (_moded(0o600), ""),
    "open": (_moded(0o664), ""),
    "read-only": (_moded(0o400), ""),
    "set-ID": (_moded(0o4755), "set-ID"),
    "attributes": (_attributes, "extended attributes"),
}
_OF_SAFETENSORS = ("link", "dangling", "hard", "private", "open", "plain")


def _listed(directory: Path) -> Any:
    return {
        path.name: (
            path.lstat().st_mode,
            path.lstat().st_nlink,
            path.is_symlink() and os.readlink(path),
            path.read_bytes(),
        )
        for path in directory.iterdir()
    }


@pytest.mark.parametrize(
    ("library", "kind"),
    [*(("torch", kind) for kind in _OLD), *(("safetensors", kind) for kind in _OF_SAFETENSORS)],
)
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_what_is_left_of_an_old_file(library, kind, umask, tmp_path, log_lines) -> None:
    """Links, permissions and attributes are as stock torch, or the installed safetensors, leaves
    them; torch is asked if it must."""
    prepare, reason = _OLD[kind]
    stock, ours = {
        "torch": (torch.save, iobench.torch.save),
        "safetensors": (safetensors.torch.save_file, iobench.safetensors.save_file),
    }[library]
    safetensors_dropins._stock_mode.cache_clear()  # as in a new process
    before = os.umask(umask)
    try:
        for side, save in (("stock", stock), ("ours", functools.partial(ours, writer=WRITER))):
            (tmp_path / side).mkdir()
            prepare(tmp_path / side / "m.pt")
            save({"a": torch.ones(9)}, tmp_path / side / "m.pt")
    finally:
        os.umask(before)
        safetensors_dropins._stock_mode.cache_clear()
    assert _listed(tmp_path / "ours") == _listed(tmp_path / "stock")
    if library == "torch":
        assert len(log_lines()) == bool(reason)
        assert all(reason in line for line in log_lines())


def _stranger(path: Path) -> None:
    path.write_bytes(b"old")
    if os.geteuid() != 0:
        pytest.skip("another owner needs root")
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    "prepare", [*(_OLD[kind][0] for kind in _OLD if kind != "dangling"), _stranger]
)
def test_what_cannot_be_pickled_leaves_every_old_file(prepare, tmp_path) -> None:
    """Whatever its mode, owner and links are: also files that only stock torch can replace."""
    prepare(tmp_path / "m.pt")
    before = _listed(tmp_path)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        iobench.torch.save({"a": lambda: 1}, tmp_path / "m.pt", writer=WRITER)
    assert _listed(tmp_path) == before


def test_files_that_may_not_be_written_stay(sticky, as_nobody) -> None:
    """A rename would replace a file of mode 0400; stock torch refuses, and so do we."""

    path = sticky / "m.pt"

    def save() -> None:
        for mode, saved in ((0o600, True), (0o644, True), (0o400, False)):
            torch.save({"a": 0}, path)
            path.chmod(mode)
            ours = _error(lambda: iobench.torch.save({"a": 1}, path, writer="buffered"))
            assert (ours is None) == saved
            if not saved:
                assert ours == _error(lambda: torch.save({"a": 1}, path))
            assert torch.load(path) == {"a": int(saved)}
            assert stat.S_IMODE(path.stat().st_mode) == mode
            path.unlink()

    iobench.torch.save({"a": 1}, sticky / "first.pt", writer="buffered")  # loads the modules
    as_nobody(save)


def test_devices_and_pipes(tmp_path, log_lines) -> None:
    """/dev/null stays what it is, and a pipe's reader gets the stock file."""
    device = os.stat("/dev/null")
    iobench.torch.save({"a": torch.ones(3)}, "/dev/null", writer=WRITER)
    assert os.stat("/dev/null").st_rdev == device.st_rdev
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    pipe = tmp_path / "m.pt"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    iobench.torch.save({"a": torch.ones(3)}, pipe, writer=WRITER)
    reader.join()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    pipe.unlink()
    torch.save({"a": torch.ones(3)}, pipe)
    assert got == [pipe.read_bytes()]
    assert ["not a regular file" in line for line in log_lines()] == [True, True]


@pytest.mark.parametrize("place", ["no/such/m.pt", "", ".", "..", "dir", "dir/", "file/m.pt"])
def test_places_that_cannot_be(place: str, tmp_path, monkeypatch) -> None:
    """Nothing is made that stock torch would not make; its error is raised."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").touch()
    expected = _error(lambda: torch.save({"a": 1}, place))
    found = _error(lambda: iobench.torch.save({"a": 1}, place, writer=WRITER))
    assert found[0] is expected[0]
    assert sorted(os.listdir()) == ["dir", "file"]


def test_too_little_room_for_both(new_filesystem, log_lines) -> None:
    """Where only the new file in place of the old one has room, torch writes in place."""
    place = new_filesystem("tmpfs", 50 * 2**20) / "m.pt"
    state = {"a": torch.randn(6 * 2**20)}
    iobench.torch.save(state, place, writer="buffered")
    assert log_lines() == []
    state["a"] += 1
    iobench.torch.save(state, place, writer="buffered")
    assert "too little space" in log_lines()[0]
    assert torch.equal(torch.load(place)["a"], state["a"])


def test_a_full_disk(new_filesystem) -> None:
    """An error that torch's callers expect, and OSError's too; what was there stays."""
    directory = new_filesystem("ext4", 48 * 2**20)
    small, large = {"a": torch.ones(9)}, {"a": torch.randn(20 * 2**20)}
    iobench.torch.save(small, directory / "m.pt", writer="odirect")
    iobench.safetensors.save_file(small, directory / "m.safetensors", writer="odirect")
    listed = sorted(os.listdir(directory))
    with pytest.raises(RuntimeError, match="No space left") as failed:
        iobench.torch.save(large, directory / "m.pt", writer="odirect")
    assert isinstance(failed.value, SaveError)
    assert failed.value.errno == 28
    with pytest.raises(SafetensorError, match="No space left"):
        iobench.safetensors.save_file(large, directory / "m.safetensors", writer="odirect")
    assert torch.equal(torch.load(directory / "m.pt")["a"], small["a"])
    assert sorted(os.listdir(directory)) == listed


# safetensors.

TENSORS: dict[str, Callable[[], Any]] = {
    "plain": lambda: {
        "b": torch.randn(3, 4),
        "a": torch.arange(7),
        "é\t": torch.ones(2, dtype=torch.bfloat16),
        "f8": torch.ones(9).to(torch.float8_e4m3fn),
    },
    "parameters": lambda: torch.nn.Linear(4, 4).state_dict(keep_vars=True),
    "scalars and nothing": lambda: {"s": torch.tensor(2.0), "n": torch.zeros(0, 3)},
    "none": dict,
    "views": lambda: dict(zip("ab", torch.randn(2, 50), strict=True)),
    "views that overlap": lambda: dict(zip("ab", torch.ones(1).expand(2, 1), strict=True)),
    "not contiguous": lambda: {"t": torch.randn(3, 4).t()},
    "sparse": lambda: {"s": torch.eye(3).to_sparse()},
    "a list": lambda: [torch.ones(2)],
    "no tensor": lambda: {"a": 1},
    "conjugated": lambda: {"c": torch.randn(4, dtype=torch.complex64).conj()},
    "no dtype of it": lambda: {"c": torch.randn(4, dtype=torch.complex128)},
    "surrogate": lambda: {"\ud800": torch.ones(2)},
}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {}, {"a": 1}], ids=str)
@pytest.mark.parametrize("kind", TENSORS)
def test_save_file_is_stock(kind: str, metadata: Any, tmp_path) -> None:
    """The same bytes and permissions, or the same error; and each side loads the other's."""
    tensors = TENSORS[kind]()
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    expected = _error(lambda: safetensors.torch.save_file(tensors, stock, metadata=metadata))
    found = _error(
        lambda: iobench.safetensors.save_file(tensors, ours, metadata=metadata, writer=WRITER)
    )
    assert (found or (None,))[0] is (expected or (None,))[0]
    if expected is not None:
        return
    assert ours.read_bytes() == stock.read_bytes()
    assert ours.stat().st_mode == stock.stat().st_mode
    if not tensors and metadata == {}:
        return  # the library writes a file then that it cannot read
    loaded = iobench.safetensors.load_file(stock, writer=WRITER)
    again = safetensors.torch.load_file(ours)
    assert list(loaded) == list(again)
    for name, tensor in again.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert loaded[name].untyped_storage().tolist() == tensor.untyped_storage().tolist()


@pytest.mark.parametrize(
    "options", [{"device": "meta"}, {"backend": "pread"}, {"backend": "x"}], ids=str
)
def test_options_of_load_file(options: dict[str, Any], tmp_path) -> None:
    """Each gives what it gives in the library."""
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"a": torch.ones(3)}, path)
    expected = _error(lambda: safetensors.torch.load_file(path, **options))
    assert _error(lambda: iobench.safetensors.load_file(path, writer=WRITER, **options)) == expected


def test_models_that_are_too_large_stay_mapped(tmp_path, log_lines, monkeypatch) -> None:
    """The stock function maps the file, as it does, where reading it would take too much memory."""
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"a": torch.ones(2**20)}, path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    assert torch.equal(iobench.safetensors.load_file(path)["a"], torch.ones(2**20))
    assert "larger than the free memory" in log_lines()[0]


# The default writer.


def test_the_default_writer(tmp_path) -> None:
    """It can be set by name, path or object, and only to one that keeps files."""
    with pytest.raises(UsageError, match="stores nothing"):
        iobench.set_default_writer("null")
    config = tmp_path / "writer.toml"
    config.write_text(iobench.dump_writer(iobench.load_writer("buffered")))
    try:
        iobench.set_default_writer(config)
        assert default_writer.chosen_writer().name == "buffered"
        iobench.torch.save({"a": 1}, tmp_path / "m.pt")
    finally:
        iobench.set_default_writer(None)
    assert default_writer.chosen_writer().name == "hybrid"
    assert iobench.torch.load(tmp_path / "m.pt") == {"a": 1}


def test_the_first_load_of_a_process(tmp_path, log_lines, monkeypatch) -> None:
    """That of a job that resumes: torch has not imported the module of its settings yet."""
    torch.save({"n": 1}, tmp_path / "m.pt")
    monkeypatch.delattr(torch.utils, "serialization", raising=False)
    assert iobench.torch.load(tmp_path / "m.pt", writer=WRITER) == {"n": 1}
    assert log_lines() == []


def test_buckets(server) -> None:
    """Paths may be those of objects where the writer stores objects."""
    state = {"a": torch.randn(30), "b": {"c": 1}}
    with server.active():
        writer = S3Writer(part_size="5MiB", threads=2)
        place = f"{server.target}/step"
        iobench.torch.save(state, f"{place}/m.pt", writer=writer)
        found = iobench.torch.load(f"{place}/m.pt", writer=writer)
        iobench.safetensors.save_file({"a": state["a"]}, f"{place}/m.safetensors", writer=writer)
        loaded = iobench.safetensors.load_file(f"{place}/m.safetensors", writer=writer)
        writer.client.close()
    assert pieces(found) == pieces(state)
    assert torch.equal(loaded["a"], state["a"])
