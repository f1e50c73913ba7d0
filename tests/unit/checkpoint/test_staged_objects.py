"""A checkpoint in a bucket that is not published, and cannot be removed."""

from __future__ import annotations

import pytest

from iobench.checkpoint.object_store import StagedObjects
from iobench.errors import TransferError
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.objects import S3Objects


def test_what_cannot_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The removal's error is raised, or is a note on the error of the block."""

    def refuse(*_: object) -> None:
        raise TransferError(5, "SlowDown", "s3://bucket/step-1")

    monkeypatch.setattr(S3Objects, "keys", lambda _: [])
    monkeypatch.setattr(S3Objects, "delete", refuse)
    with (
        pytest.raises(TransferError, match="SlowDown"),
        StagedObjects("s3://bucket/step-1", S3Writer()),
    ):
        pass
    with (
        pytest.raises(KeyError) as caught,
        StagedObjects("s3://bucket/step-1", S3Writer()),
    ):
        raise KeyError("a save that fails")
    (note,) = caught.value.__notes__
    assert "s3://bucket/step-1: what was written could not be removed" in note
