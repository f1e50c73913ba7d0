"""What a failed save has taken in memory is given back."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

from iobench.errors import DataMismatchError, TransferError, UnavailableError
from iobench.testing import BrokenImage, content, expect_raises
from iobench.testing.scripted_s3 import answer
from iobench.units import MIB
from iobench.writers.base import Writer
from iobench.writers.image import FileImage

_SIZE = 8 * MIB
_DATA = content(_SIZE)


def _resident_bytes() -> int:
    """What is held: neither what only cycles hold nor what the C library keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def test_memory(make: Callable[..., Writer], tmp_path: Path) -> None:
    """After many failed saves this process holds no more than after the first few."""
    writer = make(tmp_path, block_size="1MiB")

    def fail() -> None:
        image = BrokenImage.at("model", _DATA, _SIZE - 1)
        expect_raises(TransferError, writer.write, image, tmp_path)
        stream = writer.open(tmp_path / "model")
        stream.write(_DATA)
        stream.abort()

    _expect_steady(fail, 32)


def test_memory_of_objects(server, writer) -> None:
    """The same of uploads, streams and restores that the store lets down; it holds none either."""
    server.objects["run/old"] = _DATA.tobytes()
    room = FileImage.of("old", [bytearray(_SIZE)])

    def fail() -> None:
        for operation in ("part", "complete"):
            server.fail(operation, answer(403, "AccessDenied"), after=operation == "part")
            image = FileImage.of("model", [_DATA])
            expect_raises(UnavailableError, writer.write, image, "s3://bucket/run")
        stream = writer.open("s3://bucket/run/model")
        stream.write(_DATA)
        stream.abort()
        server.fail("get", answer(412, "PreconditionFailed"), after=1)
        expect_raises(DataMismatchError, writer.read, room, "s3://bucket/run")

    _expect_steady(fail, 8)
    assert set(server.objects) == {"run/old"}
    assert not server.uploads


def _expect_steady(fail: Callable[[], None], times: int) -> None:
    for _ in range(4):
        fail()
    before = _resident_bytes()
    for _ in range(times):
        fail()
    assert _resident_bytes() - before < 8 * MIB
