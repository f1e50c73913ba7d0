"""After a save or a load a Checkpointer keeps no state, no descriptor and no directory."""

from __future__ import annotations

import errno
import gc
import os
import resource
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from iobench import Checkpointer
from iobench.checkpoint.save import Save
from iobench.checkpoint.serialized import Serialized
from iobench.checkpoint.state_tree import flatten
from iobench.errors import TransferError, UnavailableError
from iobench.formats import torch_image
from iobench.integrations.background import BackgroundFiles
from iobench.writers.buffered import BufferedWriter
from iobench.writers.transfer import Transfer


class _Broken(BufferedWriter):
    """Fails every write with the error of `fail`; the tensors are in its frame."""

    def write_many(self, images: Any, target: Any, **options: Any) -> Transfer:
        super().write_many(images, target, **options)
        raise TransferError(errno.EIO, "broken", str(target))

    def write(self, image: Any, target: Any, **options: Any) -> Transfer:
        return self.write_many([image], target, **options)


def _failing_save(save: Any) -> weakref.ref[torch.Tensor]:
    """Save a state, and drop it and the error. Return a reference to its tensor."""
    state = {"w": torch.ones(10)}
    with pytest.raises(TransferError, match="broken"):
        save(state)
    return weakref.ref(state["w"])


def _in_the_background(ckpt: Checkpointer, state: Any) -> None:
    ckpt.save_async(state, 1)
    ckpt.wait()


@pytest.mark.parametrize("lazy", [False, True])
def test_failed_saves_keep_no_state(runs: Path, lazy: bool) -> None:
    """`saves` has their errors, without the frames that hold the state."""
    with Checkpointer(runs, writer=_Broken(), lazy=lazy) as ckpt:
        held = [
            _failing_save(lambda state: ckpt.save(state, 1)),
            _failing_save(lambda state: _in_the_background(ckpt, state)),
        ]
        gc.collect()
        assert [one() for one in held] == [None, None]
        for save in ckpt.saves:
            assert save.status == "failed"
            assert isinstance(save.error, TransferError)
            assert (save.error.errno, save.error.filename is None) == (errno.EIO, False)
            assert save.error.__traceback__ is None


@pytest.mark.parametrize("lazy", [False, True])
def test_a_background_write_keeps_no_state(runs: Path, lazy: bool) -> None:
    """Once a state is copied, its tensors and arrays belong to the trainer alone."""
    go = threading.Event()

    class Waiting(BufferedWriter):
        def write_many(self, images: Any, target: Any, **options: Any) -> Transfer:
            assert go.wait(30)
            return super().write_many(images, target, **options)

    with Checkpointer(runs, writer=Waiting(), lazy=lazy) as ckpt:
        state = {"w": torch.ones(10, requires_grad=True) * 2, "a": np.ones(3)}
        held = [weakref.ref(one) for one in (state["w"], state["a"])]
        ckpt.save_async(state, 1)
        ckpt.before_optimizer_step()
        del state
        gc.collect()
        try:
            assert [one() for one in held] == [None, None]
        finally:
            go.set()
        ckpt.wait()
        assert ckpt.load()["w"].tolist() == [2.0] * 10


def test_failed_files_keep_no_state(runs: Path) -> None:
    """The same for torch files in the background."""
    files = BackgroundFiles(_Broken())

    def save(state: Any) -> None:
        files.save(state, runs / "f.pt")
        files.wait()

    held = _failing_save(save)
    gc.collect()
    assert held() is None
    assert [save.status for save in files.saves] == ["failed"]
    files.close()


def test_errors_of_every_class(runs: Path) -> None:
    """Ours keep their class. An error that cannot be copied becomes its name and text."""

    class StrangeError(Exception):
        def __init__(self, one: str, two: str) -> None:
            super().__init__(f"{one} {two}")

    save = Save(step=1, status="writing", created_s=0)
    save.fail(UnavailableError("s3", "no key.", "Make one."))
    assert isinstance(save.error, UnavailableError)
    assert str(save.error) == "s3 is not available here: no key. Make one."
    assert save.status == "failed"
    save.fail(StrangeError("no", "key"))
    assert isinstance(save.error, RuntimeError)
    assert str(save.error) == "StrangeError: no key"


def test_what_was_loaded(runs: Path) -> None:
    """Only the caller holds the restored state."""
    with Checkpointer(runs, writer="buffered") as ckpt:
        ckpt.save({"w": torch.ones(10)}, 1)
        state = ckpt.load()
        held = weakref.ref(state["w"])
        del state
        gc.collect()
        assert held() is None
        assert ckpt.loaded is not None
        assert (ckpt.loaded.step, ckpt.loaded.passed_over) == (1, {})


def test_reprs_without_tensors(runs: Path) -> None:
    """A traceback or a log shows the form of a state, not its values."""
    plain = {"w": torch.full((3,), 0.12345), "text": "secret"}
    state = Serialized.of(plain)
    layout = torch_image.layout("f.pt", plain, runs)
    shown = repr((state, flatten(plain), state.image(), layout))
    for value in ("0.123", "secret", "tensor(", "array("):
        assert value not in shown


def _descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_failed_saves_keep_no_descriptor(runs: Path) -> None:
    """All are closed, those of directories too."""
    with Checkpointer(runs, writer=_Broken()) as ckpt:
        _failing_save(lambda state: ckpt.save(state, 1))
        before = _descriptors()
        for step in range(3):
            _failing_save(lambda state, step=step: ckpt.save(state, step))
            _failing_save(lambda state: _in_the_background(ckpt, state))
        assert _descriptors() == before
    assert {path.name for path in runs.iterdir()} == {".iobench-lock"}


@contextmanager
def _free_descriptors(count: int) -> Iterator[None]:
    """This process can open only `count` more inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = {int(name) for name in _descriptors()}
    limit = max(opened)
    fill = [os.open("/dev/null", os.O_RDONLY) for _ in range(limit - len(opened) + 1)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max([limit, *fill]) + 1 + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fill:
            os.close(fd)


@pytest.mark.parametrize("writer", ["buffered", "hybrid"])
def test_no_descriptor_left(runs: Path, writer: str) -> None:
    """A save that lacks descriptors at any point leaves no incomplete files."""
    with Checkpointer(runs, writer=writer) as ckpt:
        ckpt.save({"w": torch.ones(10)}, 0)
        errors: list[OSError] = []
        for count in range(12):
            with _free_descriptors(count):
                try:
                    ckpt.save({"w": torch.ones(10)}, count + 1)
                except OSError as error:
                    errors.append(error)
            names = {path.name for path in runs.iterdir()}
            assert names == {".iobench-lock", *(f"step-{step}" for step in ckpt.steps())}
        assert {error.errno for error in errors} == {errno.EMFILE}
        assert not any(getattr(error, "__notes__", []) for error in errors)
        assert 4 < len(errors) < 12
