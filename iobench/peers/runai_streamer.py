"""peer:runai-streamer: the Run:ai Model Streamer, which reads safetensors files concurrently."""

from __future__ import annotations

import os
from dataclasses import dataclass

from iobench.peers.base import Peer, State
from iobench.writers.options import WriterOptions, option

__all__ = ["RunaiStreamer"]


@dataclass(frozen=True, kw_only=True)
class RunaiStreamerOptions(WriterOptions):
    """Options of `runai-streamer`."""

    concurrency: int = option(16, help="Threads that read.", low=1, high=512, search=(4, 16, 32))


class RunaiStreamer(Peer):
    """Restores only. The caller owns the tensors; the streamer's memory limit is off."""

    name = "runai-streamer"
    summary = "Run:ai Model Streamer: concurrent reads of safetensors files; restores only"
    saves = False
    modules = ("runai_model_streamer",)
    packages = "runai-model-streamer"
    Options = RunaiStreamerOptions
    options: RunaiStreamerOptions

    def save(self, state: State, path: str) -> None:
        raise NotImplementedError("peer:runai-streamer only restores")

    def restore(self, path: str, wanted: State) -> State:
        from runai_model_streamer import SafetensorsStreamer

        os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(self.options.concurrency)
        os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = "-1"
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(path, tensor_names=list(wanted))
            return dict(streamer.get_tensors())
