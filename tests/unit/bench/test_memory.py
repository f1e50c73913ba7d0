"""Memory of an operation: its peak, what a writer keeps, mapped files, and the page cache."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from iobench.bench.choose import choose
from iobench.bench.contenders.base import WriterContender
from iobench.bench.planning import make_plan, measure_rates
from iobench.bench.processes.job import OperationMemory
from iobench.bench.trial import Trial
from iobench.environment import memory as process_memory
from iobench.linux import PAGE
from iobench.units import MIB
from iobench.workloads import Workload
from iobench.writers.registry import make

from .conftest import make_trial

_SIZE = 64 * MIB
_SLACK = 8 * MIB  # what the interpreter and other threads of the tests may take meanwhile


def keeper(*, maps_files: bool = False) -> Any:
    return SimpleNamespace(kept_bytes=0, maps_files=maps_files)


def touched() -> np.ndarray:
    return np.full(_SIZE, 1, np.uint8)


def near(measured: int | None, expected: int) -> bool:
    return measured is not None and expected - _SLACK <= measured <= expected + _SLACK


def test_memory_that_was_freed_before_the_end_counts() -> None:
    meter, one = OperationMemory(), keeper()
    meter.settle()
    meter.begin()
    touched()
    assert near(meter.used(one), _SIZE)
    meter.settle()
    assert one.kept_bytes < _SLACK


def test_what_an_operation_keeps_counts_in_its_own_later_ones() -> None:
    """A writer's blocks are allocated once; the operations of others do not have them."""
    meter, one, other = OperationMemory(), keeper(), keeper()
    kept = []
    for who, takes in ((one, True), (other, False), (one, False)):
        meter.settle()
        meter.begin()
        if takes:
            kept.append(touched())
        assert near(meter.used(who), 0 if who is other else _SIZE)


def test_tensors_of_a_restore_do_not_count() -> None:
    meter, one = OperationMemory(), keeper()
    meter.settle()
    meter.begin()
    restored = touched()
    assert near(meter.used(one, restored.nbytes), 0)
    del restored
    meter.settle()
    assert one.kept_bytes < _SLACK


def test_pages_of_a_mapped_file_count_once(tmp_path: Path) -> None:
    """They are in the page cache: only who says that it maps files is measured without them."""
    path = tmp_path / "file"
    path.write_bytes(bytes(_SIZE))
    for maps, expected in ((True, 0), (False, _SIZE)):
        meter = OperationMemory()
        meter.settle()
        meter.begin()
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert not np.frombuffer(mapped, np.uint8)[::PAGE].any()
        assert near(meter.used(keeper(maps_files=maps)), expected)


def test_memory_is_unknown_where_the_kernel_does_not_reset_its_maximum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_memory, "_CLEAR_REFS", Path("/dev/full"))
    meter = OperationMemory()
    meter.settle()
    meter.begin()
    assert meter.used(keeper()) is None


def _trial(name: str, tiny: Workload, directory: Path, idle: Any) -> Trial:
    one = make_trial(WriterContender(make(name)), tiny, directory, idle)
    instruments = one.target.instruments
    if instruments is None or instruments.unseen:
        pytest.skip(f"the page cache cannot be counted here: {instruments}")
    return one


def test_the_page_cache_after_an_operation(tmp_path: Path, tiny: Workload, idle: Any) -> None:
    """A buffered save or restore leaves the whole checkpoint there."""
    one = _trial("buffered", tiny, tmp_path, idle)
    for sample in (one.save(), one.restore()):
        assert sample is not None
        assert sample.memory is not None
        assert sample.memory.page_cache_bytes is not None
        assert sample.bytes <= sample.memory.page_cache_bytes <= 2 * sample.bytes
        assert sample.memory.process_bytes is not None
        assert sample.memory.total_bytes is not None
        assert sample.memory.total_bytes > sample.memory.page_cache_bytes - 1


def test_staging_blocks_count_in_every_repetition(
    tmp_path: Path, tiny: Workload, idle: Any
) -> None:
    """They are allocated by the first save, and kept."""
    one = _trial("odirect", tiny, tmp_path, idle)
    for _ in range(2):
        saved, restored = one.save(), one.restore()
        one.clear()
        for sample in (saved, restored):
            assert sample is not None
            assert sample.memory is not None
            assert sample.memory.process_bytes is not None
            assert sample.memory.process_bytes >= MIB


@pytest.mark.slow
def test_probes_for_the_size_leave_the_blocks_to_the_first_save(tmp_path: Path, idle: Any) -> None:
    """What the writers of a run keep from its planning would count for none of their operations."""
    plan = make_plan(workload="llama7b", writers="odirect", target=tmp_path, size="64MiB")
    measure_rates(plan)
    sample = make_trial(plan.contenders[0], plan.workload, tmp_path, idle).save()
    assert sample is not None
    assert sample.memory is not None
    assert sample.memory.process_bytes is not None
    assert sample.memory.process_bytes >= 16 * MIB


def test_a_contender_that_stores_nothing_has_no_page_cache(
    tmp_path: Path, tiny: Workload, idle: Any
) -> None:
    sample = make_trial(WriterContender(make("null")), tiny, tmp_path, idle).save()
    assert sample is not None
    assert sample.memory is not None
    assert sample.memory.page_cache_bytes == 0


def test_peers_that_map_files_say_so(tmp_path: Path) -> None:
    """Else their mapped pages would count as memory of the process too."""
    names = "peer:torch-save,peer:torch-save-mmap"
    contenders, _ = choose(names, tmp_path)
    assert [one.maps_files for one in contenders] == [False, True]
