"""peer:s3torchconnector: Amazon's S3 Connector for PyTorch; torch.save writes into an upload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast

from iobench.peers.base import Peer, State, endpoint_url, region
from iobench.units import MIB
from iobench.writers.options import WriterOptions, option


@dataclass(frozen=True, kw_only=True)
class S3TorchConnectorOptions(WriterOptions):
    """Options of `s3torchconnector`: those of its S3ClientConfig."""

    part_size: int = option(8 * MIB, unit="bytes", help="Part size.", low=5 * MIB)
    throughput_target_gbps: int = option(10, unit="Gbit/s", help="Target throughput.", low=1)


class S3TorchConnector(Peer):
    """`S3Checkpoint.writer` and `.reader`. An object is durable and visible when it is closed."""

    name = "s3torchconnector"
    summary = "Amazon S3 Connector for PyTorch: S3Checkpoint with torch.save and torch.load"
    schemes = ("s3",)
    syncs = True
    modules = ("s3torchconnector",)
    packages = "s3torchconnector"
    refused_by: ClassVar[Mapping[str, str]] = {
        "rclone": "its uploads to the server of --s3-local end with an error of the CRT (14366)."
    }
    Options = S3TorchConnectorOptions
    options: S3TorchConnectorOptions

    def connect(self) -> None:
        self._checkpoint  # noqa: B018 -- made now

    def save(self, state: State, path: str) -> None:
        import torch

        with self._checkpoint.writer(path) as file:
            torch.save(dict(state), file)

    def restore(self, path: str, wanted: State) -> State:  # noqa: ARG002
        import torch

        with self._checkpoint.reader(path) as file:
            return cast(State, torch.load(file, weights_only=True))

    @cached_property
    def _checkpoint(self) -> Any:
        from s3torchconnector import S3Checkpoint, S3ClientConfig

        return S3Checkpoint(
            region(),
            endpoint=endpoint_url(),
            s3client_config=S3ClientConfig(
                part_size=self.options.part_size,
                throughput_target_gbps=float(self.options.throughput_target_gbps),
                force_path_style=endpoint_url() is not None,
            ),
        )
