"""PeerContender: another project's save and restore under the rules of the bench.

Inside the clock the bench does what the rules require and a peer does not do itself: it syncs the
files, renames the checkpoint and syncs the directories. None of our threads runs in that time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from iobench import linux
from iobench.bench.contenders.base import Contender
from iobench.bench.data.replay import Replay
from iobench.bench.targets.base import Location
from iobench.formats import safetensors
from iobench.peers import PREFIX
from iobench.peers.base import Peer, State
from iobench.results.records import Verified
from iobench.units import KIB
from iobench.writers.registry import make
from iobench.writers.s3_store.target import is_s3
from iobench.writers.transfer import Meter, PathCount, Transfer

_WARM_UP_BYTES = 64 * KIB
_FOR_RESTORES = "buffered"  # writes the files of peers that only restore


class PeerContender(Contender):
    """A peer. It saves each file of the replay as one state dict, under the path of the file."""

    is_peer = True
    fresh = True

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer, f"{PREFIX}{peer.name}")
        self.peer, self.saves, self.maps_files = peer, peer.saves, peer.maps_files
        self.restore_mode = "all-gather" if peer.together else "all"
        self._restored: list[State] = []

    def save(self, replay: Replay, directory: Location) -> Transfer:
        if not self.saves:
            return replay.save(make(_FOR_RESTORES), directory, "safetensors")
        return Transfer.total(
            self._save(state, self._path(directory, replay.files[number].path), size)
            for number, (state, size) in enumerate(
                zip(replay.states, replay.file_bytes, strict=True)
            )
        )

    def _save(self, state: State, path: str, size: int) -> Transfer:
        meter = Meter()
        paths: dict[str, PathCount] = {}
        if not is_s3(path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        with meter.phase("save"):
            self.peer.save(state, path)
        if not is_s3(path):
            files = [file for file in _files(path) if file.is_file()]
            if not self.peer.syncs:
                with meter.phase("sync"):
                    for file in files:
                        linux.sync_file(file)
            stored = sum(file.stat().st_size for file in files)
            paths = {"peer": PathCount(operations=len(files), bytes=stored)}
        return replace(meter.transfer(self.name, "write", size, durable=True), paths=paths)

    def restore(self, replay: Replay, directory: Location) -> Transfer:
        self._restored = []
        return Transfer.total(self._restore_all(replay, directory))

    def _restore_all(self, replay: Replay, directory: Location) -> Iterator[Transfer]:
        for number, size in enumerate(replay.restored_bytes):
            if not replay.wanted.numbers(number):
                self._restored.append({})
                continue
            meter = Meter()
            path = self._path(directory, replay.files[number].path)
            whole = {name: one.to("meta") for name, one in replay.states[number].items()}
            with meter.phase("restore"):
                if replay.cut is None:
                    self._restored.append(self.peer.restore(path, whole))
                else:
                    slices = replay.wanted.slices(number)
                    self._restored.append(self.peer.restore_slices(path, whole, slices))
            yield meter.transfer(self.name, "read", size, durable=True)

    def verify(self, replay: Replay, directory: Location) -> Verified:  # noqa: ARG002
        restored, self._restored = self._restored, []
        return replay.verify_states(restored)

    def join(self) -> None:
        self.peer.join()

    def leave(self) -> None:
        self.peer.leave()

    def warm_up(self, directory: Location) -> None:
        tensor = torch.zeros(_WARM_UP_BYTES, dtype=torch.uint8)
        path = f"{str(directory).rstrip('/')}/warm-up{self.peer.suffix}"
        if not is_s3(path):
            Path(directory).mkdir(parents=True, exist_ok=True)
        state = {"tensor": tensor}
        if self.saves:
            self.peer.save(state, path)
        else:
            safetensors.save(state, os.path.basename(path), directory, make(_FOR_RESTORES))
        self.peer.restore(path, {"tensor": tensor.to("meta")})

    def _path(self, directory: Location, path: str) -> str:
        return f"{str(directory).rstrip('/')}/{path}{self.peer.suffix}"


def _files(path: str) -> list[Path]:
    """Return the file `path`, or every file below the directory of that name."""
    return list(Path(path).rglob("*")) if os.path.isdir(path) else [Path(path)]
