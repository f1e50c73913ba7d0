"""The `s3` writer and a server that fails in every way a server can, on a real socket."""

from __future__ import annotations

import gc
import importlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from iobench.errors import DataMismatchError, IobenchError, TransferError, UnavailableError
from iobench.testing import content
from iobench.units import MIB
from iobench.writers.image import FileImage
from iobench.writers.s3_retry import THROTTLED, RetryPolicy

pytest.importorskip("boto3", reason="boto3 is not installed")

from iobench.writers.s3 import S3Writer

sys.path.insert(0, str(Path(__file__).parent))
scripted = importlib.import_module("scripted_s3")
sys.path.pop(0)

_SECRET = "SECRETsecretSECRETsecret+/do-not-tell"
_TOKEN = "TOKENtokenTOKENtoken-do-not-tell"
_DATA = content(3 * 5 * MIB + 777)
_TARGET = "s3://bucket/run"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """A server that does as it is told, and credentials that nobody may see."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", _SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", _TOKEN)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setattr(RetryPolicy, "delay_s", lambda _, failures: 0.001 * failures)
    with scripted.scripted_s3() as script:
        yield script
        gc.collect()


@pytest.fixture
def writer(server) -> Iterator[S3Writer]:
    """The writer, as it talks to the server; few attempts, short timeouts."""
    made = S3Writer(
        endpoint_url=server.endpoint_url,
        addressing_style="path",
        part_size="5MiB",
        threads=2,
        max_attempts=4,
        read_timeout_s=2,
    )
    yield made
    made.client.close()


def _image(data=_DATA) -> FileImage:
    return FileImage.of("model", [data])


def _status(status: int, code: str):
    def answer(handler, _) -> bool:
        handler.error(status, code)
        return True

    return answer


def _reset(handler, body) -> bool:
    handler.rfile.read(handler.length // 2)
    handler.reset()
    return True


def _silence(handler, _) -> bool:
    handler.server.script.released.wait(20)
    handler.reset()
    return True


_reset.unread = True  # type: ignore[attr-defined]


def _expect_told(error: BaseException) -> None:
    """Neither the message nor a traceback shows a credential."""
    shown = "".join(traceback.format_exception(error)) + repr(error)
    assert _SECRET not in shown
    assert _TOKEN not in shown


def _save(writer: S3Writer, how: str, data=_DATA):
    if how == "write":
        return writer.write(_image(data), _TARGET)
    with writer.open(f"{_TARGET}/model") as stream:
        for start in range(0, len(data), 3 * MIB):
            stream.write(data[start : start + 3 * MIB])
    return stream.transfer


_HOW = pytest.mark.parametrize("how", ["write", "stream"])


@_HOW
@pytest.mark.parametrize(
    ("operation", "fault", "throttled"),
    [
        ("part", _status(503, "SlowDown"), 3),
        ("part", _status(429, "TooManyRequests"), 3),
        ("part", _status(500, "InternalError"), 0),
        ("part", _reset, 0),
        ("create", _status(503, "SlowDown"), 3),
        ("complete", _status(500, "InternalError"), 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_storms_are_sat_out(server, writer, how, operation, fault, throttled) -> None:
    """Three failures in a row are tried again, counted, and the object is whole."""
    server.fail(operation, fault, times=3, after=1 if operation == "part" else 0)
    moved = _save(writer, how)
    assert server.objects["run/model"] == _DATA.tobytes()
    assert moved.retries == 3
    assert (moved.paths[THROTTLED].operations if THROTTLED in moved.paths else 0) == throttled
    assert moved.paths["part upload"].operations == 4
    assert not server.uploads


@_HOW
@pytest.mark.parametrize("operation", ["part", "complete"])
@pytest.mark.parametrize("fault", [_status(503, "SlowDown"), _status(500, "InternalError"), _reset])
def test_what_never_ends_is_given_up(server, writer, how, operation, fault) -> None:
    """The attempts are bounded; the upload is aborted and the key keeps what it had."""
    server.objects["run/model"] = b"the last good one"
    server.fail(operation, fault, times=99)
    with pytest.raises(TransferError) as caught:
        _save(writer, how)
    _expect_told(caught.value)
    assert server.objects == {"run/model": b"the last good one"}
    assert not server.uploads
    assert server.seen.count(operation) <= 4 * 4


@_HOW
def test_a_200_that_is_none(server, writer, how) -> None:
    """CompleteMultipartUpload may answer 200 and put an error into the body: that is a failure."""
    error = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>no</Message></Error>"

    def answer(handler, _) -> bool:
        handler.answer(200, error)
        return True

    server.fail("complete", answer, times=99)
    with pytest.raises(TransferError, match="InternalError"):
        _save(writer, how)
    assert not server.objects
    assert not server.uploads


def test_a_completion_whose_answer_is_lost(server, writer) -> None:
    """The object is there when the second attempt asks: it is recognised by its ETag."""

    def complete_and_reset(handler, body) -> bool:
        parts = server.uploads.pop(handler.query["uploadId"])
        data = b"".join(parts[n] for n in sorted(parts))
        server.objects[handler.key] = data
        handler.reset()
        server.parts = parts
        return True

    def head(handler, body) -> bool:
        data = server.objects[handler.key]
        handler.answer(200, data, ETag=scripted.part_etag(server.parts))
        return True

    server.fail("complete", complete_and_reset)
    server.fail("head", head, times=9)
    assert writer.write(_image(), _TARGET).retries == 1
    assert server.objects["run/model"] == _DATA.tobytes()


@_HOW
def test_a_part_that_is_never_answered(server, writer, how) -> None:
    """Silence ends with the timeout, and the part is sent again."""
    server.fail("part", _silence)
    moved = _save(writer, how)
    assert moved.retries == 1
    assert server.objects["run/model"] == _DATA.tobytes()


def test_a_part_that_arrives_damaged(server, writer) -> None:
    """A checksum that is not ours is another attempt, and in the end an error."""

    def damaged(handler, body) -> bool:
        handler.answer(200, ETag=scripted.etag(body), x_amz_checksum_crc64nvme="AAAAAAAAAAA=")
        return True

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

    def damaged(handler, body) -> bool:
        server.uploads.pop(handler.query["uploadId"])
        server.objects[handler.key] = b"something else"
        text = scripted._xml(
            "CompleteMultipartUploadResult", ETag='"x-4"', ChecksumCRC64NVME="AAAAAAAAAAA="
        )
        handler.answer(200, text)
        return True

    server.fail("complete", damaged)
    with pytest.raises(TransferError, match="stored something else"):
        writer.write(_image(), _TARGET)
    assert not server.objects


def test_a_server_without_checksums(server, writer) -> None:
    """One that refuses them gets none, which is recorded."""
    server.fail("create", _status(501, "NotImplemented"))
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


# Restores.


def _restore(server, writer, data=_DATA):
    server.objects["run/model"] = data.tobytes()
    back = FileImage.of("model", [bytearray(len(data))])
    moved = writer.read(back, _TARGET)
    assert back.views(0, len(data))[0].tobytes() == data.tobytes()
    return moved


def _half(handler, body) -> bool:
    data = server_data(handler)
    start, end = handler.range()
    part = data[start : end + 1]
    handler.send_response(206)
    handler.send_header("Content-Length", str(len(part)))
    handler.send_header("ETag", scripted.etag(data))
    handler.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
    handler.end_headers()
    handler.wfile.write(part[: len(part) // 2])
    handler.close_connection = True
    return True


def _half_and_reset(handler, body) -> bool:
    _half(handler, body)
    handler.wfile.flush()
    handler.reset()
    return True


def server_data(handler) -> bytes:
    return handler.server.script.objects[handler.key]


@pytest.mark.parametrize(
    "fault", [_half, _half_and_reset, _status(503, "SlowDown"), _status(500, "InternalError")]
)
def test_restores_go_on(server, writer, fault) -> None:
    """Short and broken bodies are continued where they ended; bad answers are asked again."""
    server.fail("get", fault, times=2)
    assert _restore(server, writer).retries == 2


def test_a_body_that_stays_short(server, writer) -> None:
    """A server that always sends half is given up."""
    server.fail("get", _half, times=99)
    with pytest.raises(TransferError) as caught:
        _restore(server, writer)
    _expect_told(caught.value)


def test_a_get_that_is_never_answered(server, writer) -> None:
    """Silence ends with the timeout."""
    server.fail("get", _silence)
    assert _restore(server, writer).retries == 1


def test_200_for_a_range(server, writer) -> None:
    """The whole object in answer to a range is refused: its bytes would land in the wrong place."""

    def whole(handler, body) -> bool:
        data = server_data(handler)
        handler.answer(200, data, ETag=scripted.etag(data))
        return True

    server.fail("get", whole, times=99)
    with pytest.raises(TransferError, match="200 with no Content-Range"):
        _restore(server, writer)


def test_changed_while_it_is_read(server, writer) -> None:
    """Another ETag in the middle of a restore is a mismatch, exit code 4; so is a 412."""

    def other(handler, body) -> bool:
        data = server_data(handler)
        start, end = handler.range()
        total = f"bytes {start}-{end}/{len(data)}"
        handler.answer(206, data[start : end + 1], ETag='"another"', Content_Range=total)
        return True

    server.fail("get", other, after=1)
    with pytest.raises(DataMismatchError, match="was changed while it was read"):
        _restore(server, writer)
    server.fail("get", _status(412, "PreconditionFailed"), after=1)
    with pytest.raises(DataMismatchError, match=r"was changed while it was read \(Pre") as caught:
        _restore(server, writer)
    assert caught.value.exit_code == 4


def test_restored_bytes_are_checked(server, writer) -> None:
    """What came back is compared with the checksum that the object carries."""

    def head(handler, body) -> bool:
        data = server_data(handler)
        handler.answer(200, data, ETag=scripted.etag(data), x_amz_checksum_crc64nvme="AAAAAAAAAAA=")
        return True

    server.fail("head", head)
    with pytest.raises(DataMismatchError, match="what came back has crc64nvme"):
        _restore(server, writer)


# Bad input, and what is said about it.


@pytest.mark.parametrize(
    ("status", "code", "kind", "exit_code", "says"),
    [
        (404, "NoSuchBucket", IobenchError, 2, "no such bucket (NoSuchBucket)"),
        (403, "AccessDenied", UnavailableError, 3, "not permitted (AccessDenied"),
        (400, "ExpiredToken", UnavailableError, 3, "(ExpiredToken). Get new credentials"),
        (403, "InvalidAccessKeyId", UnavailableError, 3, "(InvalidAccessKeyId). Check"),
        (403, "SignatureDoesNotMatch", UnavailableError, 3, "(SignatureDoesNotMatch). Check"),
        (301, "PermanentRedirect", UnavailableError, 3, "another region"),
        (400, "EntityTooLarge", TransferError, 1, "EntityTooLarge"),
    ],
)
def test_refusals(server, writer, status, code, kind, exit_code, says) -> None:
    """Each refusal is one line with the S3 code and what to do, and is not tried again."""
    server.fail("create", _status(status, code), times=99)
    for call in (
        lambda: writer.write(_image(), _TARGET),
        lambda: _save(writer, "stream"),
    ):
        before = server.seen.count("create")
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.exit_code == exit_code
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
        _expect_told(caught.value)
        assert server.seen.count("create") == before + 1
    answer = writer.available(_TARGET)
    assert not answer.ok
    assert code in answer.reason


def test_an_endpoint_that_nobody_answers(writer, server) -> None:
    """Said with the option and the variable that name it; exit code 3 before a run, 1 within."""
    nobody = S3Writer(endpoint_url="http://127.0.0.1:9", max_attempts=2, addressing_style="path")
    answer = nobody.available(_TARGET)
    assert not answer.ok
    assert "AWS_ENDPOINT_URL_S3" in answer.reason
    with pytest.raises(TransferError) as caught:
        nobody.write(_image(), _TARGET)
    _expect_told(caught.value)
    with pytest.raises(UnavailableError):
        nobody.require(_TARGET)


def test_no_credentials(server, writer, monkeypatch) -> None:
    """Without credentials nothing is sent."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    with pytest.raises(UnavailableError, match=r"no credentials were found.*AWS_PROFILE"):
        writer.write(_image(), _TARGET)
    assert not server.seen


def test_the_writer_shows_no_credentials(server, writer) -> None:
    """Neither repr nor options hold any."""
    writer.write(_image(content(100)), _TARGET)
    shown = repr(writer) + repr(writer.options.to_dict()) + repr(writer.client)
    assert "AKID" not in shown
    assert _SECRET not in shown
