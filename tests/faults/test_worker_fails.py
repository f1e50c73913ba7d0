"""One system call of a save fails, in any thread."""

import errno
import functools
import itertools
import os
from collections.abc import Callable, Iterator

import pytest
from aiofiles.threadpool.binary import AsyncFileIO
from support.saves import save

from iobench.errors import TransferError
from iobench.testing import content
from iobench.writers.direct.ring import PyuringRing
from iobench.writers.image import FileImage

_BLOCKS = 32  # more than a buffered stream puts together
_DATA = content(_BLOCKS * 65536 - 100)


class _Nth:
    """A system call of which the `nth` raises `error`, counted from 0 over threads and `calls`."""

    def __init__(
        self, real: Callable[..., object], nth: int, error: BaseException, calls: Iterator[int]
    ) -> None:
        self._real, self._nth, self._error, self._calls = real, nth, error, calls

    def __get__(self, ring: object, kind: type) -> Callable[..., object]:
        """Bind it as a method of a ring."""
        return functools.partial(self, ring)

    def __call__(self, *arguments: object) -> object:
        if len(arguments) > 1 and isinstance(arguments[1], list) and len(arguments[1][0]) == 1:
            return self._real(*arguments)  # a probe of what the kernel takes
        if next(self._calls) == self._nth:
            raise self._error
        return self._real(*arguments)


def _break(
    patch: pytest.MonkeyPatch, name: str, doing: str, nth: int, error: BaseException
) -> None:
    """Make the `nth` call that moves bytes fail, for any of the writer's calls."""
    calls = itertools.count()
    if name == "aiofiles":
        method = {"write": "write", "read": "readinto"}[doing]
        broken = _Nth(getattr(AsyncFileIO, method), nth, error, calls)
        patch.setattr(AsyncFileIO, method, lambda handle, data: broken(handle, data))
        return
    patch.setattr(PyuringRing, doing, _Nth(getattr(PyuringRing, doing), nth, error, calls))
    for call in {"write": ("pwrite", "pwritev"), "read": ("preadv",)}[doing]:
        patch.setattr(os, call, _Nth(getattr(os, call), nth, error, calls))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Return its cause, the cause of that and so on: cuFile's error is between ours and the
    kernel's."""
    cause = error.__cause__
    while cause is not None:
        yield cause
        cause = cause.__cause__


@pytest.mark.parametrize("how", ["write", "stream"])
@pytest.mark.parametrize("nth", [0, 15, _BLOCKS - 1])
def test_a_failing_block(make, names, tmp_path, how, nth) -> None:
    """The caller gets a TransferError with its cause, no file is published, and the writer works
    again."""
    writer = make(tmp_path)
    (tmp_path / "model").write_bytes(b"the last good one")
    cause = OSError(errno.EIO, "I/O error")
    with pytest.MonkeyPatch.context() as patch:
        _break(patch, writer.name, "write", nth, cause)
        with pytest.raises(TransferError) as caught:
            save(writer, how, tmp_path, _DATA)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "model"))
    # libcufile reports the number of the error alone, which is compared above.
    assert writer.name == "gds" or cause in _causes(caught.value)
    assert names(tmp_path) == {"model"}
    assert (tmp_path / "model").read_bytes() == b"the last good one"
    save(writer, how, tmp_path, _DATA)
    assert (tmp_path / "model").read_bytes() == _DATA.tobytes()


@pytest.mark.parametrize(
    ("how", "call"),
    [
        *(("write", call) for call in ("fsync", "ftruncate", "replace")),
        *(("stream", call) for call in ("fsync", "replace")),
    ],
)
def test_a_failing_step(make, names, tmp_path, how, call) -> None:
    """Sync, truncation and rename: each failure is raised, and no file is published."""
    writer = make(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        broken = _Nth(getattr(os, call), 0, OSError(errno.EIO, "I/O error"), itertools.count())
        patch.setattr(os, call, broken)
        with pytest.raises(TransferError) as caught:
            save(writer, how, tmp_path, _DATA)
    assert caught.value.errno == errno.EIO
    assert names(tmp_path) == set()
    save(writer, how, tmp_path, _DATA)
    assert (tmp_path / "model").read_bytes() == _DATA.tobytes()


@pytest.mark.parametrize("how", ["write", "stream"])
@pytest.mark.parametrize("nth", [0, 15])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_other_failures_go_through(make, names, tmp_path, how, nth, kind) -> None:
    """Exceptions other than I/O errors, Ctrl-C above all, propagate unchanged, and no file is
    left."""
    writer = make(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        _break(patch, writer.name, "write", nth, kind())
        with pytest.raises(kind):
            save(writer, how, tmp_path, _DATA)
    assert names(tmp_path) == set()
    save(writer, how, tmp_path, _DATA)
    assert (tmp_path / "model").read_bytes() == _DATA.tobytes()


@pytest.mark.parametrize("nth", [0, 15, _BLOCKS - 1])
def test_a_failing_read(make, names, tmp_path, nth: int) -> None:
    """A restore that fails raises its cause, and the file can still be read."""
    writer = make(tmp_path)
    writer.write(FileImage.of("model", [_DATA]), tmp_path)
    back = FileImage.of("model", [bytearray(len(_DATA))])
    cause = OSError(errno.EIO, "I/O error")
    with pytest.MonkeyPatch.context() as patch:
        _break(patch, writer.name, "read", nth, cause)
        with pytest.raises(TransferError) as caught:
            writer.read(back, tmp_path)
    assert caught.value.errno == errno.EIO
    # libcufile reports the number of the error alone, which is compared above.
    assert writer.name == "gds" or cause in _causes(caught.value)
    writer.read(back, tmp_path)
    assert back.views(0, len(_DATA))[0].tobytes() == _DATA.tobytes()
