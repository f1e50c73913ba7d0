"""Checks: a failed transfer leaves nothing behind and damages nothing."""

from __future__ import annotations

from iobench.errors import IobenchError, TransferError
from iobench.testing.check import check
from iobench.testing.content import BrokenImage, content
from iobench.testing.harness import WriterHarness, expect, expect_raises


def _broken(harness: WriterHarness, block: int) -> BrokenImage:
    size = harness.block_size
    return BrokenImage.at("file", content(5 * size + 3), block * size + 1)


@check(needs_storage=False)
def failed_write_publishes_nothing(harness: WriterHarness) -> None:
    """A write that fails at its first, a middle or its last block raises, and leaves nothing or
    the old file.
    """
    for old in (None, b"the last good one"):
        if old is not None:
            harness.put("file", old)
        for block in (0, 2, 5):
            error = expect_raises(TransferError, harness.write, _broken(harness, block))
            expect("is broken" in str(error), f"another failure: {error}")
            found = harness.test_target.stored("file")
            expect(found == old, f"the file holds {found!r:.60} after a failure")
            harness.expect_no_leftovers()


@check(needs_storage=False)
def used_again_after_an_error(harness: WriterHarness) -> None:
    """After a failure of a write or read, the writer still writes, reads and streams."""
    data = content(harness.block_size + 4097)
    for block in range(4):
        expect_raises(TransferError, harness.write, _broken(harness, block))
        harness.expect_round_trip(harness.image("file", data), data)
        with harness.open("stream") as stream:
            stream.write(data)
        harness.expect_stored("stream", data)
        if harness.stores:
            whole = content(5 * harness.block_size + 3)
            harness.write(harness.image("file", whole))
            expect_raises(TransferError, harness.read, _broken(harness, block))
            harness.expect_stored("file", whole)


@check()
def a_name_that_is_a_directory(harness: WriterHarness) -> None:
    """If a directory has the name already, writing raises and leaves the directory.

    A flat target, such as a bucket, has no directories, so both names may exist.
    """
    harness.write(harness.image("taken/inside", content(10)))
    if not getattr(harness.test_target, "flat", False):
        expect_raises(IobenchError, harness.write, harness.image("taken", content(10)))
        harness._made.discard("taken")
    harness.expect_stored("taken/inside", content(10))
    harness.expect_no_leftovers()
