"""How long a trainer stops for a checkpoint: save_async compared with a plain copy of its bytes.

    python benchmarks/async_save.py --target DIRECTORY [--size 1GiB] [--rounds 7] [--record FILE]

Arms, in random order within each round, each on the same state (a transformer's weights in bf16
and AdamW's moments in fp32) and with nothing left in the background:

- copy: `destination.copy_(source)` for each tensor, into memory that is there already; with all of
  torch's threads, and with one thread of numpy. The faster one is the plain copy
- async: the stall of `save_async`, then `wait()`
- lazy: `save_async`, then a forward and backward pass (idle, as on a GPU node, or busy with matrix
  products on every core), then `before_optimizer_step`; the stall is the two calls together
- sync: `save`, for comparison
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch

from iobench import Checkpointer, KeepLast
from iobench.bench.targets.scratch import scratch_directory
from iobench.bench.targets.settle import settle
from iobench.environment import DeviceMonitor
from iobench.units import GIB, format_seconds, parse_size

_LAYER = ((4096, 4096),) * 4 + ((11008, 4096),) * 3 + ((4096,),) * 2  # llama 7B


def make_state(size_bytes: int) -> dict[str, Any]:
    """Layers of a llama, narrowed so that weights and optimizer take `size_bytes`."""
    layers = 8
    full = sum(2 * int(np.prod(shape)) * (1 + 3 * 2) for shape in _LAYER) * layers
    narrow = (size_bytes / full) ** 0.5
    shapes = [tuple(max(1, round(n * narrow)) for n in shape) for shape in _LAYER]
    model, optimizer = {}, {}
    for index, shape in enumerate(shapes * layers):
        weight = torch.randn(shape)
        model[f"layers.{index}"] = weight.bfloat16()
        optimizer[index] = {
            "step": torch.tensor(1.0),
            "master": weight,
            "exp_avg": torch.randn(shape),
            "exp_avg_sq": torch.randn(shape),
        }
    return {"model": model, "optimizer": {"state": optimizer, "lr": 1e-4}, "step": 0}


def tensors_of(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_of(value)]
    return []


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Arms:
    """Each returns the seconds that a trainer would stand still, and changes the state after."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.state = make_state(size_bytes)
        self.tensors = tensors_of(self.state)
        self.size_bytes = sum(t.numel() * t.element_size() for t in self.tensors)
        self.copies = [torch.ones_like(tensor) for tensor in self.tensors]
        self.pairs = [
            (copy.view(-1).view(torch.uint8).numpy(), tensor.view(-1).view(torch.uint8).numpy())
            for copy, tensor in zip(self.copies, self.tensors, strict=True)
            if tensor.dim()
        ]
        keep = KeepLast(1)
        self.eager = Checkpointer(directory / "eager", slots=1, keep=keep)
        self.lazy = Checkpointer(directory / "lazy", slots=1, keep=keep, lazy=True)
        self.step = 0
        self.pass_s = 1.0

    def close(self) -> None:
        self.eager.close()
        self.lazy.close()

    def torch_copy(self) -> float:
        def work() -> None:
            for copy, tensor in zip(self.copies, self.tensors, strict=True):
                copy.copy_(tensor)

        return timed(work)

    def numpy_copy(self) -> float:
        def work() -> None:
            for copy, tensor in self.pairs:
                np.copyto(copy, tensor)

        return timed(work)

    def async_stall(self) -> float:
        self.step += 1
        save = self.eager.save_async(self.state, self.step)
        self._end_step()
        self.eager.wait()
        return save.stall_s

    def sync_stall(self) -> float:
        self.step += 1
        return self.eager.save(self.state, self.step).stall_s

    def lazy_idle(self) -> float:
        return self._lazy(lambda: threading.Event().wait(self.pass_s))

    def lazy_busy(self) -> float:
        return self._lazy(self._multiply)

    def _lazy(self, forward_and_backward: Callable[[], object]) -> float:
        self.step += 1
        save = self.lazy.save_async(self.state, self.step)
        forward_and_backward()
        self.lazy.before_optimizer_step()
        self._end_step()
        self.lazy.wait()
        return save.stall_s

    def _multiply(self) -> None:
        matrix = torch.randn(1024, 1024)
        until = time.perf_counter() + self.pass_s
        while time.perf_counter() < until:
            matrix = torch.nn.functional.normalize(matrix @ matrix)

    def _end_step(self) -> None:
        """Change what was saved, as an optimizer does."""
        for tensor in self.tensors:
            tensor.view(-1)[0] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--rounds", type=int, default=7)
    record.add_option(parser)
    arguments = parser.parse_args()
    with (
        record.Record(arguments.record, target=arguments.target) as samples,
        scratch_directory(arguments.target) as scratch,
    ):
        arms = Arms(scratch, parse_size(arguments.size))
        work = {
            "copy, torch": arms.torch_copy,
            "copy, numpy": arms.numpy_copy,
            "async": arms.async_stall,
            "lazy, idle": arms.lazy_idle,
            "lazy, busy": arms.lazy_busy,
            "sync": arms.sync_stall,
        }
        for arm in work.values():  # memory is there afterwards, and slots
            arm()
        arms.pass_s = 3 * arms.torch_copy()
        monitor, order = DeviceMonitor(scratch), random.Random(0)
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for turn in range(arguments.rounds):
            for name in order.sample(list(work), len(work)):
                settle(scratch, monitor)
                seconds[name].append(work[name]())
                samples.sample(name, turn, seconds[name][-1], bytes=arms.size_bytes)
            print(f"round {turn + 1} of {arguments.rounds} done", flush=True)
        arms.close()
    print(
        f"\n{arms.size_bytes / GIB:.2f} GiB in {len(arms.tensors)} tensors, "
        f"forward and backward {format_seconds(arms.pass_s)}"
    )
    for name, times in seconds.items():
        middle = statistics.median(times)
        rate = arms.size_bytes / middle / GIB
        each = " ".join(f"{one:.3f}" for one in sorted(times))
        print(f"{name:12} {format_seconds(middle):>8} {rate:6.2f} GiB/s   s: {each}")
    plain = min("copy, torch", "copy, numpy", key=lambda name: statistics.median(seconds[name]))
    for name, most in (("async", 1.15), ("lazy, idle", 0.3), ("lazy, busy", 0.3)):
        ratio = statistics.median(seconds[name]) / statistics.median(seconds[plain])
        rounds = sorted(a / b for a, b in zip(seconds[name], seconds[plain], strict=True))
        verdict = "ok  " if ratio <= most else "MISS"
        each = " ".join(f"{one:.2f}" for one in rounds)
        print(f"{verdict} {ratio:5.2f} (<= {most})  {name} / {plain}   by round: {each}")


if __name__ == "__main__":
    main()
