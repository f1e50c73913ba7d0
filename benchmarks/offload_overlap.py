"""How much of the update of offloaded AdamW a backward of the same length hides.

    python benchmarks/offload_overlap.py --target DIRECTORY [--parameters 300000000] [--rounds 5]
        [--memory 1GiB] [--steps 4] [--backward SECONDS] [--clip 1.0] [--norm 0.5] [--record FILE]

Backward waits, and computes nothing: on an accelerator it takes no time of the CPU either. It makes
the gradients of 16 parameters one after the other, the last one first. It takes as long as the
update alone, unless `--backward` gives its seconds. Arms of each round, in random order, each
`--steps` steps and then `wait`:

- `update`: step() with gradients that are there.
- `in turn`: backward, then step(), without overlap. Reads of the next step begin during backward,
  as far as the memory allows.
- `overlap`: the same with `overlap=True`.

Hidden is (update + backward - arm) / update: 1 means that the update costs no time at all. With
`--clip` all arms call clip_grad_norm_ before `step`. Gradients are random, of the norm `--norm`.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

import record
import torch
from offload import parameters_of

from iobench.bench.targets.scratch import scratch_directory
from iobench.offload import AdamW
from iobench.units import format_seconds


class _Waits(torch.autograd.Function):
    """Uses a parameter; its backward waits and returns the gradient."""

    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor, seconds: float
    ) -> torch.Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return ctx.gradient, None, None


def train(
    optimizer: AdamW,
    model: list[torch.nn.Parameter],
    gradients: list[torch.Tensor],
    steps: int,
    backward_s: float,
    clip: float | None,
) -> float:
    """Seconds of one step with its backward."""
    began = time.perf_counter()
    for _ in range(steps):
        if backward_s:
            optimizer.zero_grad()
            loss = torch.zeros(())
            for parameter, gradient in zip(model, gradients, strict=True):
                loss = loss + _Waits.apply(parameter, gradient, backward_s / len(model))
            loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model, clip)
        optimizer.step()
    optimizer.wait()
    return (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--parameters", type=float, default=3e8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--backward", type=float)
    parser.add_argument("--clip", type=float)
    parser.add_argument("--norm", type=float, default=0.5)
    record.add_option(parser)
    arguments = parser.parse_args()
    with (
        scratch_directory(arguments.target) as scratch,
        record.Record(arguments.record, target=scratch) as samples,
    ):
        measure(arguments, Path(scratch), samples)


def measure(arguments: argparse.Namespace, scratch: Path, samples: record.Record) -> None:
    models, optimizers = {}, {}
    count = int(arguments.parameters)
    each = arguments.norm / math.sqrt(count)
    gradients = [torch.randn_like(one).mul_(each) for one in parameters_of(count)]
    for overlap in (False, True):
        models[overlap] = parameters_of(count)
        optimizers[overlap] = AdamW(
            models[overlap],
            scratch / str(overlap),
            memory=arguments.memory,
            pins=0,
            overlap=overlap,
        )
        # Each slot is written once before: the first write of reserved space costs more.
        train(optimizers[overlap], models[overlap], gradients, 2, 1e-3, arguments.clip)
    updates: list[float] = []

    def arm(name: str) -> float:
        overlap = name == "overlap"
        backward_s = 0.0 if name == "update" else arguments.backward or statistics.median(updates)
        optimizer, model = optimizers[overlap], models[overlap]
        return train(optimizer, model, gradients, arguments.steps, backward_s, arguments.clip)

    updates.append(arm("update"))
    hidden: dict[str, list[float]] = {"in turn": [], "overlap": []}
    for turn in range(arguments.rounds):
        times = {}
        for name in random.sample(["update", *hidden], 3):
            backward_s = arguments.backward or statistics.median(updates)
            times[name] = arm(name) - (0.0 if name == "update" else backward_s)
            samples.sample(
                name, turn, times[name], backward_s=backward_s, clip=arguments.clip or 0.0
            )
            if name == "update":
                updates.append(times[name])
        for name, found in hidden.items():
            found.append(1 - times[name] / times["update"])
        print(
            f"round {turn}: update {format_seconds(times['update'])}; added to a backward of "
            f"{format_seconds(backward_s)}: in turn {format_seconds(times['in turn'])}, overlap "
            f"{format_seconds(times['overlap'])}",
            flush=True,
        )
    for name, found in hidden.items():
        print(f"{name:8} hides median {statistics.median(found):.0%}, worst {min(found):.0%}")
    for optimizer in optimizers.values():
        optimizer.close()


if __name__ == "__main__":
    main()
