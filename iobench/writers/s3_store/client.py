"""S3Client: boto3 with our retries and errors, and without credentials in any message."""

from __future__ import annotations

import errno
import functools
import os
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

from iobench.errors import OptionError, TransferError, UnavailableError
from iobench.units import MIB
from iobench.writers.options import WriterOptions, option
from iobench.writers.s3_store.connection import TimeLimit, limit_connections
from iobench.writers.s3_store.errors import (
    CorruptedError,
    explain,
    is_throttling,
    is_transient,
    without_login,
)
from iobench.writers.s3_store.parts import ALGORITHMS, PART_LARGEST, PART_SMALLEST
from iobench.writers.transfer import Meter


@dataclass(frozen=True, kw_only=True)
class S3Options(WriterOptions):
    """Options of `s3`. Credentials and region come from boto3's standard chain."""

    part_size: int = option(
        0,
        unit="bytes",
        low=0,
        high=PART_LARGEST,
        search=(0, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB),
        help="bytes of one part or ranged GET, 5MiB to 5GiB; 0: chosen from the object's size",
    )
    threads: int = option(
        8, low=1, high=256, search=(2, 4, 8, 16, 32), help="parts in flight, one thread each"
    )
    checksum: str = option(
        "crc64nvme",
        choices=ALGORITHMS,
        help="end-to-end checksum of every part and of the whole object",
    )
    endpoint_url: str = option(
        "",
        help="URL of a store that is not AWS; empty: boto3's configuration (AWS_ENDPOINT_URL_S3)",
    )
    addressing_style: str = option(
        "auto", choices=("auto", "path", "virtual"), help="position of the bucket in the URL"
    )
    verify_tls: bool = option(True, help="check the endpoint's certificate")
    max_pool: int = option(64, low=1, high=4096, help="connections kept open")
    max_attempts: int = option(8, low=1, high=100, help="attempts of one request before it fails")
    connect_timeout_s: float = option(
        10.0, unit="seconds", low=0.1, high=600, help="limit for connecting to the endpoint"
    )
    read_timeout_s: float = option(
        60.0, unit="seconds", low=0.1, high=3600, help="limit for an endpoint that sends nothing"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.part_size < PART_SMALLEST:
            raise OptionError(
                f"option part_size={self.part_size}: must be from 5MiB to 5GiB (what S3 takes), "
                "or 0 to have it chosen"
            )
        if self.endpoint_url and not _ENDPOINT.fullmatch(self.endpoint_url):
            raise OptionError(
                "option endpoint_url: must be a URL such as https://s3.example.org, and must not "
                "carry a login; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"
            )


_T = TypeVar("_T")
_ENDPOINT = re.compile(r"(?i)https?://(\[[0-9a-f:.]+\]|[^\s/:@?#\[\]]+)(:\d+)?(/[^\s@?#]*)?")


THROTTLED = "throttled"
"""The path under which a Transfer counts answers that ask the client to slow down."""


_DELAY_S, _LONGEST_DELAY_S = 0.1, 20.0


def delay_s(failures: int) -> float:
    """Return the seconds to wait after that many failures in a row.

    Exponential backoff with full jitter: Marc Brooker, "Exponential Backoff And Jitter", AWS
    Architecture Blog, 2015.
    """
    return random.random() * min(_LONGEST_DELAY_S, _DELAY_S * 2.0 ** (failures - 1))


def retried(
    call: Callable[[], _T], meter: Meter, wait: Callable[[float], bool], max_attempts: int
) -> _T:
    """Return `call()`, and retry it while its error is transient. Raises the last error.

    `wait(seconds)` returns True if the transfer was cancelled during the wait. The meter counts
    each retry in `retries` and each throttling as a path.
    """
    failures = 0
    while True:
        try:
            return call()
        except Exception as error:
            if is_throttling(error):
                meter.count(THROTTLED, 0)
            failures += 1
            if not is_transient(error) or failures >= max_attempts or wait(delay_s(failures)):
                raise
            meter.retries += 1


INSTALL = "Type: pip install 'iobench[s3]'."


def boto3_missing() -> str:
    """Return why boto3 cannot be used, or an empty string if it is installed. Imports nothing."""
    return "" if find_spec("boto3") else "boto3 is not installed."


class S3Client:
    """One boto3 client, created on first use. Safe to use from many threads.

    Credentials and region come only from boto3's standard chain, and only boto3 keeps them.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._made: list[Any] = []
        self.time_limit = TimeLimit()

    @property
    def boto3(self) -> Any:
        """The boto3 client.

        Raises UnavailableError if boto3 is missing or its configuration is broken.
        """
        # A forked child has its parent's connections. It would take the answers to its requests.
        if self._pid != os.getpid():
            self._begin()
        if not self._made:
            made = self._make()
            self._made.append(made)
            if made is not self._made[0]:  # a thread or a signal handler that saves was faster
                made.close()
        return self._made[0]

    @property
    def endpoint(self) -> str:
        """The URL of the endpoint. It has no credentials."""
        return str(self.boto3.meta.endpoint_url)

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
        try:
            client = self.boto3
            return retried(
                lambda: _read(request, client),
                meter,
                lambda seconds: self.time_limit.wait(seconds, stop),
                attempts or self._options.max_attempts,
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
        s3: dict[str, Any] = {"payload_signing_enabled": options.checksum == "none"}
        if options.addressing_style != "auto":
            s3["addressing_style"] = options.addressing_style
        config = Config(
            s3=s3,
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
            if _has_secret(str(made.meta.endpoint_url)):
                made.close()
                raise ValueError(made.meta.endpoint_url)
        except (BotoCoreError, ValueError) as error:
            text = str(error)
            if _has_secret(text):  # botocore quotes an invalid URL, credentials included
                text = "the endpoint's URL has a login or a query in it, which no store takes"
            raise UnavailableError(
                "s3",
                f"boto3 makes no client ({text}).",
                "Check the AWS_* variables (AWS_ENDPOINT_URL_S3; keys are in AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY) and the writer's options.",
            ) from None
        limit_connections(made, self.time_limit)
        _sign_in_python(made)
        return made


def _sign_in_python(client: Any) -> None:
    """Let botocore itself sign the requests of `client`, and not awscrt.

    awscrt calls back from C, where an exception ends nowhere: Ctrl-C in there was lost, and the
    request waited for its signature for ever.
    """
    from botocore import auth

    signers = {"CrtS3SigV4Auth": auth.S3SigV4Auth, "CrtSigV4Auth": auth.SigV4Auth}
    signer = client._request_signer
    made = signer.get_auth_instance

    def get_auth_instance(*given: Any, **named: Any) -> Any:
        found = made(*given, **named)
        same = signers.get(type(found).__name__)
        return same(found.credentials, found._service_name, found._region_name) if same else found

    signer.get_auth_instance = get_auth_instance


def _has_secret(url: str) -> bool:
    """Whether there may be a login or a signature in it.

    An @ anywhere: a raw / in a password ends the part that a parser takes for the credentials.
    """
    return bool({*"@?#"} & {*url})


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
