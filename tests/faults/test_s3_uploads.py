"""Uploads to a server that fails in every possible way, on a real socket."""

import contextlib
import threading

import pytest
from support.scripted_s3 import answer, etag, reset, silence

from iobench.errors import IobenchError, TransferError, UnavailableError
from iobench.testing import content
from iobench.units import MIB
from iobench.writers.image import FileImage
from iobench.writers.s3 import S3Writer
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


def _200(handler, _) -> None:
    """CompleteMultipartUpload may answer 200 with an error in the body."""
    error = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>no</Message></Error>"
    handler.answer(200, error)


@_HOW
@pytest.mark.parametrize(
    ("operation", "fault"),
    [
        *(("part", answer(503, "SlowDown")), ("part", reset)),
        *(("complete", answer(500, "InternalError")), ("complete", reset), ("complete", _200)),
    ],
)
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


# Refusals of a store: one line with the code and the remedy, and no secret.


@pytest.mark.parametrize(
    ("status", "code", "kind", "exit_code", "says"),
    [
        (404, "NoSuchBucket", IobenchError, 2, "no such bucket (NoSuchBucket)"),
        (403, "AccessDenied", UnavailableError, 3, "refused (AccessDenied"),
        (400, "ExpiredToken", UnavailableError, 3, "(ExpiredToken: scripted). Get new credentials"),
        (403, "InvalidAccessKeyId", UnavailableError, 3, "(InvalidAccessKeyId: scripted). Check"),
        (
            403,
            "SignatureDoesNotMatch",
            UnavailableError,
            3,
            "(SignatureDoesNotMatch: scripted). Check",
        ),
        (301, "PermanentRedirect", UnavailableError, 3, "another region"),
        (400, "EntityTooLarge", TransferError, 1, "EntityTooLarge"),
    ],
)
def test_refusals(
    server, writer, status, code, kind, exit_code, says, s3_save, expect_no_secret
) -> None:
    """Each refusal is one line with the S3 code and the remedy, and is not retried."""
    server.fail("create", answer(status, code), times=99)
    for call in (lambda: writer.write(_image(), _TARGET), lambda: s3_save(writer, "stream", _DATA)):
        before = server.seen.count("create")
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.exit_code == exit_code
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
        expect_no_secret(caught.value)
        assert server.seen.count("create") == before + 1
    found = writer.available(_TARGET)
    assert not found.ok
    assert code in found.reason


@pytest.mark.parametrize(
    ("fault", "exit_code", "says"),
    [
        (answer(404, "NoSuchBucket"), 2, "(NoSuchBucket); check its name, or create it"),
        (answer(403, "AccessDenied"), 3, "(AccessDenied: scripted). It needs s3:GetObject"),
        (answer(400, "ExpiredToken"), 3, "(ExpiredToken: scripted). Get new credentials"),
        (None, 3, "no credentials were found (NoCredentialsError). Set AWS_PROFILE"),
    ],
)
def test_at_the_command_line(server, iobench_inside, fault, exit_code, says, monkeypatch) -> None:
    """`iobench run` reports it in one line, with the exit code of that kind of error."""
    if fault is None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name)
    else:
        server.fail("create", fault, times=99)
    writer = f"s3,endpoint_url={server.endpoint_url},addressing_style=path"
    done = iobench_inside("run", "--workload", "llama7b", "--writer", writer, "--target", _TARGET)
    assert (done.returncode, done.stdout) == (exit_code, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert says in done.stderr
    assert "do-not-tell" not in done.stderr
    assert fault is not None or not server.seen


def test_an_endpoint_that_does_not_answer(writer, server, expect_no_secret) -> None:
    """The error names the option and the variable; exit code 3 before a run, 1 within."""
    silent = S3Writer(endpoint_url="http://127.0.0.1:9", max_attempts=2, addressing_style="path")
    answer = silent.available(_TARGET)
    assert not answer.ok
    assert "AWS_ENDPOINT_URL_S3" in answer.reason
    with pytest.raises(TransferError) as caught:
        silent.write(_image(), _TARGET)
    expect_no_secret(caught.value)
    with pytest.raises(UnavailableError):
        silent.require(_TARGET)


def test_uploads_of_an_endpoint_that_does_not_answer(server, iobench_inside) -> None:
    """The commands that list and abort uploads report the same."""
    place = {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}
    done = iobench_inside("s3", "abort-uploads", _TARGET, **place)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert "AWS_ENDPOINT_URL_S3" in done.stderr


def test_the_writer_shows_no_credentials(server, writer) -> None:
    """Neither repr nor options have any."""
    writer.write(_image(content(100)), _TARGET)
    shown = repr(writer) + repr(writer.options.to_dict()) + repr(writer.client)
    assert "AKID" not in shown
    assert "do-not-tell" not in shown
