"""Direct reads into small pages go by blocks where huge pages are slow to make."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from iobench.units import MIB
from iobench.writers.blocks.pages import fresh_pages, in_huge_pages
from iobench.writers.blocks.workers import BlockPool
from iobench.writers.image import FileImage
from iobench.writers.local import direct_file
from iobench.writers.registry import make

_SIZE = 5 * MIB + 123


def test_in_huge_pages() -> None:
    """Parts of the memory count too; other memory does not."""
    memory = fresh_pages(8 * MIB, huge=True)
    assert in_huge_pages(memory)
    assert in_huge_pages(memory[MIB:][:MIB].view(np.uint8))
    assert not in_huge_pages(fresh_pages(8 * MIB, huge=False))
    assert not in_huge_pages(np.zeros(MIB, np.uint8))


@pytest.mark.parametrize("huge", [False, True])
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("name", ["odirect", "uring", "hybrid"])
def test_reads(
    name: str, slow: bool, huge: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are right in any case. Small pages are filled by a copy only where it pays."""
    writer = make(name, block_size="1MiB")
    answer = writer.available(tmp_path)
    if not answer.ok:
        pytest.skip(answer.reason)
    data = np.random.default_rng(1).integers(0, 256, _SIZE, dtype=np.uint8)
    writer.write(FileImage.of("f", [data]), tmp_path)
    monkeypatch.setattr(direct_file, "_huge_pages_are_slow", lambda: slow)
    taken, take = [], BlockPool.take
    monkeypatch.setattr(BlockPool, "take", lambda pool: taken.append(1) or take(pool))
    memory = fresh_pages(_SIZE, huge=huge)
    writer.read(FileImage.of("f", [memory]), tmp_path)
    assert np.array_equal(memory, data)
    if slow and not huge:
        assert len(taken) >= _SIZE // MIB
    else:
        assert len(taken) <= 1  # for the tail
