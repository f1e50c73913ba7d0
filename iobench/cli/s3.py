"""`iobench s3`: list and abort unfinished uploads that killed processes left in a bucket."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from iobench.errors import TransferError, UnavailableError
from iobench.text import printable
from iobench.units import parse_seconds

if TYPE_CHECKING:
    from iobench.writers.s3_store.objects import S3Objects, UnfinishedUpload

_ATTEMPTS = 3  # few: a user waits for the answer

app = typer.Typer(
    no_args_is_help=True, help="List or abort unfinished multipart uploads in a bucket."
)


@app.command("list-uploads")
def list_uploads(place: str, older_than: str = "0s") -> None:
    """List unfinished multipart uploads. Their parts are stored, and paid for, until aborted.

    Arguments:
        s3://BUCKET[/PREFIX]: The bucket, or a prefix in it.

    Options:
        --older-than TIME: Only uploads that began this long ago or earlier: 90s, 2h, 1d.
    """
    _, found = _uploads(place, older_than)
    from iobench.report.grid import Screen

    for upload in found:
        line = f"{upload.initiated.isoformat(timespec='seconds')}  {upload.target}"
        print(*Screen.of(sys.stdout).paragraph(line, indent="  "), sep="\n")
    print(f"{len(found)} unfinished uploads below {place}", file=sys.stderr)


@app.command("abort-uploads")
def abort_uploads(place: str, older_than: str = "0s") -> None:
    """Abort unfinished multipart uploads.

    These are the uploads that list-uploads lists with the same --older-than. Uploads of running
    processes are aborted too, unless --older-than spares them. No object is touched: a checkpoint
    that is complete stays.

    Arguments:
        s3://BUCKET[/PREFIX]: The bucket, or a prefix in it.

    Options:
        --older-than TIME: Only uploads that began this long ago or earlier: 90s, 2h, 1d.
    """
    objects, found = _uploads(place, older_than)
    for upload in found:
        objects.abort(upload)
        print(f"aborted {printable(str(upload.target))}")
    print(f"{len(found)} unfinished uploads below {place}", file=sys.stderr)


def _uploads(place: str, older_than: str) -> tuple[S3Objects, list[UnfinishedUpload]]:
    """Return the bucket, and its unfinished uploads that began so long ago."""
    from iobench.writers.s3 import S3Writer
    from iobench.writers.s3_store.objects import S3Objects
    from iobench.writers.s3_store.target import S3Target

    target = S3Target.parse(place)
    objects = S3Objects(S3Writer(checksum="none", max_attempts=_ATTEMPTS).client, target)
    seconds = parse_seconds(older_than, "--older-than")
    try:
        return objects, _older(objects.uploads(), seconds)
    except TransferError as error:  # the first request to the store
        raise UnavailableError("s3", f"{error}.") from error


def _older(found: list[UnfinishedUpload], seconds: float) -> list[UnfinishedUpload]:
    now = datetime.now(UTC)  # the store's clock may be ahead: 0s is all of them
    return [one for one in found if not seconds or (now - one.initiated).total_seconds() >= seconds]
