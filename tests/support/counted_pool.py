"""CountedPool: fails if a block is given back twice, or while the kernel uses it."""

from __future__ import annotations

from collections.abc import Callable

from iobench.writers.blocks.workers import BlockPool
from iobench.writers.image import Bytes


class CountedPool(BlockPool):
    """`out` are the addresses of the blocks that are taken now, `most` their largest number."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.out: set[int] = set()
        self.most = 0
        self.in_kernel: Callable[[], set[int]] = set

    def take(self) -> Bytes:
        block = super().take()
        self.out.add(block.ctypes.data)
        self.most = max(self.most, len(self.out))
        return block

    def give(self, block: Bytes) -> None:
        assert block.ctypes.data not in self.in_kernel(), "given back while the kernel uses it"
        self.out.remove(block.ctypes.data)
        super().give(block)
