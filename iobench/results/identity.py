"""Identity of runs (id, time, hash of the request), and of contenders and figures within them."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from iobench.results.codec import to_plain
from iobench.results.records import Failure, Operation, Sample

Figure = tuple[str, Operation, str | None]
"""Key of samples that repeat one measurement; `figure_of` returns it."""


def utc_now() -> str:
    """Return the current time, UTC, ISO 8601 with milliseconds: `2026-01-31T12:00:00.000Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_run_id() -> str:
    """Return 16 random hexadecimal digits."""
    return secrets.token_hex(8)


def config_hash(
    config: Mapping[str, Any], *, files: Iterable[Mapping[str, Any]] | None = None
) -> str:
    """Return 16 hexadecimal digits (truncated SHA-256), independent of the order of keys.

    `files` is the entry "files" of `config`. It is hashed file by file: there may be 100,000.
    """
    mark = secrets.token_hex(16)
    encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
    text = encode(to_plain(config) | ({} if files is None else {"files": mark}))
    before, _, after = text.partition(f'"{mark}"')
    hashed = hashlib.sha256(before.encode())
    if files is not None:
        hashed.update(b"[")
        for number, file in enumerate(files):
            hashed.update((b"," if number else b"") + encode(file).encode())
        hashed.update(f"]{after}".encode())
    return hashed.hexdigest()[:16]


def contender_of(sample: Sample | Failure) -> str:
    """Return a key that is equal for samples of the same contender at the same setting, in any run.

    Full and partial restores have the same key: they read the same saved files.
    """
    return sample.setting.contender


def figure_of(sample: Sample) -> Figure:
    """Return a key that is equal for samples that repeat the same measurement.

    Its parts are `contender_of`, `operation` and `restore_as`.
    """
    return contender_of(sample), sample.operation, sample.axes.restore_as


def groups(samples: Iterable[Sample]) -> dict[Figure, list[Sample]]:
    """Return the samples by `figure_of`, in the order of the first of each."""
    found: dict[Figure, list[Sample]] = {}
    for sample in samples:
        found.setdefault(figure_of(sample), []).append(sample)
    return found
