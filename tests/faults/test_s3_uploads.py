"""Uploads to a server that fails in every possible way, on a real socket."""

from __future__ import annotations

import contextlib
import threading

import pytest
from support.scripted_s3 import answer, etag, reset, silence

from iobench.errors import TransferError
from iobench.testing import content
from iobench.units import MIB
from iobench.writers.image import FileImage
from iobench.writers.s3_store.client import THROTTLED

_DATA = content(3 * 5 * MIB + 777)
_TARGET = "s3://bucket/run"


def _image(data=_DATA) -> FileImage:
    return FileImage.of("model", [data])


_HOW = pytest.mark.parametrize("how", ["write", "stream"])


@_HOW
@pytest.mark.parametrize(
    ("operation", "fault", "throttled"),
    [
        ("part", answer(503, "SlowDown"), 3),
        ("part", answer(429, "TooManyRequests"), 3),
        ("part", answer(500, "InternalError"), 0),
        ("part", reset, 0),
        ("create", answer(503, "SlowDown"), 3),
        ("complete", answer(500, "InternalError"), 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_storms_are_sat_out(server, writer, how, operation, fault, throttled, s3_save) -> None:
    """Three failures in a row are retried and counted, and the object is complete."""
    server.fail(operation, fault, times=3, after=1 if operation == "part" else 0)
    moved = s3_save(writer, how, _DATA)
    assert server.objects["run/model"] == _DATA.tobytes()
    assert moved.retries == 3
    assert (moved.paths[THROTTLED].operations if THROTTLED in moved.paths else 0) == throttled
    assert moved.paths["part upload"].operations == 4
    assert not server.uploads


@_HOW
@pytest.mark.parametrize("operation", ["part", "complete"])
@pytest.mark.parametrize("fault", [answer(503, "SlowDown"), answer(500, "InternalError"), reset])
def test_what_never_ends_is_given_up(
    server, writer, how, operation, fault, s3_save, expect_no_secret
) -> None:
    """The attempts are limited; the upload is aborted and the key keeps its object."""
    server.objects["run/model"] = b"the last good one"
    server.fail(operation, fault, times=99)
    with pytest.raises(TransferError) as caught:
        s3_save(writer, how, _DATA)
    expect_no_secret(caught.value)
    assert server.objects == {"run/model": b"the last good one"}
    assert not server.uploads
    assert server.seen.count(operation) <= 4 * 4


@_HOW
def test_a_200_that_is_none(server, writer, how, s3_save) -> None:
    """CompleteMultipartUpload may answer 200 with an error in the body: that is a failure."""
    error = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>no</Message></Error>"

    def answer(handler, _) -> None:
        handler.answer(200, error)

    server.fail("complete", answer, times=99)
    with pytest.raises(TransferError, match="InternalError"):
        s3_save(writer, how, _DATA)
    assert not server.objects
    assert not server.uploads


@_HOW
def test_a_part_that_is_never_answered(server, writer, how, s3_save) -> None:
    """The timeout ends it, and the part is sent again."""
    server.fail("part", silence)
    moved = s3_save(writer, how, _DATA)
    assert moved.retries == 1
    assert server.objects["run/model"] == _DATA.tobytes()


def test_a_part_that_arrives_damaged(server, writer) -> None:
    """A checksum that differs from ours is retried, and is an error in the end."""

    def damaged(handler, body) -> None:
        handler.answer(200, ETag=etag(body), x_amz_checksum_crc64nvme="AAAAAAAAAAA=")

    server.fail("part", damaged)
    assert writer.write(_image(), _TARGET).retries == 1
    assert server.objects.pop("run/model") == _DATA.tobytes()
    server.fail("part", damaged, times=99)
    with pytest.raises(TransferError, match="the server received other bytes"):
        writer.write(_image(), _TARGET)
    assert not server.objects
    assert not server.uploads


def test_a_server_without_checksums(server, writer) -> None:
    """A server that refuses checksums gets none, and that is recorded."""
    server.fail("create", answer(501, "NotImplemented"))
    moved = writer.write(_image(), _TARGET)
    assert server.objects["run/model"] == _DATA.tobytes()
    assert [fallback.wanted for fallback in moved.fallbacks] == ["crc64nvme checksum"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
@_HOW
def test_interrupts_abort(server, writer, how, kind, monkeypatch) -> None:
    """Ctrl-C leaves neither object nor upload, and is raised unchanged."""

    class _Breaks(FileImage):
        def views(self, start, stop):
            if start:
                raise kind
            return super().views(start, stop)

    if how == "write":
        image = _image()
        with pytest.raises(kind):
            writer.write(_Breaks(path="model", segments=image.segments), _TARGET)
    else:

        def save() -> None:
            with writer.open(f"{_TARGET}/model") as stream:
                stream.write(_DATA)
                raise kind

        with pytest.raises(kind):
            save()
    assert not server.objects
    assert not server.uploads


def test_impatience_sends_no_part_after_the_abort(server, writer, impatience) -> None:
    """Ctrl-C again while a stream is aborted: the abort is sent after the last part."""
    arrived, go_on = threading.Semaphore(0), threading.Event()
    ended: list[str] = []

    def slow(handler, body) -> None:
        arrived.release()
        go_on.wait(10)
        ended.append("part")
        handler._part(body)

    def noted(handler, body) -> None:
        ended.append("abort")
        handler._abort(body)

    server.fail("part", slow, times=99)
    server.fail("abort", noted)
    stream = writer.open(f"{_TARGET}/model")
    stream.write(content(2 * 5 * MIB + 1))
    for _ in range(2):
        assert arrived.acquire(timeout=10)
    with impatience(go_on):
        stream.abort()
    assert ended == ["part", "part", "abort"]
    assert not server.uploads


def test_a_stream_that_is_given_up_sends_no_more(server, writer) -> None:
    """Parts that no thread has begun are dropped."""
    stream = writer.open(f"{_TARGET}/model")
    stream._sink._upload.stop.set()
    stream.write(content(5 * MIB + 1))
    stream.abort()
    assert "part" not in server.seen
    assert not server.uploads


def test_an_interrupt_as_a_thread_begins(server, writer, monkeypatch) -> None:
    """Ctrl-C after the start of the first thread: that thread is ended like any other."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "iobench-s3":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), writer.open(f"{_TARGET}/model") as stream:
        stream.write(content(5 * MIB + 1))
    assert not server.uploads


@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize("size", [0, 100, 5 * MIB, 5 * MIB + 1])
def test_a_flush_stores_all_but_the_completion(server, writer, size, entered) -> None:
    """In a `with`, close follows: a small object is one request, and nothing is sent twice."""
    stream = writer.open(f"{_TARGET}/model")
    with stream if entered else contextlib.nullcontext():
        stream.write(content(size))
        stream.flush()
        stored = -(-size // (5 * MIB)) - entered
        assert server.seen.count("part") == max(stored, 0)
        assert "run/model" not in server.objects
    stream.close()
    small = size <= 5 * MIB and entered
    assert server.objects["run/model"] == content(size).tobytes()
    assert server.seen.count("part") == (0 if small or not size else -(-size // (5 * MIB)))
    assert server.seen.count("put") == (1 if small or not size else 0)
    assert not server.uploads
