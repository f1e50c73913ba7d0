"""The conformance suite for writers, ours and those of third parties. Needs no test framework.

`check_writer` runs every check and raises an ExceptionGroup of the failed ones:

    iobench.testing.check_writer(lambda: MyWriter(threads=3), "/mnt/scratch")

With pytest, each check is one test:

    @pytest.mark.parametrize("check", iobench.testing.writer_checks(), ids=str)
    def test_my_writer(check, tmp_path):
        check(MyWriter, tmp_path)

For a target that is not a directory, implement `TestTarget`. `Bucket` implements it for a bucket,
and `local_s3` runs a server that has a bucket:

    with iobench.testing.local_s3() as server, server.active():
        check(MyWriter, iobench.testing.Bucket(f"{server.target}/some/prefix"))
"""

from __future__ import annotations

from iobench.bench.targets.local_s3 import LocalS3, local_s3
from iobench.testing.check import Check, Footprint, check
from iobench.testing.content import BrokenImage, content, content_at, cut, empty_like
from iobench.testing.harness import MakeWriter, WriterHarness, expect, expect_raises, expect_same
from iobench.testing.suite import check_writer, writer_checks
from iobench.testing.target import Bucket, Directory, TestTarget

__all__ = [
    "BrokenImage",
    "Bucket",
    "Check",
    "Directory",
    "Footprint",
    "LocalS3",
    "MakeWriter",
    "TestTarget",
    "WriterHarness",
    "check",
    "check_writer",
    "content",
    "content_at",
    "cut",
    "empty_like",
    "expect",
    "expect_raises",
    "expect_same",
    "local_s3",
    "writer_checks",
]
