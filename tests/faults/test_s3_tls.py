"""Endpoints whose certificate is not accepted, over real TLS: each cause is named."""

import datetime
import ipaddress
import socket
import ssl
import threading
from pathlib import Path

import pytest
from botocore.exceptions import SSLError
from support.scripted_s3 import scripted_s3, silence

from iobench.errors import TransferError, UnavailableError
from iobench.testing import content
from iobench.writers.image import FileImage
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.errors import explain

pytest.importorskip("cryptography", reason="cryptography is not installed")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_TARGET = "s3://bucket/run"
_DAYS = datetime.timedelta(days=1)


class _Authority:
    """Issues certificates for 127.0.0.1 as files in a directory; `file` is its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("authority")
        self.file = self._stored("authority", self._key, authority=True)

    def issue(self, name: str, *, ends: int = 1, host: str = "127.0.0.1") -> str:
        key = ec.generate_private_key(ec.SECP256R1())
        return self._stored(name, key, ends=ends, host=host)

    def _stored(self, name, key, *, ends=1, host="127.0.0.1", authority=False) -> str:
        now = datetime.datetime.now(datetime.UTC)
        address = x509.IPAddress(ipaddress.ip_address(host))
        described = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 3 * _DAYS)
            .not_valid_after(now + ends * _DAYS)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        )
        file = self._directory / f"{name}.pem"
        file.write_bytes(
            described.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return str(file)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


@pytest.fixture
def authority(server, tmp_path) -> _Authority:
    """An authority; the credentials are those of the fixture `server`."""
    return _Authority(tmp_path)


def _context(certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def _writer(url: str) -> S3Writer:
    return S3Writer(endpoint_url=url, addressing_style="path", max_attempts=3)


def _refusal(certificate: str) -> UnavailableError:
    """Return the error of a save to an endpoint with that certificate, after one request."""
    with scripted_s3(_context(certificate)) as server:
        writer = _writer(server.endpoint_url)
        with pytest.raises(UnavailableError) as caught:
            writer.write(FileImage.of("model", [content(100)]), _TARGET)
        found = writer.available(_TARGET)
        assert (found.reason, found.remedy) == (caught.value.reason, caught.value.remedy)
        writer.client.close()
        assert not server.seen
    return caught.value


def test_a_trusted_certificate(authority, monkeypatch) -> None:
    """With the authority's file it works like any other store."""
    monkeypatch.setenv("AWS_CA_BUNDLE", authority.file)
    data = content(6 << 20)
    with scripted_s3(_context(authority.issue("good"))) as server:
        writer = _writer(server.endpoint_url)
        writer.write(FileImage.of("model", [data]), _TARGET)
        back = FileImage.of("model", [bytearray(len(data))])
        writer.read(back, _TARGET)
        writer.client.close()
    assert back.views(0, len(data))[0].tobytes() == data.tobytes()


def test_each_cause(authority, server, monkeypatch, tmp_path) -> None:
    """The error has the text of OpenSSL, and the remedy names the file of the authorities."""
    good = authority.issue("good")
    unknown = _refusal(good)
    assert "unable to get local issuer certificate" in unknown.reason
    assert "AWS_CA_BUNDLE (" in unknown.remedy
    monkeypatch.setenv("AWS_CA_BUNDLE", authority.file)
    expired = _refusal(authority.issue("expired", ends=-1))
    assert "certificate has expired" in expired.reason
    assert "clock" in expired.remedy
    other = _refusal(authority.issue("other", host="10.0.0.1"))
    assert "hostname '127.0.0.1' doesn't match '10.0.0.1'" in other.reason
    writer = _writer(server.endpoint_url.replace("http:", "https:"))
    with pytest.raises(UnavailableError, match=r"WRONG_VERSION_NUMBER.*http:// without TLS"):
        writer.write(FileImage.of("model", [content(100)]), _TARGET)
    writer.client.close()
    for file, why in ((tmp_path / "no-authority.pem", "No such file"), (tmp_path, "Is a dir")):
        monkeypatch.setenv("AWS_CA_BUNDLE", str(file))
        refused = _refusal(good)
        assert f"AWS_CA_BUNDLE ({file})" in refused.remedy
        assert why in refused.reason


def test_a_handshake_that_breaks(authority, monkeypatch) -> None:
    """A connection that ends in the handshake is retried, and is not a refusal."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        met = []

        def hang_up() -> None:
            for _ in range(3):
                connection, _ = listening.accept()
                met.append(connection.recv(1))
                connection.shutdown(socket.SHUT_WR)  # as EOF, not as a reset
                while connection.recv(4096):
                    pass
                connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        writer = _writer(f"https://127.0.0.1:{listening.getsockname()[1]}")
        # The text of OpenSSL 3, and of a Python that takes it for a close.
        with pytest.raises(TransferError, match=r"EOF occurred|closed \(EOF\)"):
            writer.write(FileImage.of("model", [content(100)]), _TARGET)
        thread.join(20)
        writer.client.close()
    assert len(met) == 3


def test_a_time_limit(authority, monkeypatch) -> None:
    """Threads that encrypt what they send are woken by it too."""
    monkeypatch.setenv("AWS_CA_BUNDLE", authority.file)
    data = content(12 << 20)
    with scripted_s3(_context(authority.issue("good"))) as server:
        writer = S3Writer(endpoint_url=server.endpoint_url, addressing_style="path", threads=2)
        server.fail("part", silence, times=100)
        limit = writer.client.time_limit
        with pytest.raises(TransferError), limit.within(0.2):
            writer.write(FileImage.of("model", [data]), _TARGET)
        server.forget_faults()
        writer.write(FileImage.of("model", [data]), _TARGET)
        writer.client.close()
        assert server.objects["run/model"] == data.tobytes()


def test_a_connection_that_is_cut_is_not_blamed_on_the_authorities() -> None:
    """OpenSSL 3.5 reports a cut as a plain SSLError; botocore wraps it as an OSError of its own."""
    cut = ssl.SSLError(1, "[SSL: UNEXPECTED_EOF_WHILE_READING] unexpected eof while reading")
    cut.reason = "UNEXPECTED_EOF_WHILE_READING"
    other = ssl.SSLError(1, "[SSL: TLSV1_ALERT_INTERNAL_ERROR] an alert")
    for error, kind in ((cut, TransferError), (other, UnavailableError)):
        wrapped = SSLError(endpoint_url="https://127.0.0.1", error=error)
        wrapped.__cause__ = error
        explained = explain(wrapped, "upload", "s3://bucket/model")
        assert isinstance(explained, kind)
        assert "authorities" not in str(explained)
