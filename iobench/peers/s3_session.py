"""What the peers for object stores share: where the store is, by AWS's usual variables."""

from __future__ import annotations

import os

__all__ = ["endpoint_url", "region"]


def endpoint_url() -> str | None:
    """The store's URL where it is none of Amazon's."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def region() -> str:
    """The region; a store of one's own takes any."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
