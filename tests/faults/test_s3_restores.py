"""Restores from a server that fails in every possible way, on a real socket."""

from pathlib import Path

import pytest
import torch
from support.scripted_s3 import answer, etag, silence

from iobench import Checkpointer
from iobench.errors import DataMismatchError, TransferError, UnavailableError
from iobench.formats import safetensors
from iobench.testing import content
from iobench.units import MIB
from iobench.writers.image import FileImage

_DATA = content(3 * 5 * MIB + 777)
_TARGET = "s3://bucket/run"


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
    """Short and broken bodies are continued from their end; bad answers are retried."""
    server.fail("get", fault, times=2)
    assert _restore(server, writer).retries == 2


def test_ranges_of_one_object(server, writer) -> None:
    """One HEAD for all ranges; they are parts of one transfer, in which a broken one goes on."""
    server.objects["run/model"] = _DATA.tobytes()
    server.fail("get", _half)
    ranges = [(1, 5), (7, 6 * MIB), (len(_DATA) - 1, len(_DATA))]
    room = bytearray(len(_DATA))
    moved = writer.read_ranges(FileImage.of("model", [room]), _TARGET, ranges)
    assert (server.seen.count("head"), moved.retries, moved.files) == (1, 1, 1)
    wanted = bytearray(len(_DATA))
    for start, stop in ranges:
        wanted[start:stop] = _DATA[start:stop].tobytes()
    assert room == wanted


def test_a_body_that_stays_short(server, writer, expect_no_secret) -> None:
    """The restore fails if the server always sends half."""
    server.fail("get", _half, times=99)
    with pytest.raises(TransferError) as caught:
        _restore(server, writer)
    expect_no_secret(caught.value)


def test_a_get_that_is_never_answered(server, writer) -> None:
    """The timeout ends it."""
    server.fail("get", silence)
    assert _restore(server, writer).retries == 1


def test_200_for_a_range(server, writer) -> None:
    """The whole object in answer to a range is refused: its bytes would be at the wrong place."""

    def whole(handler, _) -> None:
        data = handler.data
        handler.answer(200, data, ETag=etag(data))

    server.fail("get", whole, times=99)
    with pytest.raises(TransferError, match="200 with no Content-Range"):
        _restore(server, writer)


def test_changed_while_it_is_read(server, writer) -> None:
    """Another ETag during a restore is a mismatch, exit code 4; so is a 412."""

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
    """The bytes are compared with the checksum of the object."""

    def head(handler, _) -> None:
        data = handler.data
        handler.answer(200, data, ETag=etag(data), x_amz_checksum_crc64nvme="AAAAAAAAAAA=")

    server.fail("head", head)
    with pytest.raises(DataMismatchError, match="the restored bytes have crc64nvme"):
        _restore(server, writer)


def _replaced(handler, body) -> None:
    """The object is replaced by another of the same length, then the request is answered."""
    handler.script.objects[handler.key] = handler.data[::-1]
    handler._get(body)


@pytest.mark.parametrize("gets", [1, 2, 3])  # the first one is for the header
def test_a_tensor_file_that_is_replaced(server, writer, gets) -> None:
    """Loading a safetensors file whose object is replaced during the load fails in one line."""
    tensors = {"weight": torch.arange(3 * MIB, dtype=torch.float32)}
    safetensors.save(tensors, "model", _TARGET, writer)
    server.fail("get", _replaced, after=gets)
    with pytest.raises(DataMismatchError) as caught:
        safetensors.load("model", _TARGET, writer)
    assert str(caught.value).startswith("s3://bucket/run/model: was changed while it was read")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


def test_another_header_than_was_looked_at(server, writer) -> None:
    """A replacement between header and data, by a file of the same length, is detected too."""
    old = {"a": torch.zeros(1000), "b": torch.zeros(2000)}
    safetensors.save({"a": torch.ones(2000), "b": torch.ones(1000)}, "model", _TARGET, writer)
    newer = server.objects["run/model"]
    safetensors.save(old, "model", _TARGET, writer)
    assert len(server.objects["run/model"]) == len(newer)

    def replaced(handler, body) -> None:
        handler.script.objects[handler.key] = newer
        handler._head(body)

    server.fail("head", replaced, after=1)
    with pytest.raises(DataMismatchError, match="was changed while it was read"):
        safetensors.load("model", _TARGET, writer)


def test_changed_at_the_command_line(server, iobench_inside) -> None:
    """`iobench run` ends with one line and exit code 4, and no object is left in the bucket."""
    server.fail("get", answer(412, "PreconditionFailed"), times=99, after=1)
    writer = f"s3,endpoint_url={server.endpoint_url},addressing_style=path"
    workload = Path(__file__).parents[1] / "integration" / "tiny.yaml"
    done = iobench_inside(
        *("run", "--workload", workload, "--writer", writer, "--target", _TARGET),
        *("--repeat", "1"),
    )
    assert done.returncode == 4, done.stderr
    assert done.stderr.splitlines()[-1].startswith("iobench run: s3://bucket/run/")
    assert "was changed while it was read (PreconditionFailed)" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not server.objects
    assert not server.uploads


def test_a_manifest_that_cannot_be_read_fails_the_save(server, writer) -> None:
    """Nothing of the new checkpoint stays. The next save reads the manifest again."""
    with Checkpointer("s3://bucket/run", writer=writer) as ckpt:
        ckpt.save({"w": torch.arange(4)}, 1)
    with Checkpointer("s3://bucket/run", writer=writer) as ckpt:
        server.fail("get", answer(403, "AccessDenied"))
        with pytest.raises(UnavailableError, match="AccessDenied"):
            ckpt.save({"w": torch.arange(4)}, 2)
        assert ckpt.steps() == [1]
        ckpt.save({"w": torch.arange(4)}, 2)
        assert ckpt.latest() == 2
