"""Restores from a server that fails in every way a server can, on a real socket."""

from __future__ import annotations

import pytest

from iobench.errors import DataMismatchError, TransferError
from iobench.testing import content
from iobench.testing.scripted_s3 import answer, etag, silence
from iobench.units import MIB
from iobench.writers.image import FileImage

_DATA = content(3 * 5 * MIB + 777)
_TARGET = "s3://bucket/run"


def _image(data=_DATA) -> FileImage:
    return FileImage.of("model", [data])


def _restore(server, writer, data=_DATA):
    server.objects["run/model"] = data.tobytes()
    back = FileImage.of("model", [bytearray(len(data))])
    moved = writer.read(back, _TARGET)
    assert back.views(0, len(data))[0].tobytes() == data.tobytes()
    return moved


def _half(handler, _) -> None:
    data = handler.data
    start, end = handler.asked()
    part = data[start : end + 1]
    handler.send_response(206)
    handler.send_header("Content-Length", str(len(part)))
    handler.send_header("ETag", etag(data))
    handler.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
    handler.end_headers()
    handler.wfile.write(part[: len(part) // 2])
    handler.close_connection = True


def _half_and_reset(handler, _) -> None:
    _half(handler, _)
    handler.wfile.flush()
    handler.reset()


@pytest.mark.parametrize(
    "fault", [_half, _half_and_reset, answer(503, "SlowDown"), answer(500, "InternalError")]
)
def test_restores_go_on(server, writer, fault) -> None:
    """Short and broken bodies are continued where they ended; bad answers are asked again."""
    server.fail("get", fault, times=2)
    assert _restore(server, writer).retries == 2


def test_a_body_that_stays_short(server, writer, expect_no_secret) -> None:
    """A server that always sends half is given up."""
    server.fail("get", _half, times=99)
    with pytest.raises(TransferError) as caught:
        _restore(server, writer)
    expect_no_secret(caught.value)


def test_a_get_that_is_never_answered(server, writer) -> None:
    """Silence ends with the timeout."""
    server.fail("get", silence)
    assert _restore(server, writer).retries == 1


def test_200_for_a_range(server, writer) -> None:
    """The whole object in answer to a range is refused: its bytes would land in the wrong place."""

    def whole(handler, _) -> None:
        data = handler.data
        handler.answer(200, data, ETag=etag(data))

    server.fail("get", whole, times=99)
    with pytest.raises(TransferError, match="200 with no Content-Range"):
        _restore(server, writer)


def test_changed_while_it_is_read(server, writer) -> None:
    """Another ETag in the middle of a restore is a mismatch, exit code 4; so is a 412."""

    def other(handler, _) -> None:
        data = handler.data
        start, end = handler.asked()
        total = f"bytes {start}-{end}/{len(data)}"
        handler.answer(206, data[start : end + 1], ETag='"another"', Content_Range=total)

    server.fail("get", other, after=1)
    with pytest.raises(DataMismatchError, match="was changed while it was read"):
        _restore(server, writer)
    server.fail("get", answer(412, "PreconditionFailed"), after=1)
    with pytest.raises(DataMismatchError, match=r"was changed while it was read \(Pre") as caught:
        _restore(server, writer)
    assert caught.value.exit_code == 4


def test_restored_bytes_are_checked(server, writer) -> None:
    """What came back is compared with the checksum that the object carries."""

    def head(handler, _) -> None:
        data = handler.data
        handler.answer(200, data, ETag=etag(data), x_amz_checksum_crc64nvme="AAAAAAAAAAA=")

    server.fail("head", head)
    with pytest.raises(DataMismatchError, match="what came back has crc64nvme"):
        _restore(server, writer)
