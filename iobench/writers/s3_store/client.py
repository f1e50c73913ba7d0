"""S3Client: boto3 with our retries, our errors and nothing of a login in what it says."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from iobench.errors import UnavailableError
from iobench.writers.s3_store.errors import CorruptedError, explain, judge, without_login
from iobench.writers.s3_store.retry import RetryPolicy
from iobench.writers.transfer import Meter

if TYPE_CHECKING:
    from iobench.writers.s3_store.options import S3Options

__all__ = ["INSTALL", "S3Client", "boto3_missing"]

INSTALL = "Type: pip install 'iobench[s3]'."
_RAW_LOGIN = re.compile(
    r"//.*[/\\?#\s].*@"
)  # what a URL cannot hold; parsers see other hosts in it
_T = TypeVar("_T")


def boto3_missing() -> str:
    """Why there is no boto3; empty where there is one. Imports nothing."""
    return "" if find_spec("boto3") else "boto3 is not installed."


class S3Client:
    """One boto3 client, made when it is first needed; any number of threads may use it.

    Credentials and region come from the standard chain of boto3 and nowhere else, and are kept by
    boto3 alone.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._lock = threading.RLock()
        self._made: list[Any] = []

    @property
    def boto3(self) -> Any:
        """The boto3 client. Raises UnavailableError without boto3 or with broken configuration."""
        with self._lock:
            if not self._made:
                made = self._make()
                self._made.append(made)
                if made is not self._made[0]:  # a signal handler that saves came in meanwhile
                    made.close()
            return self._made[0]

    @property
    def patience_s(self) -> float:
        """Seconds without an answer after which a request has failed."""
        return self._options.read_timeout_s

    @property
    def endpoint(self) -> str:
        """Where the store answers, without anything of a login."""
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
        """What `request(boto3_client)` gives, repeated as the options say.

        `stop` ends the waiting between attempts. Raises our errors, `doing` and `where` in them.
        """
        policy = RetryPolicy(max_attempts=attempts or self._options.max_attempts)
        try:
            client = self.boto3
            wait = None if stop is None else stop.wait
            return policy.run(lambda: _read(request, client), judge, meter, wait)
        except Exception as error:
            better = explain(error, doing, where)
            if better is error:
                raise
            told = str(error)
            # A traceback would show the URL of a request that got no answer.
            raise better from (error if without_login(told) == told else None)

    def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        for made in getattr(self, "_made", ()):
            made.close()

    def __del__(self) -> None:
        self.close()  # boto3 alone would leave its connections to chance

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
            told = without_login(str(error))
            if isinstance(error, ValueError) and ("@" in told or _has_query(str(error))):
                # It quotes what is no URL.
                told = "it does not take the endpoint's URL, which has a login or a query in it"
            raise UnavailableError(
                "s3", f"boto3 makes no client ({told}).", "Check AWS_* and the options."
            ) from None
        if _RAW_LOGIN.search(str(made.meta.endpoint_url)):
            made.close()
            raise UnavailableError(
                "s3",
                "the endpoint's URL has a login in it that is not escaped, so its host is unclear.",
                "Take it out of AWS_ENDPOINT_URL_S3, or escape it: %2F for a / in it.",
            )
        if _has_query(str(made.meta.endpoint_url)):
            made.close()
            raise UnavailableError(
                "s3",
                "the endpoint's URL has a query in it, which no store takes and may be a login.",
                "Take what follows the ? or # out of AWS_ENDPOINT_URL_S3.",
            )
        return made


def _has_query(url: str) -> bool:
    return "?" in url or "#" in url


def _read(request: Callable[[Any], _T], client: Any) -> _T:
    """What `request` gives. boto3 says of a number in an answer that is none just ValueError."""
    try:
        return request(client)
    except ValueError as error:
        if type(error) not in (ValueError, UnicodeDecodeError):
            raise
        raise CorruptedError(f"the server's answer cannot be read ({error})") from error


@functools.cache
def _loader() -> Any:
    """botocore's descriptions of the service, read once for all clients of the process."""
    from botocore.loaders import create_loader

    return create_loader()
