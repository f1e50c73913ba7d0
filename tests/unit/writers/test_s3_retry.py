"""Requests of `s3`: retried on a fake clock, and errors that never show a login."""

from __future__ import annotations

import errno
import http.client
import traceback
from pathlib import Path

import pytest

from iobench.errors import (
    DataMismatchError,
    OptionError,
    TargetError,
    TransferError,
    UnavailableError,
)
from iobench.integrations.dcp import DcpStorage
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store import client
from iobench.writers.s3_store.client import THROTTLED, S3Client, S3Options, delay_s, retried
from iobench.writers.s3_store.errors import (
    CorruptedError,
    explain,
    is_throttling,
    is_transient,
    without_login,
)
from iobench.writers.transfer import Meter


class _Clock:
    """Records the requested waits."""

    def __init__(self, stopped_after: int = 99) -> None:
        self.waits: list[float] = []
        self._stopped_after = stopped_after

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return len(self.waits) > self._stopped_after


def _failing(times: int, error: Exception):
    left = [times]

    def call() -> str:
        if left[0]:
            left[0] -= 1
            raise error
        return "done"

    return call


class _AnsweredError(Exception):
    """It has the attributes of botocore's ClientError."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.response = {
            "Error": {"Code": code, "Message": "scripted"},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


def test_delays_double_up_to_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full jitter: the random number scales the whole delay."""
    clock, meter, busy = _Clock(), Meter(), _AnsweredError(503, "SlowDown")
    monkeypatch.setattr(client.random, "random", lambda: 1.0)
    assert retried(_failing(10, busy), meter, clock.wait, 11) == "done"
    assert clock.waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 20, 20]
    assert meter.retries == 10
    assert meter.paths[THROTTLED].operations == 10
    monkeypatch.setattr(client.random, "random", lambda: 0.5)
    assert delay_s(2) == 0.1
    monkeypatch.setattr(client.random, "random", lambda: 0.0)
    assert delay_s(7) == 0


@pytest.mark.parametrize(
    ("error", "stopped_after", "waits", "retries"),
    [
        (ConnectionResetError("broken"), 99, 3, 3),  # attempts are bounded, no wait follows them
        (DataMismatchError("final"), 99, 0, 0),
        (ConnectionError("given up in the wait"), 1, 2, 1),
    ],
    ids=str,
)
def test_what_ends_the_attempts(
    error: Exception, stopped_after: int, waits: int, retries: int
) -> None:
    """The last error is raised unchanged."""
    clock, meter = _Clock(stopped_after), Meter()
    with pytest.raises(type(error)) as caught:
        retried(_failing(9, error), meter, clock.wait, 4)
    assert caught.value is error
    assert (len(clock.waits), meter.retries) == (waits, retries)


@pytest.mark.parametrize(
    ("error", "transient", "throttled", "kind", "exit_code"),
    [
        (_AnsweredError(503, "SlowDown"), True, True, TransferError, 1),
        (_AnsweredError(429, "TooManyRequests"), True, True, TransferError, 1),
        (_AnsweredError(500, "InternalError"), True, False, TransferError, 1),
        (_AnsweredError(200, "InternalError"), True, False, TransferError, 1),
        (_AnsweredError(400, "RequestTimeout"), True, False, TransferError, 1),
        (_AnsweredError(501, "NotImplemented"), False, False, TransferError, 1),
        (_AnsweredError(403, "AccessDenied"), False, False, UnavailableError, 3),
        (_AnsweredError(400, "ExpiredToken"), False, False, UnavailableError, 3),
        (_AnsweredError(400, "400"), False, False, UnavailableError, 3),
        (_AnsweredError(404, "NoSuchKey"), False, False, TransferError, 1),
        (_AnsweredError(404, "NoSuchBucket"), False, False, TargetError, 2),
        (_AnsweredError(412, "PreconditionFailed"), False, False, DataMismatchError, 4),
        (_AnsweredError(412, "412"), False, False, DataMismatchError, 4),
        (ConnectionResetError(104, "reset"), True, False, TransferError, 1),
        (TimeoutError(), True, False, TransferError, 1),
        (http.client.IncompleteRead(b""), True, False, TransferError, 1),
        (CorruptedError("other bytes"), True, False, TransferError, 1),
        (TransferError("ours"), False, False, TransferError, 1),
        (PermissionError(), False, False, TransferError, 1),
    ],
    ids=repr,
)
def test_kinds_of_errors(
    error: Exception, transient: bool, throttled: bool, kind: type, exit_code: int
) -> None:
    """Throttling, server errors and broken connections are transient; each error is one line."""
    assert (is_transient(error), is_throttling(error)) == (transient, throttled)
    better = explain(error, "reading", "s3://bucket/key")
    assert isinstance(better, kind)
    assert better.exit_code == exit_code
    assert "\n" not in str(better)


def test_what_is_not_ours_stays() -> None:
    """A bug is not an S3 error."""
    error = ZeroDivisionError()
    assert not is_transient(error)
    assert explain(error, "reading", "s3://bucket/key") is error


def test_logins_are_cut_out_of_urls() -> None:
    """Anywhere in a text."""
    text = "Could not connect to https://user:p4ss@host:9/x or http://key@other/"
    assert without_login(text) == "Could not connect to https://host:9/x or http://other/"


@pytest.mark.parametrize(
    "password", ["p/ss", "p@ss", "p:ss", "p#ss", "p?ss", "/", "1234/p", "p@s/s@"]
)
def test_a_login_is_cut_out_whatever_is_in_its_password(password: str) -> None:
    """Unescaped, as people write it. Any @ of the path may belong to the password, so none is
    kept."""
    for user in ("user", "us/er", ""):
        text = f'to "http://{user}:{password}@host:9/a" and https://other/'
        assert without_login(text) == 'to "http://host:9/a" and https://other/'
        assert without_login(f"http://{user}:{password}@host/a@b") == "http://b"


pytest.importorskip("boto3")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hUsH@minio_server:9000",  # no name of a host, says botocore
        "user:hUsH@minio:9000",
        "http://user:hUsH@min io:9000",
        "http://user:hUsH@127.0.0.1:9",
        "http://user:hUsH/hUsH@127.0.0.1:9",  # parsers see another host
        "http://127.0.0.1:9?X-Amz-Signature=hUsH",
        "http://127.0.0.1:9#hUsH",
    ],
)
def test_an_endpoint_with_a_login_or_a_query(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither used nor shown, in message and traceback. A query may be a signature."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
    with pytest.raises(UnavailableError, match=r"makes no client.* a login or a query") as caught:
        _ = S3Client(S3Options()).boto3
    with pytest.raises(OptionError, match="must not carry a login") as refused:
        S3Options(endpoint_url=url)
    for error in (caught.value, refused.value):
        assert "hUsH" not in "".join(traceback.format_exception(error))


def test_an_endpoint_without_a_login_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It helps the user."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://minio_server:9000")
    with pytest.raises(UnavailableError, match="Invalid endpoint: http://minio_server:9000"):
        _ = S3Client(S3Options()).boto3


def test_an_error_of_another_kind() -> None:
    """Its text is shown without the login, for any class of botocore."""
    from botocore.exceptions import InvalidProxiesConfigError

    error = InvalidProxiesConfigError()
    error.args = ("no proxy http://user:hUsH@host",)
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
    files = DcpStorage("s3://bucket/run", writer)
    with pytest.raises(TransferError) as caught:
        files._exists(".metadata")
    writer.client.close()
    assert caught.value.errno == errno.EIO
    assert f"'{missing}'; a file of this machine, not of the bucket" in str(caught.value)


def test_requests_are_signed_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """awscrt loses Ctrl-C in its callback, and the signature never comes."""
    from botocore import auth

    assert auth.AUTH_TYPE_MAPS["s3v4"].__module__ == "botocore.crt.auth"  # of botocore's clients
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    signer = S3Client(S3Options()).boto3._request_signer
    for version in ("s3v4", "v4"):
        made = signer.get_auth_instance("s3", "us-east-1", version)
        assert type(made) in (auth.S3SigV4Auth, auth.SigV4Auth)
