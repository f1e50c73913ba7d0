"""`safe_open` by a writer, compared with the stock class: the same tensors, and the same errors."""

import contextlib
import copy
import gc
import itertools
import json
import logging
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.captured import captured
from support.fake_device import FakeBytes, FakeDevice
from support.torchrun import require_own_name

import iobench.safetensors
from iobench.errors import DataMismatchError, UnavailableError
from iobench.formats.safetensors import SafetensorsFile
from iobench.formats.safetensors_header import DTYPES
from iobench.formats.tensor_slices import GAP_BYTES, spans
from iobench.formats.tensors import tensor_bytes
from iobench.integrations import safetensors_open
from iobench.units import MIB
from iobench.writers.config import dump_writer, load_writer
from iobench.writers.odirect import ODirectWriter
from iobench.writers.transfer import Transfer

SCRIPTS = Path(__file__).with_name("scripts")
_PAGE = Path(__file__).parents[2] / "docs/load.md"
_DTYPES = [getattr(torch, name) for name in DTYPES if name != "float4_e2m1fn_x2"]
_SHAPES = [(), (0,), (7,), (5, 9), (3, 0, 4), (2, 3, 4), (1, 1), (64, 129)]


def _content(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype)
    data = tensor_bytes(made)
    data[:] = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, len(data))
    return made


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with every dtype in every shape, and one large tensor."""
    file = tmp_path_factory.mktemp("many") / "many.safetensors"
    tensors = {
        f"{number:03}": _content(shape, dtype, number)
        for number, (shape, dtype) in enumerate(itertools.product(_SHAPES, _DTYPES))
    }
    tensors["large"] = _content((700, 1024), torch.bfloat16, 999)
    save_file(tensors, file, metadata={"format": "pt", 'a"}': "{é\n"})
    return file


def _outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, as something that compares, or the type and the text of its error."""
    try:
        found = call()
    except Exception as error:  # noqa: BLE001 -- compared
        return type(error), str(error)
    if not isinstance(found, torch.Tensor):
        return found
    flat = torch.empty(found.numel(), dtype=found.dtype).copy_(found.reshape(-1))
    return found.dtype, tuple(found.shape), flat.view(torch.uint8).tolist(), found.requires_grad


_INTEGERS = st.integers(-10, 140) | st.integers(-10, 140).map(np.int64)
_SLICES = st.slices(8) | st.builds(slice, st.none() | _INTEGERS, st.none() | _INTEGERS)
_ITEMS = st.one_of(_INTEGERS, _SLICES, _SLICES, st.just(...), st.none())
_OTHERS: list[Any] = [
    *([0, 1], [], True, (..., [0]), torch.tensor([0]), np.array([0]), slice(0, 2, 0), 1.5, "a"),
    *(slice(None, None, -1), slice(0.5, 1), 2**70, slice(2**70), (slice(None), torch.tensor(0))),
]


@settings(max_examples=300)
@example(57, (..., ..., slice(None)))
@given(st.integers(0), st.one_of(_ITEMS, st.lists(_ITEMS, max_size=4).map(tuple)))
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_every_slice(many, number: int, index: Any) -> None:
    """Integers, slices, ellipses and new axes, valid and invalid: the values or the error."""
    _compare(many, number, index)


def _compare(many: Path, number: int, index: Any) -> None:
    stock = safetensors.safe_open(many, framework="pt")
    ours = iobench.safetensors.safe_open(many, framework="pt")
    name = stock.keys()[number % len(stock.keys())]
    wanted, found = (
        _outcome(lambda file=file: file.get_slice(name)[index]) for file in (stock, ours)
    )
    assert found == wanted, (name, index)


@pytest.mark.parametrize("index", _OTHERS, ids=str)
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_other_indices(many, index: Any) -> None:
    """Lists, tensors and nonsense: what torch makes of them."""
    for number in range(0, len(_SHAPES) * len(_DTYPES) + 1, 7):
        _compare(many, number, index)


@pytest.mark.parametrize("writer", ["hybrid", "odirect", "uring", "buffered"])
def test_all_that_is_asked(many, writer) -> None:
    """Names, metadata, shapes, dtypes and whole tensors, in memory of their own."""
    with (
        safetensors.safe_open(many, framework="pt") as stock,
        iobench.safetensors.safe_open(many, framework="pt", writer=writer) as ours,
    ):
        assert isinstance(ours, safetensors_open.OpenFile)
        assert ours.keys() == stock.keys()
        assert ours.offset_keys() == stock.offset_keys()
        assert ours.metadata() == stock.metadata()
        for name, tensor in ours.get_tensors().items():
            assert _outcome(lambda name=name: stock.get_tensor(name)) == _outcome(
                lambda t=tensor: t
            )
            one, other = stock.get_slice(name), ours.get_slice(name)
            assert (one.get_shape(), one.get_dtype()) == (other.get_shape(), other.get_dtype())
        before = tensor_bytes(ours.get_tensor("100")).copy()
        changed = ours.get_tensor("100")
        changed.fill_(1)
        assert tensor_bytes(ours.get_tensor("100")).tolist() == before.tolist()
        for wrong in ("none", 3):
            for method in ("get_tensor", "get_slice"):
                assert _outcome(lambda m=method, w=wrong: getattr(ours, m)(w)) == _outcome(
                    lambda m=method, w=wrong: getattr(stock, m)(w)
                )


def test_packed_values_are_stocks(tmp_path) -> None:
    """Two values in a byte: the stock class counts values, and refuses to cut them."""
    packed = torch.arange(24, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).view(4, 6)
    save_file({"a": packed}, tmp_path / "a.safetensors")
    stock = safetensors.safe_open(tmp_path / "a.safetensors", "pt")
    ours = iobench.safetensors.safe_open(tmp_path / "a.safetensors", "pt")
    assert ours.get_slice("a").get_shape() == stock.get_slice("a").get_shape() == [4, 12]
    assert torch.equal(ours.get_tensor("a").view(torch.uint8), packed.view(torch.uint8))
    assert _outcome(lambda: ours.get_slice("a")[0]) == _outcome(lambda: stock.get_slice("a")[0])


def test_closed_files(many) -> None:
    """Every method raises; slices made before go on, and so do files that no one closes."""
    files = [
        opening(many, framework="pt")
        for opening in (safetensors.safe_open, iobench.safetensors.safe_open)
    ]
    slices = [file.get_slice("large") for file in files]
    for file in files:
        with file as again:
            assert again is file
    for call in ("keys", "offset_keys", "metadata", "get_tensors", "get_tensor", "get_slice"):
        given = ("large",) if call in ("get_tensor", "get_slice") else ()
        stock, ours = (_outcome(partial(getattr(f, call), *given)) for f in files)
        assert stock == ours == (safetensors.SafetensorError, "File is closed")
    assert files[1].__exit__(None, None, None) is None
    stock, ours = (_outcome(lambda s=s: s[3:9, 5:]) for s in slices)
    assert stock == ours
    for kept in (files[1], slices[1]):
        with pytest.raises(TypeError, match="cannot pickle"):
            pickle.dumps(kept)
        with pytest.raises(TypeError, match="cannot pickle"):
            copy.copy(kept)


def test_no_file_stays_open(many) -> None:
    """A handle that is not closed holds no descriptor and no mapping; its tensors stay."""
    maps = Path("/proc/self/maps")
    before = len(os.listdir("/proc/self/fd")), maps.read_text().count(str(many))
    file = iobench.safetensors.safe_open(many, "pt", writer="buffered")
    tensor, part = file.get_tensor("large"), file.get_slice("large")[1:3, ::5]
    assert (len(os.listdir("/proc/self/fd")), maps.read_text().count(str(many))) == before
    del file
    gc.collect()
    assert _outcome(lambda: tensor[1:3, ::5]) == _outcome(lambda: part)


@pytest.mark.parametrize(
    "arguments",
    [
        *((), ("none.safetensors", "pt"), (3, "pt"), (b"x", "pt"), ("/tmp", "pt")),
        *(("{}", "xx"), ("{}", 3), ("{}", "pt", "meta"), ("{}", "pt", "cuda:x"), ("{}", "pt", -1)),
        *(("{}", "np", "cuda"), ("{}", "pt", torch.device("cpu"))),
    ],
    ids=str,
)
def test_arguments_that_stock_refuses(many, arguments: tuple[Any, ...]) -> None:
    given = [str(many) if one == "{}" else one for one in arguments]
    stock = _outcome(lambda: safetensors.safe_open(*given))
    ours = _outcome(lambda: iobench.safetensors.safe_open(*given))
    assert isinstance(stock, tuple)
    assert ours[0] is stock[0]
    assert ours == stock or not arguments  # a missing argument names the function


@pytest.mark.parametrize("damage", ["cut", "empty", "header", "json", "longer", "hole"])
def test_damaged_files(many, tmp_path, damage: str) -> None:
    """A file that is truncated, or whose header is damaged: the stock class's own error."""
    data, file = many.read_bytes(), tmp_path / "bad.safetensors"
    length = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(
        {
            "cut": data[:-1],
            "empty": b"",
            "header": b"\xff" * 8 + data[8:],
            "json": data[:8] + b"x" + data[9:],
            "longer": data + b"x",
            "hole": bytes(length) + data[length:],
        }[damage]
    )
    stock = _outcome(lambda: safetensors.safe_open(file, "pt"))
    assert stock[0] is safetensors.SafetensorError
    assert _outcome(lambda: iobench.safetensors.safe_open(file, "pt")) == stock


def test_what_stock_opens(many, caplog) -> None:
    """Arrays of numpy, and devices that this torch does not see: reported, and never refused."""
    caplog.set_level(logging.WARNING, logger="iobench")
    arrays = iobench.safetensors.safe_open(many, framework="np")
    assert isinstance(arrays, safetensors.safe_open)
    assert isinstance(
        iobench.safetensors.safe_open(many, "pt", None, backend="pread"), safetensors_open.OpenFile
    )
    if not torch.cuda.is_available():
        assert isinstance(iobench.safetensors.safe_open(many, "pt", 0), safetensors.safe_open)
    assert "safetensors.safe_open(" in caplog.text
    assert "framework 'np', not torch" in caplog.text


class _Refusing(ODirectWriter):
    """Reads nothing here."""

    def read_ranges(self, *_: Any) -> Transfer:
        raise UnavailableError("odirect", "no O_DIRECT here.")


def test_reads_that_fail(many, caplog) -> None:
    """The stock class reads what the writer cannot, and what does not fit into the memory."""
    caplog.set_level(logging.WARNING, logger="iobench")
    stock = safetensors.safe_open(many, "pt").get_tensor("large")
    file = iobench.safetensors.safe_open(many, "pt", writer=_Refusing())
    assert _outcome(lambda: file.get_tensor("large")) == _outcome(lambda: stock)
    assert _outcome(lambda: file.get_slice("large")[3]) == _outcome(lambda: stock[3])
    assert caplog.text.count("no O_DIRECT here") == 2
    file = iobench.safetensors.safe_open(many, "pt")
    with mock.patch("iobench.integrations.safetensors_open.available_bytes", return_value=9):
        assert _outcome(lambda: file.get_tensor("large")) == _outcome(lambda: stock)
    assert "larger than the free memory" in caplog.text


def test_a_file_that_was_replaced(many, tmp_path) -> None:
    """Not a byte comes from another file of the same name and size, nor from one that was cut."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(many.read_bytes())
    opened = iobench.safetensors.safe_open(file, "pt")
    opened.get_tensor("large")
    (tmp_path / "new").write_bytes(file.read_bytes())
    os.replace(tmp_path / "new", file)
    with pytest.raises(DataMismatchError, match="was changed while it was open"):
        opened.get_tensor("large")
    opened = iobench.safetensors.safe_open(file, "pt")
    os.truncate(file, 4096)
    with pytest.raises(DataMismatchError, match="was changed while it was open"):
        opened.get_tensor("large")


@pytest.mark.parametrize("writer", ["uring", "hybrid"])
def test_a_forked_child_reads_on(many, writer) -> None:
    """As the workers of a DataLoader do. A process of its own has no threads of other tests."""
    code = (
        "import os, torch, iobench.safetensors\n"
        f"file = iobench.safetensors.safe_open({str(many)!r}, 'pt', writer={writer!r})\n"
        "read = lambda: file.get_tensor('large').view(torch.int16).numpy().tobytes()\n"
        "whole, child = read(), os.fork()\n"
        "same = read() == whole\n"
        "if not child: os._exit(7 if same else 1)\n"
        "assert same and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.fixture
def large(tmp_path: Path) -> Iterator[tuple[Path, torch.Tensor, list[Transfer]]]:
    """A file with a tensor of 6 MiB, its content, and the Transfers of its reads."""
    tensor = _content((3, 1024, 1024), torch.bfloat16, 5)
    save_file(
        {"t": tensor, "small": torch.ones(3), "other": torch.ones(5)}, tmp_path / "a.safetensors"
    )
    return tmp_path / "a.safetensors", tensor, []


@pytest.mark.parametrize(
    ("index", "reads"),
    [
        (slice(1, 2), [2 * MIB]),
        ((slice(None), slice(None), slice(8, 16)), [6 * MIB - 2 * 1016]),
        ((slice(None), slice(100, 200)), [100 * 2048] * 3),
        ((slice(None), slice(100, 700)), [2 * 2 * MIB + 600 * 2048]),
        ((slice(None, None, 2), 5, slice(1, 3)), [4, 4]),
        ((slice(0, 0),), []),
    ],
)
def test_only_the_ranges_that_are_asked(large, index, reads) -> None:
    """Rows exactly; of columns the gaps below 1 MiB too. All ranges are read at once."""
    path, tensor, moved = large
    file = SafetensorsFile(path.name, path.parent, ODirectWriter(), on_read=moved.append)
    stored = file.tensors["t"]
    found = file.read(stored, stored.slice(index))
    assert torch.equal(found.view(torch.uint8), tensor[index].contiguous().view(torch.uint8))
    assert found.is_contiguous()
    assert [one.bytes for one in moved] == ([sum(reads)] if reads else [])
    from_storage = sum(count.bytes for one in moved for count in one.paths.values())
    assert from_storage <= sum(reads) + 2 * 4096 * len(reads)  # whole pages at each end


def test_small_neighbours_are_read_together(large) -> None:
    """One request for the small tensors of a run, however often they are asked for."""
    path, _, moved = large
    file = SafetensorsFile(path.name, path.parent, ODirectWriter(), on_read=moved.append)
    for name, length in [("small", 3), ("other", 5), ("small", 3)]:
        stored = file.tensors[name]
        assert torch.equal(file.read(stored, stored.slice()), torch.ones(length))
    assert [one.bytes for one in moved] == [32]


def test_large_gaps_are_skipped() -> None:
    """Each row is a range of its own where a gap has 1 MiB, and not one byte earlier."""
    for width, ranges in ((GAP_BYTES + 100, 4), (GAP_BYTES + 99, 1)):
        view = torch.empty((4, width), dtype=torch.uint8, device="meta")[:, 7:107]
        found = spans(view)
        assert len(found) == ranges
        assert sum(one.stop - one.start for one in found) == (
            400 if ranges > 1 else 3 * width + 100
        )


def test_on_a_device(large) -> None:
    """A whole tensor goes to the memory of the device; columns are cut before."""
    path, tensor, moved = large
    device = FakeDevice()

    def allocate(size: int) -> FakeBytes:
        return FakeBytes(device, np.zeros(size, np.uint8))

    with mock.patch("iobench.formats.safetensors.allocate_on", return_value=allocate):
        file = SafetensorsFile(path.name, path.parent, ODirectWriter(), on_read=moved.append)
    for index in ((), (slice(None), slice(3), slice(5, 9))):
        found = file.read(file.tensors["t"], file.tensors["t"].slice(index))
        assert torch.equal(found.view(torch.uint8), tensor[index].contiguous().view(torch.uint8))
    assert all("scatter" in one.phases_s for one in moved)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 0.4 MB in one file, as Transformers saves it."""
    directory = tmp_path_factory.mktemp("models") / "Llama-3.1-8B"
    code = (
        "import sys; from transformers import LlamaConfig, LlamaForCausalLM, set_seed\n"
        "set_seed(3)\n"
        "sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=64)\n"
        "heads = dict(num_attention_heads=4, num_key_value_heads=4, use_cache=False)\n"
        "LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", code, directory], check=True, timeout=200)
    return directory


_LINES = re.findall(r"^    (iobench exec .*)$", _PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.exhaustive if "torchrun" in line else [])
        for line in _LINES
    ],
)
def test_unmodified_programs(line: str, model, tmp_path) -> None:
    """Transformers with device_map and with tp_plan, vLLM's loop, and cuts: the same results.

    They are the commands of docs/load.md, with two ranks.
    """
    (tmp_path / "writer.toml").write_text(dump_writer(load_writer("odirect")))
    words = line.split()
    start = words.index("--") + 1
    command: list[Any] = [sys.executable, SCRIPTS / "serve.py", model]
    if words[start] == "torchrun":
        require_own_name()
        run = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
        command = [sys.executable, *run, *command[1:]]
    report = tmp_path / "report.json"
    exec_ = [sys.executable, "-m", *words[: start - 1], "--report", report, "--", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as plain:
        ours = captured(exec_, timeout=200, check=True, cwd=tmp_path)
        wanted = plain.communicate(timeout=200)[0].decode()
    assert re.search(r"logits|tensor", wanted)
    assert sorted(ours.stdout.splitlines()) == sorted(wanted.splitlines())
    counts = json.loads(report.read_text())["functions"]["safetensors.safe_open"]
    assert counts["redirected"]["calls"] >= 2
    assert counts["redirected"]["bytes"] > (model / "model.safetensors").stat().st_size / 2
    assert counts["stock"] == {}
    assert "safetensors.safe_open" in ours.stderr


def test_the_page(model, target, tmp_path, iobench_inside) -> None:
    """Both kinds of `iobench exec` in docs/load.md are run above, `iobench run` and Python here.

    test_ranks_run.py has ranks that load together.
    """
    words, _ = re.findall(r"^    iobench (run .*)$", _PAGE.read_text(), re.MULTILINE)
    small = ("--size", "8MiB", "--repeat", "1", "--no-fio", "--target", target)
    done = iobench_inside(*words.split(), *small, "-o", tmp_path / "run.jsonl")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("restore-as=tp=8") >= 4
    assert "INVALID" not in done.stdout
    assert {line.split()[5] for line in _LINES} == {"python", "torchrun"}
    blocks = re.findall(r"^```python\n(.*?)^```$", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        with contextlib.chdir(model.parent):
            exec(block, {})
