"""Causes of TLS failures: one message and one remedy for each."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator

__all__ = ["broken_tls", "chain", "explain_tls"]

_BROKEN = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
_CUT = "UNEXPECTED_EOF_WHILE_READING"  # OpenSSL 3: not always an SSLEOFError
_TRUST = "Set AWS_CA_BUNDLE to {}, or the option verify_tls=false."
# Verification codes of OpenSSL (x509_vfy.h).
_VERIFY = {
    9: (
        "the certificate of the endpoint is not valid yet.",
        "Check this machine's clock, and the dates of the certificate.",
    ),
    10: (
        "the certificate of the endpoint has expired.",
        "Renew it at the endpoint, and check this machine's clock.",
    ),
    18: (
        "the certificate of the endpoint is self-signed.",
        _TRUST.format("a file with that certificate"),
    ),
    19: (
        "the certificate of the endpoint was issued by a self-signed authority that is not known "
        "here.",
        _TRUST.format("the file of that authority"),
    ),
    20: (
        "the certificate of the endpoint was issued by an authority that is not known here.",
        _TRUST.format("the file of that authority"),
    ),
}


def broken_tls(error: BaseException) -> bool:
    """Return whether the connection below TLS broke, which is transient."""
    return any(isinstance(one, _BROKEN) or _reason(one) == _CUT for one in chain(error))


def explain_tls(error: BaseException) -> tuple[str, str]:
    """Return why TLS with the endpoint fails, and the remedy."""
    for one in chain(error):
        if isinstance(one, ssl.SSLCertVerificationError) and one.verify_code in _VERIFY:
            return _VERIFY[one.verify_code]
        if type(one).__name__ == "CertificateError" or getattr(one, "verify_code", 0) in (62, 64):
            return (
                f"the certificate of the endpoint is for another host ({one}).",
                "Use a name of the certificate in endpoint_url, or have one issued for this name.",
            )
        reason = _reason(one)
        if reason == "WRONG_VERSION_NUMBER":
            return "the endpoint does not speak TLS.", "Use http:// in its URL, or its TLS port."
        # botocore's own errors are an OSError too, without a number.
        is_file = isinstance(one, OSError) and bool(one.errno) and not isinstance(one, ssl.SSLError)
        if is_file or reason == "NO_CERTIFICATE_OR_CRL_FOUND":
            return (
                f"the file of certificate authorities {_ca_file()} cannot be used ({one}).",
                "Name a PEM file with certificates, or unset it to use the default ones.",
            )
    text = next((str(one) for one in chain(error) if isinstance(one, ssl.SSLError)), str(error))
    return f"TLS with the endpoint fails ({text}).", "Check endpoint_url and the proxy settings."


def _reason(error: BaseException) -> object:
    return getattr(error, "reason", None)


def _ca_file() -> str:
    named = os.environ.get("AWS_CA_BUNDLE")
    return f"AWS_CA_BUNDLE={named}" if named else "(ca_bundle of the AWS configuration)"


def chain(error: BaseException) -> Iterator[BaseException]:
    """Return `error` and its causes, innermost first: boto3 and urllib3 wrap the errors of ssl."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or one in found:
            continue
        found.append(one)
        left += [one.__context__, one.__cause__]
        left += [inner for inner in one.args if isinstance(inner, BaseException)]
    return reversed(found)
