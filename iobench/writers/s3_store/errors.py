"""Errors of S3 and TLS: which are transient, and one line on the cause and remedy of each."""

from __future__ import annotations

import errno
import http.client
import os
import re
import ssl
from collections.abc import Iterator
from typing import Any

from iobench.errors import (
    DataMismatchError,
    IobenchError,
    TargetError,
    TransferError,
    UnavailableError,
)

_BROKEN = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
_CUT = "UNEXPECTED_EOF_WHILE_READING"  # OpenSSL 3: not always an SSLEOFError
_REFUSED = (
    "Of an authority that is not known here: set AWS_CA_BUNDLE to its file, or the option "
    "verify_tls=false. Out of date: check this machine's clock. For another host: use a name of "
    "the certificate in endpoint_url."
)


def _broken_tls(error: BaseException) -> bool:
    """Return whether the connection below TLS broke, which is transient."""
    return any(isinstance(one, _BROKEN) or _reason(one) == _CUT for one in _chain(error))


def _explain_tls(error: BaseException) -> tuple[str, str]:
    """Return why TLS with the endpoint fails, and the remedy."""
    for one in _chain(error):
        if type(one).__name__ in ("SSLCertVerificationError", "CertificateError"):  # or urllib3's
            why = getattr(one, "verify_message", "") or one
            return f"the certificate of the endpoint is refused ({why}).", _REFUSED
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
    text = next((str(one) for one in _chain(error) if isinstance(one, ssl.SSLError)), str(error))
    return f"TLS with the endpoint fails ({text}).", "Check endpoint_url and the proxy settings."


def _reason(error: BaseException) -> object:
    return getattr(error, "reason", None)


def _ca_file() -> str:
    named = os.environ.get("AWS_CA_BUNDLE")
    return f"AWS_CA_BUNDLE={named}" if named else "(ca_bundle of the AWS configuration)"


def _chain(error: BaseException) -> Iterator[BaseException]:
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


_THROTTLING = {
    *("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded"),
    *("TooManyRequests", "ServiceUnavailable", "503", "429", "RequestThrottled"),
}
_TRANSIENT = {
    *("InternalError", "RequestTimeout", "RequestTimeoutException", "OperationAborted"),
    *("500", "502", "504", "IncompleteBody", "BadDigest"),
}
_CREDENTIALS = {
    "ExpiredToken": "Get new credentials (aws sso login, or whatever issues them) and try again.",
    "ExpiredTokenException": "Get new credentials (aws sso login, or whatever issues them).",
    "TokenRefreshRequired": "Get new credentials (aws sso login, or whatever issues them).",
    "InvalidToken": "Check AWS_SESSION_TOKEN: it must be from the same credentials as the keys.",
    "InvalidAccessKeyId": "Check the access key, and that this endpoint issued it.",
    "InvalidClientTokenId": "Check the access key, and that this endpoint issued it.",
    "SignatureDoesNotMatch": "Check the secret key, the region and this machine's clock.",
    "RequestTimeTooSkewed": "Set this machine's clock.",
}
_DENIED = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "403", "Forbidden"}
_LOGIN_HELP = (
    "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role."
)
# The credentials in a URL, up to its last @: a raw password may contain / and @ itself. An @ in an
# object's key is not affected, because botocore escapes it.
_LOGIN = re.compile(r"//\S*@")
_UNREACHED = (
    *("EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError"),
    *("ConnectionClosedError", "ReadTimeoutError", "HTTPClientError", "ResponseStreamingError"),
)


class CorruptedError(OSError):
    """An answer that is not the store's, or a checksum that is not ours. Transient."""


def require_fields(answer: Any, *names: str) -> Any:
    """Return `answer` if it has all `names`. Raises CorruptedError if one is missing.

    An error page of a proxy, sent with status 200, has none of them.
    """
    for name in names:
        if answer.get(name) in (None, ""):
            raise CorruptedError(f"the server's answer has no {name}")
    return answer


def code_of(error: BaseException) -> str:
    """Return the S3 error code, such as `NoSuchBucket`.

    It is the HTTP status if the answer had no body, and empty if there was no answer.
    """
    response: Any = getattr(error, "response", None)
    if not isinstance(response, dict):
        return ""
    return str(response.get("Error", {}).get("Code", ""))


def status_of(error: BaseException) -> int:
    """Return the HTTP status, or 0 if there was no answer."""
    response: Any = getattr(error, "response", None)
    if not isinstance(response, dict):
        return 0
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_throttling(error: BaseException) -> bool:
    """Return whether the store asks the client to slow down."""
    return code_of(error) in _THROTTLING or status_of(error) in (429, 503)


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed: throttling, server errors, broken connections."""
    if isinstance(error, IobenchError):
        return False
    status = status_of(error)
    if is_throttling(error) or code_of(error) in _TRANSIENT or (status >= 500 and status != 501):
        return True
    broken = (ConnectionError, TimeoutError, CorruptedError, http.client.HTTPException)
    return isinstance(error, broken) or _broken_tls(error) or _kind(error) in _UNREACHED


def without_login(text: str) -> str:
    """Return `text` without `user:password@` in its URLs."""
    return _LOGIN.sub("//", text)


def _kind(error: BaseException) -> str:
    """Return the most telling class name of a botocore or urllib3 error; empty for other errors.

    Compares names, so that botocore is not imported.
    """
    if type(error).__module__.split(".")[0] not in ("botocore", "urllib3"):
        return ""
    names = [cls.__name__ for cls in type(error).__mro__]
    if "SSLError" in names:
        return "SSLError"
    found = next((name for name in names if name in _UNREACHED), names[0])
    return "HTTPClientError" if type(error).__module__.startswith("urllib3") else found


def explain(error: Exception, doing: str, where: object) -> Exception:
    """Return `error` as one of ours: the operation, the object, the S3 code and the remedy.

    Returns `error` itself if it comes neither from S3 nor from the network.
    """
    if isinstance(error, IobenchError):
        return error
    code, kind = code_of(error), _kind(error)
    if code or status_of(error):
        return _answered(error, code, doing, where)
    if kind in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        return UnavailableError("s3", f"no credentials were found ({kind}).", _LOGIN_HELP)
    if kind in ("ProfileNotFound", "ConfigNotFound", "ConfigParseError"):
        return UnavailableError(
            "s3",
            f"the AWS configuration cannot be used ({kind}).",
            "Check AWS_PROFILE and the files ~/.aws/config and ~/.aws/credentials.",
        )
    if "SSO" in kind or "Token" in kind or kind == "UnauthorizedSSOTokenError":
        return UnavailableError("s3", f"the credentials expired ({kind}).", "Type: aws sso login.")
    if kind == "SSLError" and not _broken_tls(error):
        return UnavailableError("s3", *map(without_login, _explain_tls(error)))
    unreached = kind in _UNREACHED or kind == "SSLError"
    if unreached or isinstance(error, OSError | http.client.HTTPException):
        return _broke(error, kind, doing, where)
    if kind:
        text = without_login(" ".join(str(error).split()))
        return TransferError(errno.EIO, f"{doing}: {kind}: {text}", str(where))
    return error


def _answered(error: Exception, code: str, doing: str, where: object) -> Exception:
    status = status_of(error)
    message: Any = getattr(error, "response", {}).get("Error", {}).get("Message", "")
    said = f"{code or status}{f': {message}' if message and message != code else ''}"
    said = said.rstrip(".")
    if code == "NoSuchBucket":
        return TargetError(f"{where}: no such bucket ({code}); check its name, or create it")
    if code == "InvalidBucketName":
        return TargetError(f"{where}: the store does not allow this bucket name ({code}); check it")
    if code in ("PermanentRedirect", "IllegalLocationConstraintException", "301") or status == 301:
        return UnavailableError(
            "s3", f"{where} is in another region ({said}).", "Set AWS_REGION to the bucket's."
        )
    if code in _CREDENTIALS:
        return UnavailableError("s3", f"the credentials are refused ({code}).", _CREDENTIALS[code])
    if code in _DENIED or status == 403:
        return UnavailableError(
            "s3",
            f"{doing} {where} is not permitted ({said}).",
            "It needs s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload "
            "and s3:ListBucket on it.",
        )
    if code == "PreconditionFailed" or status == 412:
        return DataMismatchError(
            f"{where}: was changed while it was read ({code or 412}); restore it again"
        )
    if code == "400":  # an answer without a body
        return UnavailableError(
            "s3",
            f"{doing} {where} is refused without a reason (400).",
            "Expired credentials are the usual cause: get new ones.",
        )
    number = errno.ENOENT if status == 404 else errno.EAGAIN if is_throttling(error) else 0
    return TransferError(number or errno.EIO, f"{doing}: {said}", str(where))


def _broke(error: Exception, kind: str, doing: str, where: object) -> TransferError:
    inner = error.__cause__ or error.__context__
    number = getattr(error, "errno", None) or getattr(inner, "errno", None)
    text = without_login(" ".join(str(error).split())) or type(error).__name__
    if kind in ("EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError"):
        number = number or errno.ECONNREFUSED
        text += "; check endpoint_url (AWS_ENDPOINT_URL_S3), the network and the proxy settings"
    elif kind == "ReadTimeoutError" or isinstance(error, TimeoutError):
        number = number or errno.ETIMEDOUT
    elif number in (errno.ENOENT, errno.ENOTDIR):  # callers would read it as a missing object
        number = errno.EIO
        text += (
            "; a file of this machine, not of the bucket: check AWS_WEB_IDENTITY_TOKEN_FILE and "
            "the files that the AWS configuration names"
        )
    return TransferError(number or errno.EIO, f"{doing}: {kind or 'broken'}: {text}", str(where))
