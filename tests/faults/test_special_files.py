"""A pipe, socket or device with the name of a checkpoint's file: an error at once, never a wait."""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, chdir, contextmanager
from pathlib import Path

import pytest
import torch

import iobench
from iobench.errors import DataMismatchError, IobenchError
from iobench.formats import safetensors, torch_file
from iobench.remote.journal import JOURNAL, DrainJournal
from iobench.writers.registry import make

WRITERS = ("buffered", "uncached", "odirect", "uring", "hybrid")


@contextmanager
def _pipe(path: Path) -> Iterator[None]:
    os.mkfifo(path)
    yield


@contextmanager
def _socket(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as bound:
        with chdir(path.parent):
            bound.bind(path.name)
        yield


@contextmanager
def _device(path: Path) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("making a device needs root")
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    yield


Special = Callable[[Path], AbstractContextManager[None]]

SPECIAL = pytest.mark.parametrize(
    ("special", "kind"), [(_pipe, "pipe"), (_socket, "socket"), (_device, "device")]
)


@SPECIAL
@pytest.mark.parametrize("file_name", ["manifest.json", "state.json", "tensors.safetensors"])
def test_no_file_of_a_checkpoint_stops_a_load(special, kind, file_name, tmp_path) -> None:
    """The error names the file and what it is; a step without a manifest is not a checkpoint."""
    with iobench.Checkpointer(tmp_path, writer="hybrid") as saving:
        saving.save({"a": torch.ones(100), "n": 3}, 1)
        saving.wait()
    file = tmp_path / "step-1" / file_name
    file.unlink()
    with special(file), pytest.raises((IobenchError, FileNotFoundError)) as raised:
        iobench.load_checkpoint(tmp_path)
    if file_name != "manifest.json":
        assert file_name in str(raised.value)
        assert kind in str(raised.value) or isinstance(raised.value, DataMismatchError)


@SPECIAL
@pytest.mark.parametrize("writer", WRITERS)
def test_no_format_waits(special: Special, kind: str, writer, tmp_path) -> None:
    """Single files, by every writer."""
    chosen = make(writer)
    if not chosen.available(tmp_path).ok:
        pytest.skip(f"{writer} is not available here")
    with special(tmp_path / "m"):
        with pytest.raises(IobenchError, match=kind):
            safetensors.load("m", tmp_path, chosen)
        with pytest.raises(IobenchError, match=kind):
            torch_file.load("m", tmp_path, chosen)


@SPECIAL
def test_a_journal(special: Special, kind: str, tmp_path) -> None:
    """`iobench tiers DIR` reads it, and a drain writes it."""
    with special(tmp_path / JOURNAL):
        with pytest.raises(IobenchError, match=kind):
            DrainJournal(tmp_path).read()[0]
        with pytest.raises(IobenchError, match=kind):
            DrainJournal(tmp_path).shorten()
