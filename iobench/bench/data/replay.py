"""Replay: saves, restores and verifies a workload's files; tensors are windows of the pool."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from iobench.bench.data.digests import Digests, RestoredFile
from iobench.bench.data.pool import RandomPool, Windows
from iobench.bench.data.sliced_files import SliceImage
from iobench.bench.data.states import States, WindowPlacement, nested, payload_sizes
from iobench.checkpoint.piece_reader import PieceReader
from iobench.errors import UsageError
from iobench.exports.sharded import ShardedLoad
from iobench.formats import safetensors, torch_file, torch_image
from iobench.ranks.exchange import Reader
from iobench.ranks.restore_plan import Range
from iobench.results.records import Verified
from iobench.workloads.specs import SAFETENSORS_METADATA, FileFormat, FileSpec
from iobench.writers.base import StoredReader, Writer
from iobench.writers.image import FileImage, Ranges
from iobench.writers.registry import make
from iobench.writers.transfer import Meter, Transfer


class Replay:
    """The files of one rank, replayed repeatedly, each time with new random bytes.

    `prepare` makes the bytes of the next checkpoint. `save` and `restore` move them through a
    writer; only these two are timed. `verify` compares the restored tensors with the saved ones.
    """

    def __init__(
        self,
        files: Sequence[FileSpec],
        *,
        pool_bytes: int,
        seed: int,
        pool: RandomPool | None = None,
        rank: int = 0,
    ) -> None:
        """Use at most `pool_bytes` of memory for all tensors, or `pool`, which others share.

        `rank` is that of tensor parallelism, for restores of its part.
        """
        self._rank = rank
        self._cuts: dict[str, States] = {}
        self._read_bytes = 0
        self._loaded: list[dict[Any, Any]] = []
        """What `restore` read into new memory, one mapping per file, until `verify`."""
        self._pool = pool or self.pool_for([files], pool_bytes=pool_bytes, seed=seed)
        self._placement = WindowPlacement(files, self._pool.size_bytes)
        self.files = self._placement.files
        self.states = States(self._placement, self._pool)
        """Each file's tensors by name, in payload order; their windows never change."""
        self._digests = Digests(self._placement, self._pool)
        self.want(None)

    @staticmethod
    def pool_for(some: Iterable[Sequence[FileSpec]], *, pool_bytes: int, seed: int) -> RandomPool:
        """Return a pool of at most `pool_bytes`, for replays of all lists in `some`, in turn."""
        longest = enough = 0
        for files in some:
            sizes = array("Q", (size for spec in files for size in payload_sizes(spec)))
            longest = max(longest, max(sizes, default=0))
            enough = max(enough, Windows.needed_bytes(sizes))
        return RandomPool(min(pool_bytes, enough), longest, seed)

    def want(self, tp: int | None) -> None:
        """From now on restore only the slices that one of `tp` tensor parallel ranks loads.

        `prepare` keeps the digests of those that were wanted before. None restores all tensors.
        Saves always write all of them.
        """
        self.wanted = self.states
        """The tensors of `states` that restores read."""
        self.cut: str | None = None
        """Names the slices that restores read; None where they read whole tensors."""
        if tp is not None:
            for rank in range(tp):
                self._cuts.setdefault(f"{rank} of {tp}", self.states.cut(rank, tp))
            self.cut = f"{self._rank % tp} of {tp}"
            self.wanted = self._cuts[self.cut]

    @property
    def notes(self) -> tuple[str, ...]:
        """Facts about the replay that change how its figures are read."""
        found = []
        if any(spec.format == "dcp" for spec in self.files):
            found.append("DCP files are replayed as raw bytes of the same sizes")
        # Whole pages at the ends of ranges are less than that.
        if self.cut is not None and self._read_bytes > 1.05 * (kept := sum(self.restored_bytes)):
            found.append(
                f"of columns the gaps between rows were read too: {self._read_bytes / kept:.2f} "
                "bytes for each that was kept"
            )
        return tuple(found)

    @cached_property
    def file_bytes(self) -> Sequence[int]:
        """Bytes of each file as our formats write it. No tensor's memory is read."""
        return array("q", map(self._file_size, range(len(self.files))))

    def size_bytes(self) -> int:
        """Bytes of all files as our formats write them."""
        return sum(self.file_bytes)

    @property
    def restored_bytes(self) -> Sequence[int]:
        """Bytes that a restore moves for each file; of slices, only theirs."""
        if self.cut is None:
            return self.file_bytes
        return array("q", (sum(one.nbytes for one in each.values()) for each in self.wanted))

    def prepare(self, together: Sequence[int] = ()) -> None:
        """Make the next checkpoint's bytes, and keep the digest of each tensor.

        Several processes that save the same bytes have one seed, and give `together`: the numbers
        of the checkpoint. No two checkpoints have the same.
        """
        self._pool.renew(together)
        with self._pool.trimmed():
            self._digests.remember(self._cuts)
        self.states.make_ahead()

    def digests(self) -> str:
        """Return the digests of what was prepared, as text for `expect` of another process."""
        return self._digests.to_text()

    def expect(self, digests: str) -> None:
        """Compare restores with these digests: another process saved the files."""
        self._digests.expect(digests)

    def save(
        self,
        writer: Writer,
        directory: str | Path,
        file_format: FileFormat | None = None,
        ranges: Iterable[Range] | None = None,
    ) -> Transfer:
        """Write every file below `directory` by `write_many`, without a sync of the directory.

        With `file_format`, all files are written in that format, under their own names. With
        `ranges`, only these parts are written, each as a file of the same path; `Range.item` is the
        number of a file. The phase `serialize` is the time that the formats take. Raises UsageError
        for a file that cannot be cut: torch itself writes it as a stream.
        """
        spent = Meter()
        streamed: list[int] = []
        with self._pool.trimmed():
            images = (
                self._images(file_format, streamed, spent)
                if ranges is None
                else self._slices(ranges, spent)
            )
            parts = [writer.write_many(images, directory, sync_directory=False)]
            parts += [self._stream(number, writer, directory) for number in streamed]
        whole = Transfer.total(parts)
        return replace(whole, phases_s={**spent.seconds, **whole.phases_s})

    def _slices(self, ranges: Iterable[Range], spent: Meter) -> Iterator[FileImage]:
        for number, start, stop in ranges:
            with spent.phase("serialize"):
                whole = self._image(number, None)
            if whole is None or whole.size_bytes != self.file_bytes[number]:
                raise UsageError(
                    f"{self.files[number].path}: cannot be cut into slices; leave out --slices"
                )
            yield SliceImage(whole, start, stop, whole.path)

    def _images(
        self, file_format: FileFormat | None, streamed: list[int], spent: Meter
    ) -> Iterator[FileImage]:
        """Yield the image of each file; put the numbers of those without one into `streamed`."""
        for number in range(len(self.files)):
            with spent.phase("serialize"):
                image = self._image(number, file_format)
            if image is None:
                streamed.append(number)
            else:
                yield image

    def scrub(self) -> None:
        """Change all memory that a restore will fill."""
        self.states.release()
        self._pool.scrub()

    def restore(
        self,
        writer: Writer,
        directory: str | Path,
        reader: Reader | None = None,
        *,
        fresh: bool = False,
    ) -> Transfer:
        """Read the files back, or the slices; `verify` compares the result.

        They go to the windows that they were saved from, with `fresh` to new memory, which takes
        the size of the checkpoint; slices always do. With `reader`, all ranks that restore the same
        files read them together. A window may be part of several files: all of them have the same
        bytes there.
        """
        self._loaded = []
        if self.cut is not None:
            return self._load_cut(writer, directory, reader)
        if not fresh:
            self._pool.intact = False
        numbers = range(len(self.files))
        began, parse_s = time.perf_counter(), 0.0

        def opened(number: int) -> tuple[FileImage, Ranges]:
            nonlocal parse_s
            opened_s = time.perf_counter()
            if fresh:
                made, image = self._allocate(number, writer, directory)
                self._loaded.append(made)
            else:
                image = self._open(number, writer, directory).image
            parse_s += time.perf_counter() - opened_s
            return image, [(0, image.size_bytes)]

        with nullcontext() if fresh else self._pool.trimmed():
            if reader is not None:
                every = list(map(opened, numbers))
                wanted = [Range(n, *part) for n, (_, some) in enumerate(every) for part in some]
                images = {number: image for number, (image, _) in enumerate(every)}
                transfer = reader.read(images, StoredReader(writer, directory), wanted)
            else:
                transfer = writer.read_many(map(opened, numbers), directory)
        phases = {"parse": parse_s, **transfer.phases_s}
        return replace(transfer, phases_s=phases, elapsed_s=time.perf_counter() - began)

    def _load_cut(self, writer: Writer, directory: str | Path, reader: Reader | None) -> Transfer:
        """Restore the slices that are wanted, by the code of `load_sharded`.

        With `reader`, unless its mode is "all", the ranks restore their slices of the same files
        together. The Transfer has the bytes of the slices; `notes` says what else was read.
        """
        began = time.perf_counter()
        numbers = range(len(self.files))
        slices = [self.wanted.slices(number) for number in numbers]
        paths = [self.files[number].path for number in numbers if slices[number]]
        like = {name: index for each in slices for name, index in each.items()}
        load = ShardedLoad(directory, paths, like, writer)
        parse_s = time.perf_counter() - began
        if reader is None or reader.mode == "all":
            moved = load.read_alone()
        else:
            moved = load.read(PieceReader(reader))
        stored = (count for path, count in moved.paths.items() if path != "network")
        self._read_bytes, found = sum(count.bytes for count in stored), load.tensors()
        self._loaded = [{name: found[name] for name in each} for each in slices]
        return replace(
            moved,
            bytes=sum(self.restored_bytes),
            phases_s={"parse": parse_s, **moved.phases_s},
            elapsed_s=time.perf_counter() - began,
        )

    def _open(self, number: int, writer: Writer, directory: str | Path) -> RestoredFile:
        windows = map(self._placement.window, self._placement.tensors(number))
        payload = [self._pool.memory[start:stop] for start, stop, _ in windows]
        path, file_format = self.files[number].path, self.files[number].format
        return RestoredFile.open(path, file_format, payload, writer, directory)

    def _allocate(
        self, number: int, writer: Writer, directory: str | Path
    ) -> tuple[dict[Any, Any], FileImage]:
        """Return new, untouched memory for all tensors of a file, and the image that fills it."""
        path, file_format = self.files[number].path, self.files[number].format
        if file_format == "safetensors":
            return safetensors.prepare(path, directory, writer)
        if file_format == "torch":
            return torch_file.prepare(path, directory, writer)
        found = {name: torch.empty_like(one) for name, one in self.states[number].items()}
        return found, FileImage.of(path, found.values())

    def verify(self, writer: Writer, directory: str | Path) -> Verified:
        """Compare what `restore` read with what was saved, and free new memory; see `Digests`."""
        if self._loaded:
            loaded, self._loaded = self._loaded, []
            return self.verify_states(loaded)
        reopen = partial(self._open, writer=writer, directory=directory)
        verified = self._digests.compare_files(reopen)
        self._pool.intact = not verified.mismatches
        return verified

    def verify_states(self, restored: Sequence[Mapping[Any, Any]]) -> Verified:
        """Compare tensors that were restored to new memory, one mapping per file; see `Digests`."""
        return self._digests.compare_states(restored, self.wanted, self.cut)

    def _file_size(self, number: int) -> int:
        file_format = self.files[number].format
        if file_format not in ("safetensors", "torch"):
            return sum(map(self._placement.size, self._placement.tensors(number)))
        if file_format == "safetensors" and self.files[number].exact:
            return self.files[number].size_bytes
        # Without CRC32s, which take no other room: they alone would read the tensors.
        image = self._image(number, None, crc=False)
        return self._stream(number, make("null"), "").bytes if image is None else image.size_bytes

    def _image(
        self, number: int, file_format: FileFormat | None, *, crc: bool = True
    ) -> FileImage | None:
        """Return the image of one file; None for a torch file without one, see `torch_image`.

        It is the same in every directory: torch's own is a few bytes longer or shorter in one whose
        name is not ASCII. `crc` adds a CRC32 to torch's zip files, as stock torch.save does.
        """
        tensors, path = self.states[number], self.files[number].path
        file_format = file_format or self.files[number].format
        if file_format == "safetensors":
            return safetensors.image(path, tensors, SAFETENSORS_METADATA)
        if file_format == "torch":
            return torch_image.image(path, nested(tensors), crc=crc)
        return FileImage.of(path, tensors.values())

    def _stream(self, number: int, writer: Writer, directory: str | Path) -> Transfer:
        state, path = nested(self.states[number]), self.files[number].path
        return torch_file.save(state, path, directory, writer, sync_directory=False)
