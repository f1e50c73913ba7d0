"""Answers that are not the store's: a transfer error, never damage."""

import contextlib
import errno
import threading

import pytest
import torch
from support.forked import in_child
from support.scripted_s3 import answer, etag

from iobench import Checkpointer, load_checkpoint
from iobench.errors import DataMismatchError, TransferError, UnavailableError
from iobench.formats import safetensors, torch_file
from iobench.testing import content
from iobench.units import MIB
from iobench.writers.blocks.workers import Blocks
from iobench.writers.image import FileImage
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store import client
from iobench.writers.s3_store.errors import require_fields

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
