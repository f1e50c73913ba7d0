"""SafetensorsFormat: the files of a checkpoint of one process, a safetensors file and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iobench.checkpoint.checksums import record_of
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.participant import SaveParticipant
from iobench.checkpoint.place import PartOffer, PartTarget, Place, Written
from iobench.checkpoint.recorded import recorded
from iobench.checkpoint.save import Save
from iobench.checkpoint.serialized import FORMAT, Serialized
from iobench.checkpoint.staged import Staged
from iobench.formats.collector import collector_paused
from iobench.units import GIB
from iobench.writers.image import Bytes
from iobench.writers.local.reused_file import reusing

__all__ = ["SafetensorsFormat"]

_MANY, _SMALL = 5000, 2 * GIB
"""Pieces and bytes of a save without runs of the garbage collector: each would look at them all."""


@dataclass(frozen=True, kw_only=True)
class SafetensorsFormat:
    """Writes the tensors of one process as one file, and the rest of the state as JSON."""

    participant: SaveParticipant | None = None

    def write(
        self,
        save: Save,
        content: Serialized,
        memory: Bytes | None,
        target: PartTarget,
        offer: PartOffer | None,
    ) -> Written:
        del offer  # there is no other node
        image = content.image() if memory is None else content.image_in(memory)
        small, pieces = [content.skeleton_image()], content.structure.pieces
        if self.participant is not None and self.participant.exports:
            small += self.participant.durable(save)[1]
        brief = memory is None and not target.rate_bytes_per_s and content.size_bytes < _SMALL
        with (
            _paused(brief and len(pieces) >= _MANY),
            reusing(target.directory, target.spare, image.path),
            recorded(image, pieces, by_block=target.by_block) as recording,
        ):
            transfer = target.writer.write_many(
                [target.paced(recording.image), *small], target.directory, sync_directory=False
            )
        others = tuple(record_of(one, [("", one.size_bytes)]) for one in small)
        return Written(
            transfer=target.check(save, transfer),
            file=image,
            digests=recording.digests,
            others=others,
        )

    def publish(
        self,
        save: Save,
        content: Serialized,
        own: Written,
        staged: Staged,
        votes: Sequence[str],
        made: Callable[..., Manifest],
        place: Place,
    ) -> Manifest:
        del votes, place
        assert own.digests is not None
        more: dict[str, Any] = {}
        if self.participant is not None:  # a manifest never names a generation that is not durable
            more["offload"] = self.participant.durable(save)[0]
        with collector_paused():
            manifest = made(format=FORMAT, files=(own.digests.record(), *own.others), **more)
            pieces = content.structure.pieces.json(own.digests.found)
            text = manifest.json_parts({own.file.path: pieces})
        staged.publish(text)
        return manifest

    def discard(self, directory: Path) -> None:
        raise AssertionError(directory)  # one process removes what it has staged


def _paused(wanted: bool) -> AbstractContextManager[None]:
    return collector_paused() if wanted else nullcontext()
