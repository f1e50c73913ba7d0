"""Answers that are not the store's, or that come too slowly: a transfer error, never damage."""

import contextlib
import errno
import threading

import pytest
import torch
from support.forked import in_child
from support.scripted_s3 import Fault, answer, etag

from iobench import Checkpointer, load_checkpoint
from iobench.errors import DataMismatchError, TransferError, UnavailableError
from iobench.formats import safetensors, torch_file
from iobench.testing import content
from iobench.units import KIB, MIB
from iobench.writers.blocks.workers import Blocks
from iobench.writers.image import FileImage
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store import client, connection
from iobench.writers.s3_store.errors import require_fields
from iobench.writers.transfer import Meter

_TARGET = "s3://bucket/run"
_STATE = {"w": torch.arange(1000.0), "b": torch.ones(3)}


def _hangs(handler, body) -> None:
    handler.script.released.wait(0.5)
    handler.reset()


_LOADS = {
    "torch": (
        lambda writer: torch_file.save(_STATE, "model", _TARGET, writer),
        lambda writer: torch_file.load("model", _TARGET, writer),
    ),
    "safetensors": (
        lambda writer: safetensors.save(_STATE, "model", _TARGET, writer),
        lambda writer: safetensors.load("model", _TARGET, writer),
    ),
}


def _checkpoint(writer) -> None:
    with Checkpointer(_TARGET, writer=writer) as ckpt:
        ckpt.save(_STATE, 1)


_LOADS["checkpoint"] = (_checkpoint, lambda writer: load_checkpoint(_TARGET, writer=writer))


@pytest.mark.parametrize("kind", _LOADS)
@pytest.mark.parametrize(
    "fault",
    [answer(500, "InternalError"), answer(503, "SlowDown"), _hangs],
    ids=["500", "503", "silence"],
)
def test_requests_that_fail_from_one_on(server, kind, fault) -> None:
    """For each GET or HEAD that fails first: a TransferError, not a damaged file."""
    writer = S3Writer(
        endpoint_url=server.endpoint_url,
        addressing_style="path",
        max_attempts=2,
        read_timeout_s=0.1,
    )
    save, load = _LOADS[kind]
    save(writer)
    for operation in ("get", "head"):
        server.seen.clear()
        load(writer)
        count = server.seen.count(operation)
        assert count
        for after in range(count):
            server.fail(operation, fault, times=99, after=after)
            with pytest.raises(TransferError):
                load(writer)
            server.forget_faults()
    writer.client.close()


def test_damage_is_no_transfer_error(server, writer) -> None:
    """A file that is not a zip, and offsets before its start: the store answered, so the file is
    damaged."""
    server.objects["run/model"] = b"not a zip" * 100
    with pytest.raises(DataMismatchError, match="not a torch zip file"):
        torch_file.load("model", _TARGET, writer)
    with contextlib.closing(writer.open_source(f"{_TARGET}/model")) as source:
        server.seen.clear()
        with pytest.raises(OSError, match="a read at -100") as caught:
            source.read_at([-100], 30)
    assert caught.value.errno == errno.EINVAL
    assert not server.seen


@pytest.mark.parametrize("kind", _LOADS)
def test_sizes_that_no_object_has(server, writer, kind) -> None:
    """HEAD without a size, or with one beyond S3's limit, is a transfer error after retries."""
    save, load = _LOADS[kind]
    save(writer)
    for size in (None, "-1", str(2**60), str(2**63), "much", "1, 2"):

        def head(handler, _, size=size) -> None:
            handler.send_response(200)
            handler.send_header("ETag", etag(handler.data))
            if size is not None:
                handler.send_header("Content-Length", size)
            handler.end_headers()
            handler.close_connection = True

        server.fail("head", head)
        load(writer)
        server.fail("head", head, times=99)
        with pytest.raises(TransferError):
            load(writer)
        server.forget_faults()


@pytest.mark.parametrize("kind", _LOADS)
@pytest.mark.parametrize("size", [2**42, 5])
def test_a_size_that_is_not_the_objects(server, writer, size, kind) -> None:
    """No memory of that size is allocated; the ranges show the real size."""
    save, load = _LOADS[kind]
    save(writer)
    lie = {"Content_Length": str(size)}
    server.fail("head", lambda h, _: h.answer(200, b"", ETag=etag(h.data), **lie), times=99)
    with pytest.raises((TransferError, DataMismatchError)):
        load(writer)


def test_an_object_without_an_etag(server, writer) -> None:
    """A web page in answer to HEAD, and to GET: neither is an object."""
    server.objects["run/model"] = b"x" * 100
    image = FileImage.of("model", [bytearray(100)])
    server.fail("head", lambda h, _: h.answer(200, b"x" * 100), times=99)
    with pytest.raises(TransferError, match="the server's answer has no ETag"):
        writer.read(image, _TARGET)
    server.forget_faults()

    def page(handler, _) -> None:  # in chunks: no Content-Length
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"4\r\npage\r\n0\r\n\r\n")

    server.fail("get", page, times=99)
    with pytest.raises(TransferError, match="no Content-Range and an unknown number of bytes"):
        writer.read(image, _TARGET)


def _trickles(handler, _) -> None:
    """One byte at a time, each well before the timeout of a receive."""
    data = handler.data
    start, end = handler.asked()
    handler.send_response(206)
    handler.send_header("Content-Length", str(end + 1 - start))
    handler.send_header("ETag", etag(data))
    handler.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
    handler.end_headers()
    for at in range(start, end + 1):
        handler.wfile.write(data[at : at + 1])
        handler.wfile.flush()
        if handler.script.released.wait(0.01):
            return


def test_a_body_that_trickles(server) -> None:
    """A rate below the floor is a timeout: the rest is requested again, up to a limit."""
    writer = S3Writer(
        endpoint_url=server.endpoint_url,
        addressing_style="path",
        max_attempts=2,
        read_timeout_s=0.2,
    )
    data = content(MIB)
    server.objects["run/model"] = data.tobytes()
    image = FileImage.of("model", [bytearray(MIB)])
    server.fail("get", _trickles)
    assert writer.read(image, _TARGET).retries == 1
    assert image.views(0, MIB)[0].tobytes() == data.tobytes()
    server.fail("get", _trickles, times=99)
    with pytest.raises(TransferError, match="less than 1 KiB/s"):
        writer.read(image, _TARGET)
    writer.client.close()


def _drips(part: str) -> Fault:
    """A fault: a header or a body that arrives one byte at a time, without an end."""

    def fault(handler, _) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\n")
        if part == "body":
            handler.wfile.write(b"Content-Length: 100000\r\n\r\n<?xml version='1.0'?>")
        with contextlib.suppress(OSError):  # the client has given up
            while not handler.script.released.wait(0.005):
                handler.wfile.write(b" ")
                handler.wfile.flush()
        handler.close_connection = True

    return fault


_CONTROL = {
    "list": lambda s3, where: s3.list_objects_v2(Bucket=where["Bucket"]),
    "head": lambda s3, where: s3.head_object(**where),
    "create": lambda s3, where: s3.create_multipart_upload(**where),
    "complete": lambda s3, where: s3.complete_multipart_upload(**where, UploadId="1"),
    "remove": lambda s3, where: s3.delete_objects(
        Bucket=where["Bucket"], Delete={"Objects": [{"Key": where["Key"]}]}
    ),
    "put": lambda s3, where: s3.put_object(**where, Body=b"x"),
    "delete": lambda s3, where: s3.delete_object(**where),
}


@pytest.mark.parametrize(
    ("operation", "part"),
    [(name, "header") for name in _CONTROL]
    + [(name, "body") for name in ("list", "create", "complete", "remove", "put")],
)
def test_control_answers_that_trickle(server, monkeypatch, operation, part) -> None:
    """Every answer has the floor, also in its header, and on a reused connection."""
    made = connection._Answer
    # Far below the timeout of a receive.
    monkeypatch.setattr(connection, "_Answer", lambda raw, _: made(raw, 0.05))
    writer = S3Writer(endpoint_url=server.endpoint_url, addressing_style="path", max_attempts=1)
    where = {"Bucket": "bucket", "Key": "run/model"}
    server.objects["run/model"] = b"x"

    def call(name: str) -> None:
        writer.client.call(
            lambda s3: _CONTROL[name](s3, where), Meter(), doing="asking", where=_TARGET
        )

    for _ in range(2):
        server.fail(operation, _drips(part))
        with pytest.raises(TransferError, match="less than 1 KiB/s"):
            call(operation)
        server.objects["run/model"] = b"x"
        call("head")
    writer.client.close()


def test_a_completion_may_take_minutes(server, monkeypatch) -> None:
    """S3 sends spaces during that time: only this answer has a longer window, on the same
    connection."""
    windows: list[float] = []
    made = connection._Answer

    def noted(raw, window_s: float) -> connection._Answer:
        windows.append(window_s)
        return made(raw, window_s)

    monkeypatch.setattr(connection, "_Answer", noted)
    writer = S3Writer(endpoint_url=server.endpoint_url, addressing_style="path")
    s3, where = writer.client.boto3, {"Bucket": "bucket", "Key": "run/model"}
    upload = s3.create_multipart_upload(**where)["UploadId"]
    s3.complete_multipart_upload(**where, UploadId=upload)
    s3.head_object(**where)
    assert windows == [60.0, 900.0, 60.0]
    writer.client.close()


def test_the_floor_on_the_rate() -> None:
    """With a fake clock: from the first byte on, in windows, and never before the end of a
    window."""
    answer = connection._Answer(None, 10.0)
    answer._arrived(1, 100.0)  # however late the first byte is
    answer._arrived(1, 109.9)
    answer._arrived(10 * KIB - 2, 110.0)  # just enough, and a new window begins
    answer._arrived(10 * KIB, 119.9)
    with pytest.raises(connection.SlowAnswerError, match=r"10240 bytes arrived in 10\.1 s"):
        answer._arrived(0, 120.1)


def test_a_forked_child_has_connections_of_its_own(server) -> None:
    """On those of its parent each would get the other's answers."""
    writer = S3Writer(endpoint_url=server.endpoint_url, addressing_style="path", threads=1)
    for name in "ab":
        writer.write(FileImage.of(name, [content(100, ord(name))]), _TARGET)
    parents, limit = writer.client.boto3, writer.client.time_limit

    def read() -> None:
        back = bytearray(100)
        writer.read(FileImage.of("a", [back]), _TARGET)
        assert back == content(100, ord("a")).tobytes()
        assert writer.client.boto3 is not parents
        assert writer.client.time_limit is not limit

    in_child(read)
    assert writer.client.boto3 is parents
    writer.client.close()


def test_the_probe_tries_as_often_as_others(server, writer) -> None:
    """`max_attempts` applies to it, and it leaves nothing."""
    server.fail("create", answer(503, "SlowDown"), times=3)
    server.fail("abort", answer(503, "SlowDown"), times=3)
    assert writer.available(_TARGET).ok
    assert not server.uploads
    assert server.seen.count("create") == 4
    server.fail("create", lambda h, _: h.answer(200, b"<html/>"), times=99)
    found = writer.available(_TARGET)
    assert "the server's answer has no UploadId" in found.reason
    once = S3Writer(endpoint_url=server.endpoint_url, addressing_style="path", max_attempts=1)
    server.seen.clear()
    assert not once.available(_TARGET).ok
    assert server.seen == ["create"]
    once.client.close()


def test_a_probe_that_cannot_be_aborted(server, writer) -> None:
    """The refusal is raised, with the command that aborts the rest."""
    server.fail("abort", answer(403, "AccessDenied"), times=99)
    with pytest.raises(UnavailableError, match="AccessDenied") as caught:
        writer.require(_TARGET)
    assert "iobench s3 abort-uploads s3://bucket/run/.iobench-probe" in caught.value.__notes__[0]


@pytest.mark.parametrize("operation", ["part", "get"])
def test_the_first_failure_is_the_one_that_is_raised(
    server, writer, monkeypatch, operation
) -> None:
    """One part is refused while another waits for its retry: the refusal is raised, not SlowDown.
    It is noted before the wait ends, so the failure of the waiting worker is the second one."""
    throttled, waits = threading.Event(), threading.Event()
    given_up: list[threading.Event] = []
    order: list[str] = []
    wait_for, set_it, cancel = threading.Event.wait, threading.Event.set, Blocks.cancel

    def slow_down(handler, _) -> None:
        handler.error(503, "SlowDown")
        throttled.set()

    def denied(handler, _) -> None:
        assert throttled.wait(10)
        assert waits.wait(10)
        handler.error(403, "AccessDenied")

    def wait(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout == 61.0:
            given_up.append(event)
            waits.set()
        return wait_for(event, timeout)

    def set_and_noted(event: threading.Event) -> None:
        if event in given_up:
            order.append("wait ends")
        set_it(event)

    def cancel_and_noted(blocks: Blocks) -> None:
        order.append("failure noted")
        cancel(blocks)

    data = content(2 * 5 * MIB)
    server.objects["run/model"] = data.tobytes()
    monkeypatch.setattr(client, "delay_s", lambda _: 61.0)
    monkeypatch.setattr(threading.Event, "wait", wait)
    monkeypatch.setattr(threading.Event, "set", set_and_noted)
    monkeypatch.setattr(Blocks, "cancel", cancel_and_noted)
    server.fail(operation, slow_down)
    server.fail(operation, denied)
    image = FileImage.of("model", [bytearray(data)])
    with pytest.raises(UnavailableError, match="AccessDenied"):
        (writer.write if operation == "part" else writer.read)(image, _TARGET)
    assert order[:2] == ["failure noted", "wait ends"]


def test_what_an_answer_lacks() -> None:
    """Zero is a value, an empty text is not."""
    assert require_fields({"ContentLength": 0}, "ContentLength") == {"ContentLength": 0}
    with pytest.raises(OSError, match="no ETag"):
        require_fields({"ETag": ""}, "ETag")
