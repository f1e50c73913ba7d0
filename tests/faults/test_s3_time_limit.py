"""A time limit of an S3 client ends its requests, whatever they wait for."""

import contextlib
import socket
import threading

import pytest
from support.scripted_s3 import silence

from iobench.errors import TransferError
from iobench.testing import content
from iobench.units import MIB
from iobench.writers.image import FileImage
from iobench.writers.s3 import S3Writer

_TARGET = "s3://bucket/run"


def _patient(url: str) -> S3Writer:
    """A writer whose own timeouts are longer than a test may take."""
    return S3Writer(
        endpoint_url=url,
        addressing_style="path",
        part_size="5MiB",
        threads=2,
        connect_timeout_s=600,
        read_timeout_s=3600,
    )


@pytest.mark.parametrize(
    ("operation", "size"), [("part", 12 * MIB), ("complete", 6 * MIB), ("put", MIB)]
)
def test_a_server_that_does_not_answer(server, operation: str, size: int) -> None:
    """Nothing is tried again after the limit; without a limit the same writer works again."""
    writer, image = _patient(server.endpoint_url), FileImage.of("model", [content(size)])
    server.fail(operation, silence, times=100)
    limit = writer.client.time_limit
    with pytest.raises(TransferError), limit.within(0.2):
        writer.write(image, _TARGET)
    assert server.seen.count(operation) <= 2  # one for each thread
    assert not limit.passed
    server.forget_faults()
    writer.write(image, _TARGET)
    assert server.objects["run/model"] == content(size).tobytes()
    writer.client.close()


def test_a_server_that_takes_no_connection(server) -> None:
    """A connection that is being made has no socket yet that could be shut down."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as busy, contextlib.ExitStack() as stack:
        for _ in range(2):  # the kernel ignores further ones, as if packets were lost
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(busy.getsockname())
        writer = _patient(f"http://127.0.0.1:{busy.getsockname()[1]}")
        limit = writer.client.time_limit
        with pytest.raises(TransferError), limit.within(0.2):
            writer.write(FileImage.of("model", [content(MIB)]), _TARGET)
        writer.client.close()


def test_waits_between_attempts_end(server) -> None:
    """With and without an event of the caller."""
    writer = _patient(server.endpoint_url)
    limit = writer.client.time_limit
    for stop in (None, threading.Event()):
        with limit.within(0.05):
            assert limit.wait(3600, stop)
    stopped = threading.Event()
    stopped.set()
    assert limit.wait(3600, stopped)
    assert not limit.wait(0, None)
    assert not limit.wait(0, threading.Event())


def test_what_ends_in_time(server) -> None:
    """It is not disturbed. The limit ends what begins later too."""
    writer, image = _patient(server.endpoint_url), FileImage.of("model", [content(MIB)])
    limit = writer.client.time_limit
    with limit.within(3600):
        writer.write(image, _TARGET)
    with limit.within(0.01):
        assert limit.lift()
        assert not limit.wait(0.1, None)
        writer.write(image, _TARGET)
    with limit.within(0):
        assert limit.wait(60, None)
        assert not limit.lift()
        with pytest.raises(TransferError, match="the time limit has passed"):
            writer.write(image, _TARGET)
    writer.client.close()
