"""Restore modes: real ranks read files together, also when storage, wires and ranks fail."""

from pathlib import Path

from support.ranks import start_ranks

_BEGIN = """
import sys, time
from pathlib import Path
import numpy as np
from iobench.checkpoint.checksums import record_of
from iobench.checkpoint.checksums import compared
from iobench.ranks.control import Control
from iobench.ranks import exchange
from iobench.ranks.exchange import Reader
from iobench.ranks.restore_plan import MODES, RESTORE_MODES, Range
from iobench.ranks.exchange import SentPiece, Transport
from iobench.ranks.wire import Wire
from iobench.ranks.world import World
from iobench.errors import DataMismatchError, RankError, TransferError
from iobench.writers.base import StoredReader
from iobench.writers.image import FileImage
from iobench.writers.registry import make

world = World.detect()
control = Control.connect(world)
transport = Transport(control)
here, size = Path("{here}"), 5_000_003
data = np.random.default_rng(5).integers(0, 256, size, dtype=np.uint8)
if world.rank == 0:
    data.tofile(here / "large")
    data[:70_000].tofile(here / "small")
control.barrier("files", deadline_s=60)

def blank(name="large", bytes=size):
    memory = np.zeros(bytes, np.uint8)
    return memory, FileImage.of(name, [memory[:777], memory[777:bytes // 2], memory[bytes // 2:]])

exchange._SMALLEST_SAMPLE = 1 << 16  # the files are too small to be measured

def read(mode, images, wanted, name="buffered"):
    reader = Reader(transport, mode)
    done = reader.read(images, StoredReader(make(name), here), wanted)
    assert bool(reader.measured) == (mode == "auto" and len(images) == 2), reader.measured
    assert reader.mode in (MODES if reader.measured else (None, mode))
    return done
"""

_READS = """
for mode in RESTORE_MODES:
    for writer in ("buffered", "odirect"):
        (memory, image), (other, second) = blank(), blank("small", 70_000)
        record = record_of(FileImage.of("large", [data]), [("a", 1_000_001), ("b", 4_000_002)])
        with compared(image, record, "large") as incoming:
            done = read(mode, {0: incoming, 1: second},
                        [Range(0, 0, size), Range(1, 0, 70_000)], writer)
        assert np.array_equal(memory, data) and np.array_equal(other, data[:70_000])
        assert done.bytes == size + 70_000 and done.files == 2
        if mode in ("broadcast", "all-gather"):
            assert done.read_amplification < 1.01, done  # 4 KiB around each range of odirect
            received = done.paths.get("network")
            assert (received is not None) == (mode == "all-gather" or world.rank > 0)
        elif mode == "all":
            assert done.read_amplification >= 3 and "network" not in done.paths
        else:
            assert 1 <= done.read_amplification <= 3.01
    # Every rank wants another part: some of the bytes are shared by two, some by none.
    begin = world.rank * 1_000_000
    memory, image = blank()
    done = read(mode, {0: image}, [Range(0, begin, begin + 2_500_000)])
    assert np.array_equal(memory[begin:begin + 2_500_000], data[begin:begin + 2_500_000])
    assert not memory[:begin].any() and not memory[begin + 2_500_000:].any()
# Nothing for some ranks, and nothing at all.
for ranks in ([1], []):
    memory, image = blank()
    read("all-gather", {0: image}, [Range(0, 5, 99)] if world.rank in ranks else [])
    assert memory.any() == (world.rank in ranks)
"""

_FAILURES = """
def flipped(wire, message, *views):
    views = [view.copy() if isinstance(message, SentPiece) else view for view in views]
    if isinstance(message, SentPiece):
        views[-1][-1] ^= 1
    send(wire, message, *views)

send = Wire.send
for mode in ("broadcast", "all-gather"):
    if world.rank == 0:
        Wire.send = flipped  # a wrong bit on the wire from rank 0
    memory, image = blank()
    record = record_of(FileImage.of("large", [data]), [("a", size)])
    try:
        with compared(image, record, "large") as incoming:
            read(mode, {0: incoming}, [Range(0, 0, size)])
        wrong = False
    except DataMismatchError:
        wrong = True
    # Every other rank notices; so does rank 0 for no byte that it read itself or got from rank 2.
    assert wrong == (world.rank > 0), (mode, world.rank)
    Wire.send = send
# Storage fails in one rank: it raises its own error, the others name it, and the next read works.
control.barrier("before", deadline_s=60)
memory, image = blank("absent") if world.rank == 1 else blank()
for mode in ("all", "broadcast", "all-gather"):
    try:
        read(mode, {0: image}, [Range(0, 0, size)])
        assert mode == "broadcast"  # rank 1 reads nothing
    except TransferError as error:
        assert world.rank == 1 and "absent" in str(error)
    except RankError as error:
        assert world.rank != 1 and error.ranks == (1,) and "absent" in str(error), error
    memory2, image2 = blank()
    read(mode, {0: image2}, [Range(0, 0, size)])
    assert np.array_equal(memory2, data)
"""

_END = """
control.barrier("end", deadline_s=60)
transport.close()
control.close()
print("done")
"""


def _job(code: str, here: Path) -> str:
    return _BEGIN.replace("{here}", str(here)) + code


def test_reads_and_failures(tmp_path) -> None:
    """All modes with equal and different ranges; a wrong bit, and a storage error."""
    code = _job(_READS + _FAILURES + _END, tmp_path)
    with start_ranks(code, 3, local_size=2) as ranks:
        ends = ranks.ends()
    assert [(code, out) for code, out, _ in ends] == [(0, "done\n")] * 3, ends
