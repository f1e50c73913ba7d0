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

_CUT = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
_THROTTLING = {
    *("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded"),
    *("TooManyRequests", "ServiceUnavailable", "RequestThrottled"),
}
_TRANSIENT = {
    *("InternalError", "RequestTimeout", "RequestTimeoutException", "OperationAborted"),
    *("IncompleteBody", "BadDigest"),
}
_LOGIN_HELP = (
    "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role; "
    "aws sso login renews a login. Check the files ~/.aws/config and ~/.aws/credentials."
)
_NO_LOGIN = ("Credential", "SSO", "Token", "ProfileNotFound", "ConfigNotFound", "ConfigParseError")
_RENEW = "Get new credentials (aws sso login, or whatever issues them) and try again."
_CHECK = (
    "Check that this endpoint issued the keys (and AWS_SESSION_TOKEN with them), the region and "
    "this machine's clock."
)
_RIGHTS = (
    "It needs s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload and "
    "s3:ListBucket on it."
)
_REGION = "It is in another region: set AWS_REGION to the bucket's."
_REMEDIES = {
    **dict.fromkeys(["ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"], _RENEW),
    "400": _RENEW,  # an answer without a body: expired credentials are the usual cause
    **dict.fromkeys(["InvalidToken", "InvalidAccessKeyId", "InvalidClientTokenId"], _CHECK),
    **dict.fromkeys(["SignatureDoesNotMatch", "RequestTimeTooSkewed"], _CHECK),
    **dict.fromkeys(["AccessDenied", "AllAccessDisabled", "AccountProblem"], _RIGHTS),
    **dict.fromkeys(["PermanentRedirect", "IllegalLocationConstraintException"], _REGION),
}
# The credentials in a URL, up to its last @: a raw password may contain / and @ itself. An @ in an
# object's key is not affected, because botocore escapes it.
_LOGIN = re.compile(r"//\S*@")


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
    return isinstance(error, broken) or _kind(error) == "HTTPClientError"


def without_login(text: str) -> str:
    """Return `text` without `user:password@` in its URLs."""
    return _LOGIN.sub("//", text)


def _kind(error: BaseException) -> str:
    """Return the class name of a botocore or urllib3 error; empty for other errors.

    "HTTPClientError" for all broken connections, "SSLError" where TLS itself fails. Compares names,
    so that botocore is not imported.
    """
    module = type(error).__module__.split(".")[0]
    names = [cls.__name__ for cls in type(error).__mro__]
    if any(map(_is_cut, _chain(error))):
        return "HTTPClientError"
    if module not in ("botocore", "urllib3"):
        return ""
    if "SSLError" in names:
        return "SSLError"
    broken = module == "urllib3" or not {"HTTPClientError", "ConnectionError"}.isdisjoint(names)
    return "HTTPClientError" if broken else names[0]


def _is_cut(error: BaseException) -> bool:
    """Return whether the connection below TLS broke. OpenSSL 3 has no class of its own for it."""
    return isinstance(error, _CUT) or getattr(error, "reason", "") == "UNEXPECTED_EOF_WHILE_READING"


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


def explain(error: Exception, doing: str, where: object) -> Exception:
    """Return `error` as one of ours: the operation, the object, the S3 code and the remedy.

    Returns `error` itself if it comes neither from S3 nor from the network.
    """
    if isinstance(error, IobenchError):
        return error
    code, kind = code_of(error), _kind(error)
    if code or status_of(error):
        return _answered(error, code, doing, where)
    if any(part in kind for part in _NO_LOGIN):
        return UnavailableError("s3", f"no credentials were found ({kind}).", _LOGIN_HELP)
    if kind == "SSLError":
        why = next((one for one in _chain(error) if isinstance(one, OSError | ValueError)), error)
        bundle = os.environ.get("AWS_CA_BUNDLE", "not set")
        return UnavailableError(
            "s3",
            without_login(f"TLS with the endpoint fails ({why})."),
            "Check that endpoint_url names a host of its certificate (http:// without TLS), the "
            f"proxy settings, this machine's clock, and AWS_CA_BUNDLE ({bundle}), a PEM file with "
            "the authority; verify_tls=false trusts any.",
        )
    if kind == "HTTPClientError" or isinstance(error, OSError | http.client.HTTPException):
        return _broke(error, doing, where)
    if kind:
        text = without_login(" ".join(str(error).split()))
        return TransferError(errno.EIO, f"{doing}: {kind}: {text}", str(where))
    return error


def _answered(error: Exception, code: str, doing: str, where: object) -> Exception:
    status = status_of(error)
    message: Any = getattr(error, "response", {}).get("Error", {}).get("Message", "")
    said = f"{code or status}{f': {message}' if message and message != code else ''}"
    said = said.rstrip(".")
    if code in ("NoSuchBucket", "InvalidBucketName"):
        return TargetError(f"{where}: no such bucket ({code}); check its name, or create it")
    remedy = _REMEDIES.get(code) or {301: _REGION, 403: _RIGHTS}.get(status)
    if remedy is not None:
        return UnavailableError("s3", f"{doing} {where} is refused ({said}).", remedy)
    if code == "PreconditionFailed" or status == 412:
        return DataMismatchError(
            f"{where}: was changed while it was read ({code or 412}); restore it again"
        )
    number = errno.ENOENT if status == 404 else errno.EAGAIN if is_throttling(error) else 0
    return TransferError(number or errno.EIO, f"{doing}: {said}", str(where))


def _broke(error: Exception, doing: str, where: object) -> TransferError:
    numbers = [one.errno or 0 for one in _chain(error) if isinstance(one, OSError)]
    number = next((one for one in reversed(numbers) if one > 0), errno.EIO)  # < 0: of getaddrinfo
    text = without_login(" ".join(str(error).split())) or type(error).__name__
    if number in (errno.ENOENT, errno.ENOTDIR):  # callers would read it as a missing object
        number = errno.EIO
        text += (
            "; a file of this machine, not of the bucket: check AWS_WEB_IDENTITY_TOKEN_FILE and "
            "the files that the AWS configuration names"
        )
    elif _kind(error):
        text += "; check endpoint_url (AWS_ENDPOINT_URL_S3), the network and the proxy settings"
    return TransferError(number, f"{doing}: {type(error).__name__}: {text}", str(where))
