"""S3Client: boto3 with our retries and errors, and without credentials in any message."""

from __future__ import annotations

import errno
import functools
import re
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from iobench.errors import TransferError, UnavailableError
from iobench.writers.s3_store.connection import TimeLimit, guard_connections
from iobench.writers.s3_store.errors import CorruptedError, explain, judge, without_login
from iobench.writers.s3_store.retry import RetryPolicy
from iobench.writers.transfer import Meter

if TYPE_CHECKING:
    from iobench.writers.s3_store.options import S3Options

__all__ = ["INSTALL", "S3Client", "boto3_missing"]

INSTALL = "Type: pip install 'iobench[s3]'."
# A raw /, \, ? or # in a password ends the host for URL parsers, so each sees another host.
_RAW_LOGIN = re.compile(r"//.*[/\\?#\s].*@")
_T = TypeVar("_T")


def boto3_missing() -> str:
    """Return why boto3 cannot be used, or an empty string if it is installed. Imports nothing."""
    return "" if find_spec("boto3") else "boto3 is not installed."


class S3Client:
    """One boto3 client, created on first use. Safe to use from many threads.

    Credentials and region come only from boto3's standard chain, and only boto3 keeps them.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._lock = threading.RLock()
        self._made: list[Any] = []
        self.time_limit = TimeLimit()

    @property
    def boto3(self) -> Any:
        """The boto3 client.

        Raises UnavailableError if boto3 is missing or its configuration is broken.
        """
        with self._lock:
            if not self._made:
                made = self._make()
                self._made.append(made)
                # A signal handler that saves can enter here: the lock is reentrant for its thread.
                if made is not self._made[0]:
                    made.close()
            return self._made[0]

    @property
    def endpoint(self) -> str:
        """The URL of the endpoint, without credentials."""
        return without_login(str(self.boto3.meta.endpoint_url))

    def call(
        self,
        request: Callable[[Any], _T],
        meter: Meter,
        *,
        doing: str,
        where: object,
        stop: threading.Event | None = None,
        attempts: int | None = None,
    ) -> _T:
        """Return `request(boto3_client)`, and retry it according to the options.

        Setting `stop` ends the wait between attempts, and so does the time limit. Raises our own
        errors; their messages contain `doing` and `where`.
        """
        if self.time_limit.passed:
            raise TransferError(errno.ETIMEDOUT, f"{doing}: the time limit has passed", str(where))
        policy = RetryPolicy(max_attempts=attempts or self._options.max_attempts)
        try:
            client = self.boto3
            return policy.run(
                lambda: _read(request, client),
                judge,
                meter,
                lambda seconds: self.time_limit.wait(seconds, stop),
            )
        except Exception as error:
            better = explain(error, doing, where)
            if better is error:
                raise
            text = str(error)
            # The traceback of a request without an answer shows its URL, with any credentials.
            raise better from (error if without_login(text) == text else None)

    def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        for made in getattr(self, "_made", ()):
            made.close()

    def __del__(self) -> None:
        self.close()  # boto3 does not close its connections at a defined time

    def _make(self) -> Any:
        if reason := boto3_missing():
            raise UnavailableError("s3", reason, INSTALL)
        import boto3
        import botocore.session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        options = self._options
        # Payloads carry a checksum instead of a signature over every byte; see docs/s3.md.
        s3: dict[str, Any] = {"payload_signing_enabled": options.checksum == "none" or None}
        if options.checksum != "none":
            s3["payload_signing_enabled"] = False
        if options.addressing_style != "auto":
            s3["addressing_style"] = options.addressing_style
        config = Config(
            s3={name: value for name, value in s3.items() if value is not None},
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=max(options.max_pool, options.threads),
            connect_timeout=options.connect_timeout_s,
            read_timeout=options.read_timeout_s,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        try:
            core = botocore.session.Session()
            core.register_component("data_loader", _loader())
            session = boto3.session.Session(botocore_session=core)
            made = session.client(
                "s3",
                endpoint_url=options.endpoint_url or None,
                verify=None if options.verify_tls else False,
                config=config,
            )
        except (BotoCoreError, ValueError) as error:
            text = without_login(str(error))
            if isinstance(error, ValueError) and ("@" in text or _has_query(str(error))):
                # botocore quotes the invalid URL in its message, credentials included.
                text = "it does not take the endpoint's URL, which has a login or a query in it"
            raise UnavailableError(
                "s3",
                f"boto3 makes no client ({text}).",
                "Check the AWS_* variables and the writer's options.",
            ) from None
        guard_connections(made, self.time_limit, options.read_timeout_s)
        if _RAW_LOGIN.search(str(made.meta.endpoint_url)):
            made.close()
            raise UnavailableError(
                "s3",
                "the endpoint's URL has a login in it that is not escaped, so its host is unclear.",
                "Remove the login from AWS_ENDPOINT_URL_S3, or escape it: write %2F for /.",
            )
        if _has_query(str(made.meta.endpoint_url)):
            made.close()
            raise UnavailableError(
                "s3",
                "the endpoint's URL has a query in it; no store takes one, and it may be a secret.",
                "Remove the ? or # and all that follows it from AWS_ENDPOINT_URL_S3.",
            )
        return made


def _has_query(url: str) -> bool:
    return "?" in url or "#" in url


def _read(request: Callable[[Any], _T], client: Any) -> _T:
    """Return `request(client)`. Raises CorruptedError for an answer with an invalid number.

    boto3 raises a bare ValueError for it.
    """
    try:
        return request(client)
    except ValueError as error:
        if type(error) not in (ValueError, UnicodeDecodeError):
            raise
        raise CorruptedError(f"the server's answer cannot be read ({error})") from error


@functools.cache
def _loader() -> Any:
    """Return botocore's loader of service descriptions; all clients share it and read them once."""
    from botocore.loaders import create_loader

    return create_loader()
