"""The conformance suite for writers, ours and third parties'. Needs no test framework.

By hand, raising an ExceptionGroup of everything that does not hold:

    iobench.testing.check_writer(lambda: MyWriter(threads=3), "/mnt/scratch")

With pytest, one test for each claim:

    @pytest.mark.parametrize("check", iobench.testing.writer_checks(), ids=str)
    def test_my_writer(check, tmp_path):
        check(MyWriter, tmp_path)

A target that is no directory (a bucket, say) takes part by a `Place` of its own.
"""

from __future__ import annotations

from iobench.testing.check import Check, check
from iobench.testing.content import BrokenImage, content, content_at, cut, empty_like
from iobench.testing.expect import expect, expect_raises, expect_same
from iobench.testing.footprint import Footprint
from iobench.testing.place import Directory, Place
from iobench.testing.rig import MakeWriter, Rig
from iobench.testing.suite import check_writer, writer_checks

__all__ = [
    "BrokenImage",
    "Check",
    "Directory",
    "Footprint",
    "MakeWriter",
    "Place",
    "Rig",
    "check",
    "check_writer",
    "content",
    "content_at",
    "cut",
    "empty_like",
    "expect",
    "expect_raises",
    "expect_same",
    "writer_checks",
]
