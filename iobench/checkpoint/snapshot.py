"""Copies of a training state into a slot, at memory speed: at once, or lazily in a thread."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from iobench import linux
from iobench.checkpoint.content import Content, Streamed
from iobench.checkpoint.persister import Persister, Snapshot
from iobench.errors import StateError
from iobench.units import MIB
from iobench.writers.blocks.channel import Lease, LeaseState
from iobench.writers.blocks.pages import make_pages
from iobench.writers.blocks.workers import Blocks, run_workers
from iobench.writers.device.cuda import Device, cuda_device
from iobench.writers.device.staging import DeviceCopies, staged
from iobench.writers.image import AnyMemory, Bytes, FileImage
from iobench.writers.transfer import Meter

# Large enough for a memcpy past the caches of the CPU, small enough to end together.
_BLOCK = 16 * MIB
_ALONE = 64 * MIB  # of one thread: a block costs 0.06 ms of Python and system calls
_MOST_THREADS = 8
_NICE = 15  # below the persister


_OnGpu = tuple[FileImage, DeviceCopies]
"""The file of a state with GPU tensors, on its memory, and what copies it."""


def copy_into(memory: Bytes, content: Content, on_gpu: _OnGpu | None = None) -> float:
    """Copy the file to the beginning of `memory`. On return the state may change.

    Several threads copy CPU tensors without the GIL. GPU tensors are copied `on_gpu`; None: after
    the work of this thread. No copy is in flight afterwards, also after an error. Returns the
    seconds in which pages of `memory` were made.
    """
    if content.on_cpu:
        return copy_image(memory, content.image(), processes=content.processes)
    image, copies = on_gpu or gpu_source(content)
    _copy_from_gpu(memory, image, 0, image.size_bytes, copies)
    return 0.0


def gpu_source(content: Content) -> _OnGpu:
    """Return what `copy_into` needs for a state with GPU tensors, after the work of this thread."""
    gpus, image = gpus_of(content), content.image()
    # After the image: a tensor that is not contiguous was copied within its device for it.
    return image, DeviceCopies(gpus)


def gpus_of(content: Content) -> list[Device]:
    """Return the devices of the state's GPU tensors.

    Raises StateError for a tensor that is neither in host memory nor on a CUDA device.
    """
    devices: list[Device] = []
    for name, tensor in zip(content.names, content.tensors, strict=True):
        if tensor.is_cpu:
            continue
        device = tensor.device
        if device.type != "cuda":
            raise StateError(
                f"{name}: a tensor on {device} cannot be saved; a state is on CPU and CUDA devices"
            )
        devices.append(cuda_device(device))
    return devices


def copy_image(
    memory: Bytes, image: FileImage, *, begin: int = 0, end: int | None = None, processes: int = 1
) -> float:
    """Copy the bytes [begin, end) of an image to the same place in `memory` with several threads.

    Each makes the missing pages of its blocks. Returns the seconds that this took. When several
    `processes` copy at the same time, their threads together are no more than the CPUs.
    """
    meter, end = Meter(), image.size_bytes if end is None else end

    def work(blocks: Blocks, own: Meter) -> None:
        for start, stop in blocks:
            part = memory[start:stop]
            began_s = time.perf_counter()
            if make_pages(memory[start - start % linux.PAGE : stop]):
                own.seconds["pages"] = own.seconds.get("pages", 0) + time.perf_counter() - began_s
            image.gather(start, stop, part)

    cpus = (os.cpu_count() or 1) // processes
    threads = max(1, min(_MOST_THREADS, cpus, -(-(end - begin) // _BLOCK)))
    blocks = Blocks([(begin, end)], _BLOCK if threads > 1 else _ALONE)
    run_workers(threads, blocks, work, meter)
    return meter.seconds.get("pages", 0.0)


def _copy_from_gpu(
    memory: Bytes, image: FileImage, begin: int, end: int, copies: DeviceCopies
) -> None:
    """Copy the bytes [begin, end) of an image to the same place in `memory`."""

    def placed() -> Iterator[tuple[AnyMemory, AnyMemory]]:
        position = begin
        for piece in image.pieces(begin, end):
            yield piece, memory[position : position + len(piece)]
            position += len(piece)

    copies.make(placed())


def _versions(content: Content) -> dict[str, int]:
    """Return autograd's version counter of each tensor: its number of in-place changes.

    The counters are those of the state's own tensors. A leaf that several tensors share is another
    tensor object, whose counter may not change.
    """
    return {
        name: tensor._version
        for name, tensor in zip(content.names, content.tensors, strict=True)
        if not tensor.is_inference()
    }


class LazyCopy:
    """`copy_into` in a thread, during the next forward and backward pass.

    Only torch tensors are read later; numpy arrays and plain values are copied at once. `run`
    submits the complete snapshot to the persister. If a tensor changed during the copy, it reports
    a StateError instead. From the begin of `run` on, its thread owns the slot.

    A snapshot that is larger than its slot is submitted first. It is copied while it is written,
    and `run` ends when the state may change; see Streamed. With `waits`, the trainer waits for it.
    """

    def __init__(
        self, lease: Lease[Snapshot], persister: Persister, *, waits: bool = False
    ) -> None:
        self._lease, self._persister = lease, persister
        content: Content = lease.item.content
        self._content = content = content if waits else content.to_be_copied_later()
        self._versions = {} if waits else _versions(content)
        if lease.item.begin:
            lease.item.save.streamed = True
            lease.item.streamed = Streamed(
                lease.item.begin, content.whole_image(), self._copy_rest, self._check_unchanged
            )
        self._on_gpu = None if content.on_cpu else gpu_source(content)

    def run(self) -> None:
        """Copy and submit."""
        snapshot = self._lease.item
        try:
            if snapshot.streamed is not None:
                self._stream(snapshot.streamed)
                return
            snapshot.save.pages_s = copy_into(snapshot.memory, self._content, self._on_gpu)
            self._check_unchanged()
            snapshot.content = self._content.without_memory()
            self._persister.submit(self._lease)
        except BaseException as error:  # noqa: BLE001 -- raised in the trainer's thread
            if snapshot.streamed is None or self._lease.state is LeaseState.HELD:
                self._persister.fail(snapshot.save, error)
            else:
                snapshot.streamed.fail(error)  # the write raises it
        finally:
            self._persister.give(self._lease)

    def stop(self, error: BaseException) -> None:
        """Let the save fail: the trainer does not wait any more."""
        if self._lease.item.streamed is not None:
            self._lease.item.streamed.fail(
                StateError(f"save_async was interrupted before the state was copied: {error!r}")
            )

    def _stream(self, streamed: Streamed) -> None:
        if self._on_gpu is not None:  # for what the trainer has queued: the writer does not know it
            self._on_gpu[1].wait()
        self._lease.item.content = self._content.without_memory(streamed)
        with contextlib.suppress(OSError):  # the trainer waits for the writer
            linux.yield_to_others(_NICE)
        self._persister.submit(self._lease)
        streamed.copy_rest()
        self._persister.wait_for(streamed.taken.wait, self._lease)
        if streamed.failed:
            self._persister.wait_for(self._lease.item.save.wait, self._lease)

    def _copy_rest(self, head: FileImage) -> None:
        """Copy what the slot has room for. `head` computes the checksum of a piece in two parts."""
        content, snapshot = self._content, self._lease.item
        begin, many = snapshot.begin, content.processes
        middle = content.piece_end(begin)
        if self._on_gpu is not None:
            image, copies = self._on_gpu
            if begin < middle:
                with staged(head, Meter()) as on_host:
                    on_host.gather(begin, middle, snapshot.memory[begin:middle])
            _copy_from_gpu(snapshot.memory, image, middle, image.size_bytes, copies)
            self._on_gpu = None
            return
        copy_image(snapshot.memory, head, begin=begin, end=middle)
        snapshot.save.pages_s = copy_image(
            snapshot.memory, content.image(), begin=middle, processes=many
        )

    def _check_unchanged(self) -> None:
        """Compare autograd's counters. They count in-place operations, except those on `.data`."""
        now = _versions(self._content)
        changed = [name for name, version in self._versions.items() if now[name] != version]
        if changed:
            raise StateError(
                f"{changed[0]} ({len(changed)} tensors in all) was changed during its lazy copy, "
                f"so step {self._lease.item.save.step} is not saved; call before_optimizer_step() "
                "before anything changes the state"
            )
