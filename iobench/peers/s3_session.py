"""Endpoint and region of the object store, from AWS's usual environment variables."""

from __future__ import annotations

import os

__all__ = ["OWN_SERVER", "endpoint_url", "region"]

OWN_SERVER = "IOBENCH_S3_SERVER"
"""Environment variable with the name of the server that this process started, if any."""


def endpoint_url() -> str | None:
    """Return the URL of the store; None for Amazon's own."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def region() -> str:
    """Return the region, by default us-east-1; stores other than Amazon's accept any region."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
