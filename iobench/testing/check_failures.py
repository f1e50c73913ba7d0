"""Checks: a transfer that fails leaves nothing behind and harms nothing."""

from __future__ import annotations

from iobench.errors import IobenchError, TransferError
from iobench.testing.check import check
from iobench.testing.content import BrokenImage, content
from iobench.testing.expect import expect, expect_raises
from iobench.testing.harness import WriterHarness


def _broken(rig: WriterHarness, block: int) -> BrokenImage:
    size = rig.block_size
    return BrokenImage.at("file", content(5 * size + 3), block * size + 1)


@check(needs_storage=False)
def failed_write_publishes_nothing(rig: WriterHarness) -> None:
    """A write that fails at its first, a middle or its last block raises and leaves nothing."""
    for block in (0, 2, 5):
        error = expect_raises(TransferError, rig.write, _broken(rig, block))
        expect("cannot be had" in str(error), f"another failure: {error}")
        if rig.stores:
            rig.expect_nothing("file")


@check()
def failed_write_keeps_the_old(rig: WriterHarness) -> None:
    """A write that fails leaves what was under the name, unchanged."""
    rig.put("file", b"the last good one")
    expect_raises(TransferError, rig.write, _broken(rig, 2))
    rig.expect_stored("file", b"the last good one")
    rig.expect_no_leftovers()


@check(needs_storage=False)
def used_again_after_an_error(rig: WriterHarness) -> None:
    """A writer that has failed works as before: writing, reading and streaming."""
    data = content(rig.block_size + 4097)
    for block in range(4):
        expect_raises(TransferError, rig.write, _broken(rig, block))
        rig.expect_round_trip(rig.image("file", data), data)
        with rig.open("stream") as stream:
            stream.write(data)
        rig.expect_stored("stream", data)


@check()
def failed_read_leaves_the_file(rig: WriterHarness) -> None:
    """A read that fails in the middle raises, and the file can still be read."""
    whole = content(5 * rig.block_size + 3)
    rig.write(rig.image("file", whole))
    expect_raises(TransferError, rig.read, _broken(rig, 3))
    rig.expect_stored("file", whole)
    rig.expect_round_trip(rig.image("file", whole), whole)


@check()
def a_name_that_is_a_directory(rig: WriterHarness) -> None:
    """Where a directory has the name already, writing raises and leaves the directory.

    In a flat place, a bucket, there are no directories, and nothing is in the way.
    """
    rig.write(rig.image("taken/inside", content(10)))
    if not getattr(rig.place, "flat", False):
        expect_raises(IobenchError, rig.write, rig.image("taken", content(10)))
        rig._made.discard("taken")
    rig.expect_stored("taken/inside", content(10))
    rig.expect_no_leftovers()
