"""peer:runai-streamer: the Run:ai Model Streamer, which reads safetensors files concurrently."""

from __future__ import annotations

import os
from dataclasses import dataclass

from iobench.peers.base import Peer, State
from iobench.writers.base import Availability
from iobench.writers.options import WriterOptions, option


@dataclass(frozen=True, kw_only=True)
class RunaiStreamerOptions(WriterOptions):
    """Options of `runai-streamer`."""

    concurrency: int = option(16, help="Threads that read.", low=1, high=512, search=(4, 16, 32))
    distributed: bool = option(
        False, help="Each rank of torchrun reads a part of the file, and gloo passes it on."
    )


class RunaiStreamer(Peer):
    """Restores only. The caller owns the tensors; the streamer's memory limit is off."""

    name = "runai-streamer"
    summary = "Run:ai Model Streamer: concurrent reads of safetensors files; restores only"
    saves = False
    modules = ("runai_model_streamer",)
    packages = "runai-model-streamer"
    Options = RunaiStreamerOptions
    options: RunaiStreamerOptions

    @property
    def together(self) -> bool:
        return self.options.distributed

    def available(self, target: str) -> Availability:
        if self.together and "MASTER_ADDR" not in os.environ:
            return Availability(
                ok=False,
                reason="distributed=true needs ranks that torch.distributed knows.",
                remedy="Start iobench by torchrun.",
            )
        return super().available(target)

    def join(self) -> None:
        if self.together:
            from torch import distributed

            os.environ["RUNAI_STREAMER_DIST"] = "1"  # by default it uses NCCL alone
            distributed.init_process_group("gloo")

    def leave(self) -> None:
        if self.together:
            from torch import distributed

            distributed.destroy_process_group()

    def save(self, state: State, path: str) -> None:
        raise NotImplementedError("peer:runai-streamer only restores")

    def restore(self, path: str, wanted: State) -> State:
        from runai_model_streamer import SafetensorsStreamer

        os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(self.options.concurrency)
        os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = "-1"
        with SafetensorsStreamer() as streamer:
            # Before `join`, at the first use in a process, it reads alone.
            streamer.stream_file(path, tensor_names=list(wanted), is_distributed=self.together)
            return dict(streamer.get_tensors())
