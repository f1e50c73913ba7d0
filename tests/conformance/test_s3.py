"""The writer `s3` passes the conformance suite with two servers."""

import functools
import secrets
from collections.abc import Iterator

import pytest
from support.check_groups import GROUPS, check_groups
from support.s3_servers import SERVERS, s3_server

from iobench.testing import Bucket, Check, LocalS3
from iobench.testing.suite import run_checks
from iobench.writers import registry

_SETTINGS = (
    {"threads": 3, "part_size": "5MiB"},
    {"threads": 1, "checksum": "crc32c"},
    {"checksum": "none", "addressing_style": "path"},
)
_OF_OTHERS = ("bytes", "reads", "streams", "failures")
"""Groups of checks with the second and third setting, and with the second server; the first setting
runs all groups with the first server. `make test` has of these _QUICK; with moto `make test-all`
runs all groups."""
_QUICK = ("bytes", "streams")


def _cases() -> Iterator[object]:
    for server in SERVERS:
        for number, options in enumerate(_SETTINGS):
            # moto returns a CRC32C for multipart objects that does not match their bytes. It reads
            # neither the signature that replaces the checksum nor a bucket in the host's name.
            if server == "moto" and number:
                continue
            shown = ",".join([server, *(f"{k}={v}" for k, v in options.items())])
            for group, checks in check_groups(groups=_OF_OTHERS if number else GROUPS).items():
                more = (server == "moto" or number > 0) and group not in _QUICK
                marks = [pytest.mark.exhaustive] if more else []
                yield pytest.param(server, options, checks, id=f"{shown}-{group}", marks=marks)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[LocalS3]:
    """Each of the two servers, shared by all tests of this file."""
    with s3_server(request.param) as running:
        yield running


@pytest.mark.parametrize(("server", "options", "checks"), list(_cases()), indirect=["server"])
def test_s3(checks: tuple[Check, ...], options: dict[str, object], server) -> None:
    """Each claim holds in a bucket."""
    prefix = f"{server.target}/{secrets.token_hex(4)}"
    make = functools.partial(registry.make, "s3", **options)
    with server.active():
        run_checks(checks, make, lambda check: Bucket(f"{prefix}/{check}"))
