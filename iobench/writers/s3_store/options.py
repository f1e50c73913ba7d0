"""Options of the `s3` writer. No option is a credential or may contain one."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from iobench.errors import OptionError
from iobench.units import MIB
from iobench.writers.options import WriterOptions, option
from iobench.writers.s3_store.checksum import ALGORITHMS
from iobench.writers.s3_store.parts import PART_LARGEST, PART_SMALLEST

__all__ = ["S3Options"]


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
        60.0,
        unit="seconds",
        low=0.1,
        high=3600,
        help="limit for an endpoint that sends nothing, or less than 1KiB/s",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.part_size < PART_SMALLEST:
            raise OptionError(
                f"option part_size={self.part_size}: must be from 5MiB to 5GiB (what S3 takes), "
                "or 0 to have it chosen"
            )
        if self.endpoint_url:
            _check_endpoint(self.endpoint_url)


def _check_endpoint(text: str) -> None:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
        secret = bool(parts.query or parts.fragment)
    except ValueError:
        good, secret = False, False
    # An @ anywhere: a raw / in a password ends the part that a parser takes for the credentials.
    if secret or "@" in text:
        raise OptionError(
            "option endpoint_url: must not carry a login; set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY instead"
        )
    if not good:
        raise OptionError(
            f"option endpoint_url={text}: must be a URL such as https://s3.example.org"
        )
