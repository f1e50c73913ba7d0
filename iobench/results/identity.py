"""What tells one run from another: its id, its time and the hash of what was asked."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from iobench.results.codec import to_plain

__all__ = ["config_hash", "new_run_id", "utc_now"]


def utc_now() -> str:
    """The time now, UTC, ISO 8601 with milliseconds: `2026-01-31T12:00:00.000Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_run_id() -> str:
    """16 random hexadecimal digits."""
    return secrets.token_hex(8)


def config_hash(config: Mapping[str, Any]) -> str:
    """16 hexadecimal digits (SHA-256, cut) that equal configurations share, in any key order."""
    text = json.dumps(to_plain(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
