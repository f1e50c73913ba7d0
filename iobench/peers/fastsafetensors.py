"""peer:fastsafetensors: IBM's loader of safetensors files, and its sharded saver."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass

from iobench.peers.base import Peer, State
from iobench.writers.options import WriterOptions, option


@dataclass(frozen=True, kw_only=True)
class FastsafetensorsOptions(WriterOptions):
    """Options of `fastsafetensors`."""

    shards: int = option(16, help="Files per state.", low=1, high=256)
    threads: int = option(8, help="Threads that write.", low=1, high=64)


class Fastsafetensors(Peer):
    """`ParallelSaver` with its fsync on; `SafeTensorsFileLoader` on the CPU, tensors copied out.

    The loader's tensors are views of its buffers, which it frees at its end; so they are copied.
    """

    name = "fastsafetensors"
    summary = "fastsafetensors' ParallelSaver (fsync) and SafeTensorsFileLoader, without GDS"
    syncs = True
    modules = ("fastsafetensors",)
    packages = "fastsafetensors"
    maps_files = True
    Options = FastsafetensorsOptions
    options: FastsafetensorsOptions

    def save(self, state: State, path: str) -> None:
        from fastsafetensors import ParallelSaver

        os.mkdir(path)
        shards = min(self.options.shards, len(state))
        saver = ParallelSaver(num_shards=shards, num_threads=self.options.threads, fsync=True)
        saver.save(dict(state), os.path.join(path, "state"))

    def restore(self, path: str, wanted: State) -> State:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
        try:
            loader.set_tensor_filter(lambda name: name in wanted)
            loader.add_filenames({0: sorted(glob.glob(f"{glob.escape(path)}/*.safetensors"))})
            buffers = loader.copy_files_to_device()
            try:
                return {name: buffers.get_tensor(name).clone() for name in wanted}
            finally:
                buffers.close()
        finally:
            loader.close()
