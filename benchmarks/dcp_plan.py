"""How long the first save of a structure takes to plan, by the number of ranks.

    python benchmarks/dcp_plan.py --ranks 64 256 --tensors 1000

All work of the ranks is done in this process: the local plans are made, sent as JSON, and read by
rank 0. Rank 0 makes the plan of all ranks, and one rank makes its own of the answer. Stock DCP does
the same by pickle (its own planner, without network). Times are CPU seconds, the least of a few
repetitions. `rank 0` and the hub are one process, so their times add up.
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from iobench.dist.messages import PREFIX, pack, unpack
from iobench.dist.saves.plan import made_plan, whole_plan
from iobench.dist.saves.plan_json import read_plan
from iobench.dist.saves.structure import local_state
from iobench.dist.slice_planner import SlicePlanner

_ROWS, _COLUMNS = 1024, 64  # larger tensors would be planned alike


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    print(f"{'state':12}{'ranks':>6}{'hub':>8}{'rank 0':>8}{'a rank':>8}{'MB sent':>9}{'stock':>8}")
    for kind in ("sharded", "replicated"):
        for ranks in given.ranks:
            print(f"{kind:12}{ranks:6}", end="", flush=True)
            print(_measured(kind, ranks, given.tensors, given.repeats), flush=True)


def _measured(kind: str, ranks: int, tensors: int, repeats: int) -> str:
    rows = [_rows(kind, rank, ranks, tensors) for rank in range(ranks)]
    first = list(range(ranks)) if kind == "sharded" else [0] * ranks
    own = {number: json.dumps(rows[number]) for number in dict.fromkeys(first)}
    sent = [own.get(number, "") for number in range(ranks)]
    planner = SlicePlanner(nodes=[rank // 8 for rank in range(ranks)])
    plan_s, whole = _timed(repeats, lambda: whole_plan(planner, sent, first))
    texts_s, parts = _timed(repeats, whole.texts)

    def hub() -> None:
        """Read what the ranks sent, pass it on to rank 0, and its answer to the ranks."""
        found = [_moved({"value": text})["value"] for text in sent]
        assert _moved({"values": found})["values"] == sent
        for part in _moved({"value": parts})["value"]:
            pack({"values": [part]})

    hub_s, _ = _timed(1, hub)
    structure = _structure(kind, ranks, tensors)
    own_s, _ = _timed(repeats, lambda: made_plan(structure, parts[0], None, True))
    size = sum(map(len, sent)) + sum(map(len, parts))
    plans = [pickle.dumps(read_plan(one)) for one in rows]
    stock_s, _ = _timed(1, lambda: _stock(plans))
    return f"{hub_s:8.2f}{plan_s + texts_s:8.2f}{own_s:8.2f}{size / 1e6:9.1f}{stock_s:8.2f}"


def _moved(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message after it was sent."""
    return unpack(pack(message)[PREFIX.size :])


def _timed(repeats: int, work: Callable[[], Any]) -> tuple[float, Any]:
    times = []
    for _ in range(repeats):
        began_s = time.process_time()
        found = work()
        times.append(time.process_time() - began_s)
    return min(times), found


def _stock(plans: Sequence[bytes]) -> None:
    """Read the local plans, make the global one, and write it for each rank."""
    found, _ = DefaultSavePlanner().create_global_plan([pickle.loads(one) for one in plans])
    for one in found:
        pickle.loads(pickle.dumps(one))


def _held(kind: str, rank: int, ranks: int) -> tuple[int, int]:
    if kind == "replicated":
        return 0, _ROWS
    return rank * _ROWS // ranks, (rank + 1) * _ROWS // ranks - rank * _ROWS // ranks


def _rows(kind: str, rank: int, ranks: int, tensors: int) -> list[Any]:
    """Return the local plan of a rank, as it is sent."""
    begin, size = _held(kind, rank, ranks)
    what = "SHARD" if kind == "sharded" else "TENSOR"
    return [
        [_name(number), what, "float32", [_ROWS, _COLUMNS], [begin, 0], [size, _COLUMNS]]
        for number in range(tensors)
    ]


def _structure(kind: str, ranks: int, tensors: int) -> Any:
    """Return the structure of rank 0."""
    size = _held(kind, 0, ranks)[1]
    state = {_name(number): torch.empty(size, _COLUMNS) for number in range(tensors)}
    return local_state(state, 0, None).structure


def _name(number: int) -> str:
    return f"model.layers.{number // 10}.attention.wq.{number % 10}.weight"


if __name__ == "__main__":
    main()
