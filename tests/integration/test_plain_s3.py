"""The drop-ins for objects of a bucket: errors name their cause, not a missing file."""

import errno
from collections.abc import Iterator

import pytest
import torch
from support.scripted_s3 import ScriptedS3, answer, scripted_s3

import iobench.safetensors
import iobench.torch
from iobench.errors import DataMismatchError, TransferError, UsageError
from iobench.writers.s3 import S3Writer

LOADS = pytest.mark.parametrize(
    ("load", "name"),
    [(iobench.torch.load, "m.pt"), (iobench.safetensors.load_file, "m.safetensors")],
)


@pytest.fixture(autouse=True)
def login(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture
def server() -> Iterator[ScriptedS3]:
    with scripted_s3() as made:
        yield made


def writer(endpoint_url: str) -> S3Writer:
    return S3Writer(endpoint_url=endpoint_url, addressing_style="path", max_attempts=1, threads=1)


@LOADS
def test_a_store_that_does_not_answer(load, name: str) -> None:
    """A job that begins anew where there is no checkpoint must not take this for one."""
    with pytest.raises(TransferError) as refused:
        load(f"s3://bucket/{name}", writer=writer("http://127.0.0.1:9"))
    assert refused.value.errno == errno.ECONNREFUSED
    assert not isinstance(refused.value, FileNotFoundError)


@LOADS
def test_an_object_that_cannot_be_loaded(load, name: str, server) -> None:
    """The store is busy; then the object is neither of torch nor of safetensors."""
    server.objects[name] = b"neither torch's nor safetensors'" * 9
    for operation in ("head", "get"):
        server.fail(operation, answer(503, "SlowDown"), times=9)
    with pytest.raises(TransferError) as refused:
        load(f"s3://bucket/{name}", writer=writer(server.endpoint_url))
    assert refused.value.errno == errno.EAGAIN
    server.forget_faults()
    with pytest.raises(DataMismatchError):
        load(f"s3://bucket/{name}", writer=writer(server.endpoint_url))


@LOADS
def test_an_object_that_is_missing(load, name: str, server) -> None:
    """The stock functions raise the same error for a file."""
    path = f"s3://bucket/{name}"
    with pytest.raises(FileNotFoundError) as missing:
        load(path, writer=writer(server.endpoint_url))
    assert missing.value.filename == path
    assert isinstance(missing.value.__cause__, TransferError)


@LOADS
def test_another_file_that_is_missing(load, name, server, tmp_path, monkeypatch) -> None:
    """The login's, not the object: no reason to believe that there is no checkpoint."""
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(key)
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/x")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(TransferError) as refused:
        load(f"s3://bucket/{name}", writer=writer(server.endpoint_url))
    assert not isinstance(refused.value, FileNotFoundError)


def test_what_needs_the_stock_function() -> None:
    """That knows no buckets."""
    with pytest.raises(UsageError, match=r"m\.pt: writer hybrid does not work on buckets"):
        iobench.torch.load("s3://bucket/m.pt", writer="hybrid")
    with pytest.raises(UsageError, match=r"mmap=True reads the data later.*cannot read buckets"):
        iobench.torch.load("s3://bucket/m.pt", mmap=True, writer=writer("http://127.0.0.1:9"))
    with pytest.raises(UsageError, match=r"device meta.*cannot read buckets"):
        iobench.safetensors.load_file(
            "s3://bucket/m.safetensors", "meta", writer=writer("http://127.0.0.1:9")
        )


def test_saves_that_need_the_stock_function(caplog) -> None:
    """It would report a missing directory; the error has both reasons instead."""
    chosen, tensors = writer("http://127.0.0.1:9"), {"a": torch.arange(30.0)}
    with pytest.raises(UsageError) as refused:
        iobench.torch.save(tensors, "s3://bucket/m.pt", writer="hybrid")
    assert str(refused.value) == (
        "s3://bucket/m.pt: writer hybrid does not work on buckets, and stock torch.save "
        "cannot write to buckets"
    )
    with pytest.raises(
        UsageError, match=r"format before torch 1\.6, and stock.*cannot write to buckets"
    ):
        iobench.torch.save(
            tensors, "s3://bucket/m.pt", _use_new_zipfile_serialization=False, writer=chosen
        )
    metadata = {"a": "1", "b": "2"}
    with pytest.raises(UsageError, match=r"in random order, and stock.*cannot write to buckets"):
        iobench.safetensors.save_file(
            tensors, "s3://bucket/m.safetensors", metadata=metadata, writer=chosen
        )
    assert not caplog.records, "nothing was done by the stock function"
