"""peer:boto3-upload-file: torch.save to a temporary file, which boto3 uploads and downloads."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from iobench.peers.base import Peer, State
from iobench.units import MIB
from iobench.writers.options import WriterOptions, option
from iobench.writers.s3_store.target import S3Target


@dataclass(frozen=True, kw_only=True)
class Boto3UploadFileOptions(WriterOptions):
    """Options of `boto3-upload-file`; the first two are those of boto3's TransferConfig."""

    multipart_chunksize: int = option(16 * MIB, unit="bytes", help="Part size.", low=5 * MIB)
    max_concurrency: int = option(10, help="Concurrent parts.", low=1, high=256)


class Boto3UploadFile(Peer):
    """`upload_file` and `download_file`, through a file in the temporary directory (TMPDIR)."""

    name = "boto3-upload-file"
    summary = "torch.save to a temporary file, boto3's upload_file and download_file"
    schemes = ("s3",)
    syncs = True
    modules = ("boto3",)
    packages = "boto3[crt]"
    Options = Boto3UploadFileOptions
    options: Boto3UploadFileOptions

    def connect(self) -> None:
        self._client  # noqa: B018 -- made now

    def save(self, state: State, path: str) -> None:
        import torch

        target = S3Target.object(path)
        with tempfile.TemporaryDirectory(prefix="iobench-peer-") as directory:
            file = os.path.join(directory, "state.pt")
            torch.save(dict(state), file)
            self._client.upload_file(file, target.bucket, target.key, Config=self._config)

    def restore(self, path: str, wanted: State) -> State:  # noqa: ARG002
        import torch

        target = S3Target.object(path)
        with tempfile.TemporaryDirectory(prefix="iobench-peer-") as directory:
            file = os.path.join(directory, "state.pt")
            self._client.download_file(target.bucket, target.key, file, Config=self._config)
            return cast(State, torch.load(file, weights_only=True))

    @cached_property
    def _client(self) -> Any:
        import boto3

        return boto3.client("s3")

    @cached_property
    def _config(self) -> Any:
        from boto3.s3.transfer import TransferConfig

        return TransferConfig(
            multipart_threshold=self.options.multipart_chunksize,
            multipart_chunksize=self.options.multipart_chunksize,
            max_concurrency=self.options.max_concurrency,
        )
