"""Refusals of a store: one line with the code and the remedy, and no secret."""

from __future__ import annotations

import pytest
from support.scripted_s3 import answer

from iobench.errors import IobenchError, TransferError, UnavailableError
from iobench.testing import content
from iobench.units import MIB
from iobench.writers.image import FileImage
from iobench.writers.s3 import S3Writer

_DATA = content(3 * 5 * MIB + 777)
_TARGET = "s3://bucket/run"


def _image(data=_DATA) -> FileImage:
    return FileImage.of("model", [data])


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
def test_refusals(
    server, writer, status, code, kind, exit_code, says, s3_save, expect_no_secret
) -> None:
    """Each refusal is one line with the S3 code and the remedy, and is not retried."""
    server.fail("create", answer(status, code), times=99)
    for call in (
        lambda: writer.write(_image(), _TARGET),
        lambda: s3_save(writer, "stream", _DATA),
    ):
        before = server.seen.count("create")
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.exit_code == exit_code
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
        expect_no_secret(caught.value)
        assert server.seen.count("create") == before + 1
    found = writer.available(_TARGET)
    assert not found.ok
    assert code in found.reason


@pytest.mark.parametrize(
    ("fault", "exit_code", "says"),
    [
        (answer(404, "NoSuchBucket"), 2, "(NoSuchBucket); check its name, or create it"),
        (answer(403, "AccessDenied"), 3, "(AccessDenied: scripted). It needs s3:GetObject"),
        (answer(400, "ExpiredToken"), 3, "(ExpiredToken). Get new credentials"),
        (None, 3, "no credentials were found (NoCredentialsError). Set AWS_PROFILE"),
    ],
)
def test_at_the_command_line(server, iobench_inside, fault, exit_code, says, monkeypatch) -> None:
    """`iobench run` reports it in one line, with the exit code of that kind of error."""
    if fault is None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name)
    else:
        server.fail("create", fault, times=99)
    writer = f"s3,endpoint_url={server.endpoint_url},addressing_style=path"
    done = iobench_inside("run", "--workload", "llama7b", "--writer", writer, "--target", _TARGET)
    assert (done.returncode, done.stdout) == (exit_code, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert says in done.stderr
    assert "do-not-tell" not in done.stderr


def test_an_endpoint_that_does_not_answer(writer, server, expect_no_secret) -> None:
    """The error names the option and the variable; exit code 3 before a run, 1 within."""
    silent = S3Writer(endpoint_url="http://127.0.0.1:9", max_attempts=2, addressing_style="path")
    answer = silent.available(_TARGET)
    assert not answer.ok
    assert "AWS_ENDPOINT_URL_S3" in answer.reason
    with pytest.raises(TransferError) as caught:
        silent.write(_image(), _TARGET)
    expect_no_secret(caught.value)
    with pytest.raises(UnavailableError):
        silent.require(_TARGET)


def test_uploads_of_an_endpoint_that_does_not_answer(server, iobench_inside) -> None:
    """The commands that list and abort uploads report the same."""
    place = {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}
    done = iobench_inside("s3", "abort-uploads", _TARGET, **place)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert "AWS_ENDPOINT_URL_S3" in done.stderr


def test_no_credentials(server, writer, monkeypatch) -> None:
    """Without credentials no request is sent."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    with pytest.raises(UnavailableError, match=r"no credentials were found.*AWS_PROFILE"):
        writer.write(_image(), _TARGET)
    assert not server.seen


def test_the_writer_shows_no_credentials(server, writer) -> None:
    """Neither repr nor options have any."""
    writer.write(_image(content(100)), _TARGET)
    shown = repr(writer) + repr(writer.options.to_dict()) + repr(writer.client)
    assert "AKID" not in shown
    assert "do-not-tell" not in shown
