"""Uploads to a server that fails in every way a server can, on a real socket."""

from __future__ import annotations

import threading

import pytest

from iobench.errors import TransferError, UnavailableError
from iobench.testing import content
from iobench.testing.scripted_s3 import answer, etag, part_etag, reset, silence, xml
from iobench.units import MIB
from iobench.writers.image import FileImage
from iobench.writers.s3_retry import THROTTLED, RetryPolicy

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
    """Three failures in a row are tried again, counted, and the object is whole."""
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
    """The attempts are bounded; the upload is aborted and the key keeps what it had."""
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
    """CompleteMultipartUpload may answer 200 and put an error into the body: that is a failure."""
    error = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>no</Message></Error>"

    def answer(handler, _) -> None:
        handler.answer(200, error)

    server.fail("complete", answer, times=99)
    with pytest.raises(TransferError, match="InternalError"):
        s3_save(writer, how, _DATA)
    assert not server.objects
    assert not server.uploads


def test_a_completion_whose_answer_is_lost(server, writer) -> None:
    """The object is there when the second attempt asks: it is recognised by its ETag."""

    def complete_andreset(handler, _) -> None:
        parts = server.uploads.pop(handler.query["uploadId"])
        data = b"".join(parts[n] for n in sorted(parts))
        server.objects[handler.key] = data
        handler.reset()
        server.parts = parts

    def head(handler, _) -> None:
        data = server.objects[handler.key]
        handler.answer(200, data, ETag=part_etag(server.parts))

    server.fail("complete", complete_andreset)
    server.fail("head", head, times=9)
    assert writer.write(_image(), _TARGET).retries == 1
    assert server.objects["run/model"] == _DATA.tobytes()


@_HOW
def test_a_part_that_is_never_answered(server, writer, how, s3_save) -> None:
    """Silence ends with the timeout, and the part is sent again."""
    server.fail("part", silence)
    moved = s3_save(writer, how, _DATA)
    assert moved.retries == 1
    assert server.objects["run/model"] == _DATA.tobytes()


def test_a_part_that_arrives_damaged(server, writer) -> None:
    """A checksum that is not ours is another attempt, and in the end an error."""

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


def test_an_object_that_is_stored_damaged(server, writer) -> None:
    """A checksum of the whole that is not ours: the object is removed and the write fails."""

    def damaged(handler, _) -> None:
        server.uploads.pop(handler.query["uploadId"])
        server.objects[handler.key] = b"something else"
        text = xml("CompleteMultipartUploadResult", ETag='"x-4"', ChecksumCRC64NVME="AAAAAAAAAAA=")
        handler.answer(200, text)

    server.fail("complete", damaged)
    with pytest.raises(TransferError, match="stored something else"):
        writer.write(_image(), _TARGET)
    assert not server.objects


def _untold(handler, _) -> None:
    """Completed, as stores do it that tell checksums of parts but, in this answer, none."""
    parts = handler.script.uploads.pop(handler.query["uploadId"])
    handler.script.objects[handler.key] = b"".join(parts[n] for n in sorted(parts))
    handler.answer(200, xml("CompleteMultipartUploadResult", ETag=part_etag(parts)))


@_HOW
@pytest.mark.parametrize("fault", [answer(500, "InternalError"), reset])
def test_an_object_that_cannot_be_asked_about(server, writer, how, fault, s3_save) -> None:
    """What was stored is asked for several times; without an answer the object is removed."""
    server.fail("complete", _untold, times=2)
    server.fail("head", fault, times=3)
    assert s3_save(writer, how, _DATA).retries == 3
    assert server.objects["run/model"] == _DATA.tobytes()
    server.fail("head", fault, times=99)
    with pytest.raises(TransferError, match=r"checking what was stored: .*; it was removed"):
        s3_save(writer, how, _DATA)
    assert not server.objects


def test_an_object_that_can_be_neither_asked_about_nor_removed(server, writer, s3_save) -> None:
    """The error says that it is still there."""
    server.fail("complete", _untold)
    server.fail("head", answer(500, "InternalError"), times=99)
    server.fail("delete", answer(403, "AccessDenied"), times=99)
    with pytest.raises(TransferError, match=r"checking what was stored: .*is still there"):
        s3_save(writer, "write", _DATA)
    assert "run/model" in server.objects


@pytest.mark.parametrize("kind", [KeyboardInterrupt, UnavailableError])
def test_what_ends_the_asking_removes_the_object_too(
    server, writer, s3_save, monkeypatch, kind
) -> None:
    """Ctrl-C and a refusal arrive as they are, with a note."""

    def interrupted(policy: RetryPolicy, failures: int) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(RetryPolicy, "delay_s", interrupted)
    server.fail("complete", _untold)
    refused = kind is UnavailableError
    server.fail("head", answer(403, "AccessDenied") if refused else answer(500, "InternalError"))
    with pytest.raises(kind) as caught:
        s3_save(writer, "write", _DATA)
    assert "could not be asked what it stored; it was removed" in caught.value.__notes__[0]
    assert not server.objects


def _stored_damaged(handler, body) -> None:
    handler.script.objects[handler.key] = b"X" + body[1:]
    handler.answer(200, ETag=etag(body), x_amz_checksum_crc64nvme="AAAAAAAAAAA=")


@_HOW
@pytest.mark.parametrize("last", [_stored_damaged, answer(500, "InternalError")])
def test_a_small_object_that_is_stored_damaged(server, writer, how, last, s3_save) -> None:
    """Of a PutObject too: another attempt replaces it; after the last it is removed."""
    small = content(777)
    server.fail("put", _stored_damaged)
    assert s3_save(writer, how, small).retries == 1
    assert server.objects["run/model"] == small.tobytes()
    server.fail("put", _stored_damaged)
    server.fail("put", last, times=99)
    with pytest.raises(TransferError, match="it was removed"):
        s3_save(writer, how, small)
    assert not server.objects


def test_a_damaged_object_that_cannot_be_removed(server, writer, s3_save) -> None:
    """The error says that it is still there."""
    server.fail("put", _stored_damaged, times=99)
    server.fail("delete", answer(403, "AccessDenied"), times=99)
    with pytest.raises(TransferError, match=r"received other bytes.*is still there"):
        s3_save(writer, "write", content(777))
    assert "run/model" in server.objects


def test_ctrl_c_after_a_damaged_object(server, writer, s3_save, monkeypatch) -> None:
    """Between two attempts it leaves no damaged object either, and arrives as it is."""

    def interrupted(policy: RetryPolicy, failures: int) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(RetryPolicy, "delay_s", interrupted)
    server.fail("put", _stored_damaged)
    with pytest.raises(KeyboardInterrupt) as caught:
        s3_save(writer, "write", content(777))
    assert "it was removed" in caught.value.__notes__[0]
    assert not server.objects


def test_an_answer_that_tells_nothing_removes_nothing(server, writer, s3_save) -> None:
    """A 200 without an ETag may be anybody's: the write fails and the key keeps what it had."""
    server.objects["run/model"] = b"the last good one"
    server.fail("put", lambda handler, _: handler.answer(200), times=99)
    with pytest.raises(TransferError, match="no ETag"):
        s3_save(writer, "write", content(777))
    assert server.objects == {"run/model": b"the last good one"}


def test_a_server_without_checksums(server, writer) -> None:
    """One that refuses them gets none, which is recorded."""
    server.fail("create", answer(501, "NotImplemented"))
    moved = writer.write(_image(), _TARGET)
    assert server.objects["run/model"] == _DATA.tobytes()
    assert [fallback.wanted for fallback in moved.fallbacks] == ["crc64nvme checksum"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
@_HOW
def test_interrupts_abort(server, writer, how, kind, monkeypatch) -> None:
    """Ctrl-C in the middle leaves neither object nor upload, and arrives as it is."""

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
    """Ctrl-C again while a stream is given up: it is aborted when no part is on its way."""
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
    """A part that no thread has begun by then is dropped."""
    stream = writer.open(f"{_TARGET}/model")
    stream._upload.stop.set()
    stream.write(content(5 * MIB + 1))
    stream.abort()
    assert "part" not in server.seen
    assert not server.uploads


def test_an_interrupt_as_a_thread_begins(server, writer, monkeypatch) -> None:
    """Ctrl-C when the first thread has started: it is ended as any other."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "iobench-s3":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), writer.open(f"{_TARGET}/model") as stream:
        stream.write(content(5 * MIB + 1))
    assert not server.uploads
