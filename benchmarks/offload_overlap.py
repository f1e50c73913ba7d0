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
import statistics
import time
from pathlib import Path
from typing import Any

import arms
import torch
from offload import offload_options, parameters_of

from iobench.offload import AdamW


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
    parser = offload_options(__doc__, steps=4)
    parser.add_argument("--backward", type=float)
    parser.add_argument("--clip", type=float)
    parser.add_argument("--norm", type=float, default=0.5)
    asked = parser.parse_args()
    with arms.recording(asked) as (scratch, kept):
        measure(asked, scratch, kept)


def measure(asked: argparse.Namespace, scratch: Path, kept: arms.Record) -> None:
    models, optimizers = {}, {}
    count = int(asked.parameters)
    each = asked.norm / math.sqrt(count)
    gradients = [torch.randn_like(one).mul_(each) for one in parameters_of(count)]
    for overlap in (False, True):
        models[overlap] = parameters_of(count)
        optimizers[overlap] = AdamW(
            models[overlap], scratch / str(overlap), memory=asked.memory, pins=0, overlap=overlap
        )
        # Each slot is written once before: the first write of reserved space costs more.
        train(optimizers[overlap], models[overlap], gradients, 2, 1e-3, asked.clip)

    def arm(name: str, backward_s: float) -> float:
        optimizer, model = optimizers[name == "overlap"], models[name == "overlap"]
        return train(optimizer, model, gradients, asked.steps, backward_s, asked.clip) - backward_s

    updates = [arm("update", 0.0)]
    for turn, name in arms.in_rounds(("update", "in turn", "overlap"), asked.rounds):
        backward_s = asked.backward or statistics.median(updates)
        taken_s = arm(name, 0.0 if name == "update" else backward_s)
        kept.sample(name, turn, taken_s, backward_s=backward_s, clip=asked.clip or 0.0)
        if name == "update":
            updates.append(taken_s)
    kept.print_table()
    for name in ("in turn", "overlap"):
        both = zip(kept.seconds(name), kept.seconds("update"), strict=True)
        hidden = [1 - taken_s / update_s for taken_s, update_s in both]
        print(f"{name:8} hides median {statistics.median(hidden):.0%}, worst {min(hidden):.0%}")
    for optimizer in optimizers.values():
        optimizer.close()


if __name__ == "__main__":
    main()
