"""A save is durable only with the store's proof; it removes only what it stored damaged itself."""

import itertools
import re

import pytest
import torch
from support.scripted_s3 import Handler, answer, etag, reset, xml

from iobench import Checkpointer, KeepLast, load_checkpoint
from iobench.errors import IobenchError, TransferError, UnavailableError
from iobench.testing import content
from iobench.units import MIB
from iobench.writers.s3_store import client
from iobench.writers.s3_store.parts import Checksum

_DATA = content(5 * MIB + 777)
_SMALL = content(777)
_TARGET = "s3://bucket/run"
_OLD = b"the last good one"
_WRONG = "AAAAAAAAAAA="
_PAGES = [b"", b"<html><body>please log in</body></html>"]

_HOW = pytest.mark.parametrize("how", ["write", "stream"])
_PAGE = pytest.mark.parametrize("page", _PAGES, ids=["empty", "html"])


def _says(page: bytes):
    """A fault: a proxy answers 200 in place of the store."""
    return lambda handler, _: handler.answer(200, page, Content_Type="text/html")


def _forwards(page: bytes):
    """A fault: the same, and the store also gets the request."""

    def fault(handler, _) -> None:
        if handler.query["uploadId"] in handler.script.uploads:
            handler.put_together()
        handler.answer(200, page, Content_Type="text/html")

    return fault


def _crc64nvme(data: bytes) -> dict[str, str]:
    checksum = Checksum.named("crc64nvme")
    return {"x-amz-checksum-crc64nvme": checksum.text(checksum.update(memoryview(data)))}


def _set_checksums(server, returned: str) -> None:
    """The server returns its checksums with every answer, by HEAD alone, or never."""
    server.returns_checksums = returned == "always"
    server.head_checksum = (lambda _: {}) if returned == "never" else _crc64nvme


_RETURNED = pytest.mark.parametrize("returned", ["always", "by HEAD", "never"])


@_HOW
@_PAGE
@_RETURNED
def test_a_completion_that_only_a_proxy_answers(
    server, writer, how, page, returned, s3_save
) -> None:
    """It is repeated; without proof the save fails, the old object stays, and no upload is left."""
    _set_checksums(server, returned)
    server.fail("complete", _says(page))
    assert s3_save(writer, how, _DATA).retries == 1
    assert server.objects.pop("run/model") == _DATA.tobytes()
    old = bytes(len(_DATA))  # its size proves nothing
    server.objects["run/model"] = old
    server.fail("complete", _says(page), times=99)
    with pytest.raises(TransferError, match="completing the upload"):
        s3_save(writer, how, _DATA)
    assert server.objects == {"run/model": old}
    assert not server.uploads


@_HOW
@_PAGE
@pytest.mark.parametrize("times", [1, 99])
def test_a_completion_whose_answer_is_lost(server, writer, how, page, times, s3_save) -> None:
    """HEAD finds the object, with the ETag or the checksum of the sent bytes."""
    server.objects["run/model"] = _OLD
    server.fail("complete", _forwards(page), times=times)
    moved = s3_save(writer, how, _DATA)
    assert moved.retries == min(times, 3)
    assert server.objects["run/model"] == _DATA.tobytes()
    assert not server.uploads

    def other_etag(handler, _) -> None:  # a store that encrypts
        handler.answer(200, handler.data, ETag='"opaque"', **_crc64nvme(handler.data))

    server.objects["run/model"] = _OLD
    server.fail("complete", _forwards(page), times=times)
    server.fail("head", other_etag, times=99)
    s3_save(writer, how, _DATA)
    assert server.objects["run/model"] == _DATA.tobytes()


def test_a_lost_answer_without_any_proof(server, writer, s3_save) -> None:
    """The store replaced the object without a proof: the save fails, and nothing is removed."""
    server.fail("complete", reset, times=99)
    server.fail("head", answer(403, "AccessDenied"), times=99)
    with pytest.raises(TransferError, match="completing the upload") as caught:
        s3_save(writer, "write", _DATA)
    assert "its content is not known" in caught.value.__notes__[0]
    assert "delete" not in server.seen
    assert not server.uploads


def test_a_lost_answer_and_the_same_bytes_as_before(server, writer, s3_save) -> None:
    """The key has the same bytes from an earlier save: the new upload is aborted."""
    s3_save(writer, "write", _DATA)
    server.fail("complete", _says(b""), times=99)
    s3_save(writer, "write", _DATA)
    assert server.objects["run/model"] == _DATA.tobytes()
    assert not server.uploads


def test_an_upload_that_another_ended(server, writer, s3_save) -> None:
    """NoSuchUpload, and the key has another object: the save fails and the object stays."""
    server.objects["run/model"] = _OLD

    def aborted(handler, _) -> None:
        handler.script.uploads.clear()
        handler.error(404, "NoSuchUpload")

    server.fail("complete", aborted)
    with pytest.raises(TransferError, match="NoSuchUpload"):
        s3_save(writer, "write", _DATA)
    assert server.objects == {"run/model": _OLD}


def _invented(handler, _) -> None:
    handler.answer(200, xml("CompleteMultipartUploadResult", ETag=etag(b"invented")))


def _not_stored(handler, _) -> None:
    handler.script.uploads.clear()
    handler.answer(200, xml("CompleteMultipartUploadResult", ETag='"of-the-new-one-4"'))


def _damaged(handler, _) -> None:
    handler.script.uploads.pop(handler.query["uploadId"])
    handler.store(b"something else", '"x-4"')
    text = xml("CompleteMultipartUploadResult", ETag='"x-4"', ChecksumCRC64NVME=_WRONG)
    handler.answer(200, text)


@_HOW
@pytest.mark.parametrize("fault", [_invented, _not_stored, _damaged])
def test_another_object_than_was_completed(server, writer, how, fault, s3_save) -> None:
    """The store's checksum disproves it: what is under the key stays, the upload is aborted."""
    _set_checksums(server, "by HEAD")
    server.objects["run/model"] = _OLD
    server.fail("complete", fault)
    with pytest.raises(TransferError, match=r"stored something else.*which was left there"):
        s3_save(writer, how, _DATA)
    assert server.objects == {"run/model": b"something else" if fault is _damaged else _OLD}
    assert not server.uploads


@pytest.mark.parametrize("data", [_SMALL, _DATA], ids=["put", "parts"])
def test_bytes_that_flip_on_the_way(server, writer, data, s3_save) -> None:
    """A store that returns a checksum by HEAD only: the save fails."""
    _set_checksums(server, "by HEAD")

    def flipped(handler, body) -> None:
        getattr(Handler, f"_{handler.operation}")(handler, b"X" + body[1:])

    server.fail("put" if data is _SMALL else "part", flipped)
    with pytest.raises(TransferError, match="stored something else"):
        s3_save(writer, "write", data)
    assert "delete" not in server.seen
    assert not s3_save(writer, "write", data).fallbacks
    assert server.objects["run/model"] == data.tobytes()


@pytest.mark.parametrize("page", [*_PAGES, b"<!DOCTYPE html><p>please log in"])
def test_an_upload_that_only_a_proxy_begins(server, writer, page, s3_save) -> None:
    """An answer without UploadId is retried, and is an error in the end."""
    server.fail("create", _says(page))
    assert s3_save(writer, "write", _DATA).retries == 1
    server.fail("create", _says(page), times=99)
    with pytest.raises(TransferError):
        s3_save(writer, "write", _DATA)


@_PAGE
def test_lists_that_only_a_proxy_answers(server, writer, page) -> None:
    """A web page is not an empty list: otherwise steps would seem to be missing."""
    with Checkpointer(_TARGET, writer=writer) as ckpt:
        ckpt.save({"step": 1}, 1)
        for operation in ("list", "pending"):
            server.fail(operation, _says(page), times=99)
            with pytest.raises(TransferError, match="listing"):
                ckpt.steps()
            server.forget_faults()
        server.fail("remove", _says(page))
        ckpt.remove(1)
    assert not server.objects


def _state(step: int) -> dict[str, object]:
    return {"w": torch.full((MIB + MIB // 2,), float(step)), "step": step}


def test_a_step_loses_its_manifest_first(server, writer) -> None:
    """A removal that is interrupted leaves a prefix without a manifest, which is not a
    checkpoint."""
    removed: list[list[str]] = []

    def note(handler, body: bytes) -> None:
        removed.append(re.findall(r"<Key>(.*?)</Key>", body.decode()))
        handler._remove(body)

    server.fail("remove", note, times=99)
    with Checkpointer(_TARGET, writer=writer) as ckpt:
        ckpt.save(_state(1), 1)
        ckpt.remove(1)
        assert removed[0] == ["run/step-1/manifest.json"]
    assert not server.objects


@_RETURNED
def test_retention_behind_a_broken_proxy(server, writer, returned) -> None:
    """The step before stays complete, for any request that the proxy answers in any way."""
    _set_checksums(server, returned)
    cases = [(operation, 0) for operation in ("complete", "create", "put")] + [("put", 1)]
    with Checkpointer(_TARGET, writer=writer, keep=KeepLast(1)) as ckpt:
        ckpt.save(_state(1), 1)
        before = dict(server.objects)
        for (operation, after), page in itertools.product(cases, _PAGES):
            server.fail(operation, _says(page), times=99, after=after)
            if page:
                with pytest.raises(TransferError):
                    ckpt.save(_state(2), 2)
            else:
                ckpt.save_async(_state(2), 2)
                with pytest.raises(TransferError):
                    ckpt.wait()
            server.forget_faults()
            assert server.objects == before
            assert not server.uploads
            assert ckpt.steps() == [1]
        ckpt.save(_state(3), 3)
        assert ckpt.steps() == [3]
    assert load_checkpoint(_TARGET, writer=writer)["step"] == 3


def test_a_manifest_is_removed_first(server, writer) -> None:
    """A save that fails after storing its manifest leaves no step with missing files."""

    def partly(handler, body) -> None:
        handler._remove(re.sub(rb"<Key>[^<]*manifest[^<]*</Key>", b"", body))

    server.fail("put", lambda h, body: (h.store(body), h.answer(200)), times=99, after=2)
    server.fail("remove", partly, times=99)
    server.fail("delete", answer(403, "AccessDenied"), times=99)
    with Checkpointer(_TARGET, writer=writer) as ckpt:
        with pytest.raises(IobenchError):
            ckpt.save({"step": 1}, 1)
        server.forget_faults()
        if ckpt.steps():
            assert ckpt.load() == {"step": 1}


def _without_checksum(handler, _) -> None:
    """Completed by a store that returns no checksum in this answer."""
    handler.answer(200, xml("CompleteMultipartUploadResult", ETag=handler.put_together()))


@_HOW
@pytest.mark.parametrize("fault", [answer(500, "InternalError"), reset])
def test_an_object_that_cannot_be_asked_about(server, writer, how, fault, s3_save) -> None:
    """HEAD is repeated; in the end the save fails, and the complete object stays."""
    server.fail("complete", _without_checksum, times=2)
    server.fail("head", fault, times=3)
    assert s3_save(writer, how, _DATA).retries == 3
    assert server.objects["run/model"] == _DATA.tobytes()
    server.objects["run/model"] = _OLD
    server.fail("head", fault, times=4)
    with pytest.raises(TransferError, match=r"checking what was stored: .*complete") as caught:
        s3_save(writer, how, _DATA)
    assert server.objects["run/model"] == _DATA.tobytes()
    found = writer.client.boto3.head_object(Bucket="bucket", Key="run/model")
    assert f"with the ETag {found['ETag']}, so it was left there" in str(caught.value)
    assert "only its crc64nvme could not be compared" in str(caught.value)
    assert not {"delete", "remove"} & {*server.seen}
    assert not server.uploads


@pytest.mark.parametrize("kind", [KeyboardInterrupt, UnavailableError])
def test_what_ends_the_asking_leaves_the_object_too(
    server, writer, s3_save, monkeypatch, kind
) -> None:
    """Ctrl-C and a refusal are raised unchanged, with a note."""

    def interrupted(failures: int) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "delay_s", interrupted)
    server.fail("complete", _without_checksum)
    refused = kind is UnavailableError
    server.fail("head", answer(403, "AccessDenied") if refused else answer(500, "InternalError"))
    with pytest.raises(kind) as caught:
        s3_save(writer, "write", _DATA)
    assert "could not be compared" in caught.value.__notes__[0]
    assert server.objects["run/model"] == _DATA.tobytes()
    assert "delete" not in server.seen


def _stored_damaged(handler, body) -> None:
    stored = b"X" + body[1:]
    handler.store(stored)
    handler.answer(200, ETag=etag(stored), x_amz_checksum_crc64nvme=_WRONG)


@_HOW
@pytest.mark.parametrize("last", [_stored_damaged, answer(500, "InternalError")])
def test_a_small_object_that_is_stored_damaged(server, writer, how, last, s3_save) -> None:
    """Also of a PutObject: another attempt replaces it, and without one the write fails."""
    server.fail("put", _stored_damaged)
    assert s3_save(writer, how, _SMALL).retries == 1
    assert server.objects["run/model"] == _SMALL.tobytes()
    server.fail("put", _stored_damaged)
    server.fail("put", last, times=99)
    with pytest.raises(
        TransferError, match="received other bytes" if last is _stored_damaged else "InternalError"
    ):
        s3_save(writer, how, _SMALL)


@pytest.mark.parametrize(
    ("headers", "times", "text"),
    [
        ({"ETag": '"of-a-page"', "x_amz_checksum_crc64nvme": _WRONG}, 99, "other bytes"),
        ({"ETag": '"of-a-page"'}, 1, r"stored something else.*which was left there"),
        ({}, 99, "no ETag"),
    ],
)
def test_a_put_that_only_a_proxy_answers(server, writer, headers, times, text, s3_save) -> None:
    """An answer that is not the store's removes nothing: the write fails."""
    server.objects["run/model"] = _OLD
    server.fail("put", lambda handler, _: handler.answer(200, **headers), times=times)
    with pytest.raises(TransferError, match=text):
        s3_save(writer, "write", _SMALL)
    assert server.objects == {"run/model": _OLD}
