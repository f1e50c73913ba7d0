"""recorded: computes the checksums of a file while a writer writes it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from iobench.checkpoint.checksums import PieceDigests
from iobench.checkpoint.manifest import FileRecord
from iobench.checkpoint.pieces import Pieces
from iobench.checkpoint.streamed import StreamedImage
from iobench.units import KIB
from iobench.writers.blocks.channel import Channel, Lease
from iobench.writers.image import Bytes, FileImage
from iobench.writers.transfer import Meter
from iobench.writers.wrapped_image import WrappedImage

__all__ = ["Recording", "recorded"]

_SMALL = 64 * KIB
"""The largest piece that is left to the copies of the writer."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Write `image`; after that, `digests` has the checksums."""

    image: FileImage
    digests: PieceDigests

    @property
    def record(self) -> FileRecord:
        """The record of the file, after the body."""
        return self.digests.record()


@contextmanager
def recorded(image: FileImage, pieces: Pieces, *, by_block: bool) -> Iterator[Recording]:
    """Compute the checksums of `image` while the body writes `Recording.image`.

    A thread computes them: it reads the image's memory, and it has ended after the body, also after
    Ctrl-C. With `by_block`, for a writer that copies to blocks, it leaves small pieces to these
    copies: many short computations in another thread would hold Python's lock, and the writer would
    wait for it at every copy (docs/decisions/0062). If the writer takes the memory itself, because
    direct I/O is refused, the thread computes them all. Raises what the thread raised.

    Of a StreamedImage the thread computes all of them, and raises why the save fails.
    """
    digests = PieceDigests(image, pieces)
    streamed = image if isinstance(image, StreamedImage) else None
    by_block = by_block and streamed is None and not image.in_one_piece(0, image.size_bytes)
    above = _SMALL if by_block else -1
    # A channel is a reference cycle with its function, so that must not hold the image's memory.
    channel: Channel[tuple[PieceDigests, int, StreamedImage | None]] = Channel(
        lambda: channel.serve(_compute), name="iobench-checksums", limit=2
    )
    all_of_them = functools.cache(lambda: channel.submit(Lease((digests, -1, None))))
    sent = _RecordedImage(image, _digests=digests, _compute=all_of_them) if by_block else image
    try:
        channel.submit(Lease((digests, above, streamed)))
        yield Recording(image=sent, digests=digests)
        channel.drain()
        if streamed is not None:
            streamed.written()
        digests.compute()  # pieces in two blocks
    finally:
        channel.close()


def _compute(wanted: tuple[PieceDigests, int, StreamedImage | None]) -> None:
    digests, above, streamed = wanted
    if streamed is not None:
        digests.compute(before=streamed.begin)
        streamed.hashed()
    digests.compute(above=above)


class _RecordedImage(WrappedImage):
    """An image whose small pieces are hashed in the blocks to which a writer copies them."""

    _digests: PieceDigests
    _compute: Callable[[], None]

    @contextmanager
    def outgoing(self, start: int, stop: int, meter: Meter) -> Iterator[list[Bytes]]:
        if stop - start > _SMALL:  # not the end of a file, which has no whole page
            self._compute()
        with super().outgoing(start, stop, meter) as views:
            yield views

    def gather(self, start: int, stop: int, block: Bytes) -> int:
        count = self._image.gather(start, stop, block)
        self._digests.compute_in(start, stop, block)
        return count
