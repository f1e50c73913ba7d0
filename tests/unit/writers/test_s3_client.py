"""Errors of the client never show a login that is part of an endpoint's URL."""

from __future__ import annotations

import errno
import socket
import traceback
from pathlib import Path

import pytest

from iobench.errors import IobenchError, OptionError, TransferError, UnavailableError
from iobench.integrations.dcp_files import DcpFiles
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.client import S3Client, S3Options
from iobench.writers.s3_store.errors import explain
from iobench.writers.transfer import Meter

pytest.importorskip("boto3")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")


def _check_silent(error: BaseException) -> None:
    assert "SECRET" not in str(error)
    assert "SECRET" not in "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    "url",
    [
        "http://user:SECRET@minio_server:9000",  # no name of a host, says botocore
        "http://user:p@SECRET@minio_server:9000",
        "user:SECRET@minio:9000",
        "http://user:SECRET@min io:9000",
    ],
)
def test_an_endpoint_that_boto3_refuses(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the message nor the traceback has the login."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
    with pytest.raises(UnavailableError, match="makes no client") as caught:
        _ = S3Client(S3Options()).boto3
    _check_silent(caught.value)


@pytest.mark.parametrize(
    "login",
    [
        *(f"user:SECRET{one}SECRET" for one in "/#?\\ "),
        "user:9/SECRET",
        "user:/SECRET",
        "u:S@C/SECRET",
    ],
)
def test_a_login_that_is_not_escaped(login: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The URL would name another host, which would get the rest of the password."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{login}@127.0.0.1:9")
    with pytest.raises(UnavailableError, match="login in it that is not escaped") as caught:
        _ = S3Client(S3Options()).boto3
    _check_silent(caught.value)


@pytest.mark.parametrize("extra", ["?X-Amz-Signature=SECRET", "/base?a=b&c=SECRET@x", "#SECRET"])
@pytest.mark.parametrize("host", ["127.0.0.1:9", "minio_server:9", "user:p4@host"])
def test_an_endpoint_with_a_query(host: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The query may be a signature. It is neither used nor shown."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}{extra}")
    with pytest.raises(UnavailableError, match=r"query in it|login in it") as caught:
        _ = S3Client(S3Options()).boto3
    _check_silent(caught.value)
    with pytest.raises(OptionError, match="must not carry a login") as refused:
        S3Options(endpoint_url=f"http://{host}{extra}")
    assert extra not in str(refused.value)


def test_an_endpoint_without_a_login_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It helps the user."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://minio_server:9000")
    with pytest.raises(UnavailableError, match="Invalid endpoint: http://minio_server:9000"):
        _ = S3Client(S3Options()).boto3


def test_an_endpoint_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore's error has the whole URL, so it is not the cause of ours."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        port = silent.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://user:p@SECRET@127.0.0.1:{port}")
        client = S3Client(S3Options())
        with pytest.raises(IobenchError, match=f"//127.0.0.1:{port}/") as caught:
            client.call(
                lambda boto3: boto3.list_buckets(),
                Meter(),
                doing="listing",
                where="s3://bucket",
                attempts=1,
            )
    client.close()
    _check_silent(caught.value)
    _check_silent(ValueError(client.endpoint))


def test_an_error_of_another_kind() -> None:
    """Its text is shown without the login, for any class of botocore."""
    from botocore.exceptions import InvalidProxiesConfigError

    error = InvalidProxiesConfigError()
    error.args = ("no proxy http://user:SECRET@host",)
    better = explain(error, "listing", "s3://bucket")
    assert isinstance(better, TransferError)
    assert "no proxy http://host" in better.strerror
    assert better.filename == "s3://bucket"


@pytest.mark.parametrize("name", ["none", "file/below"])
@pytest.mark.parametrize("wanted", ["token", "process"])
def test_a_missing_file_of_this_machine_is_no_missing_object(
    wanted: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """ENOENT would mean that there is no checkpoint, and a job would begin a new one."""
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(key)
    (tmp_path / "file").touch()
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    missing = tmp_path / name
    if wanted == "token":
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/x")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(missing))
    else:
        config = tmp_path / "config"
        config.write_text(f"[default]\ncredential_process = {missing}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    writer = S3Writer(endpoint_url="http://127.0.0.1:9", max_attempts=1)
    files = DcpFiles("s3://bucket/run", writer)
    with pytest.raises(TransferError) as caught:
        files.exists(".metadata")
    writer.client.close()
    assert caught.value.errno == errno.EIO
    assert f"'{missing}'; a file of this machine, not of the bucket" in str(caught.value)
