"""What a pin after every step costs: time, and bytes that this process writes.

    python benchmarks/offload_pins.py --target DIRECTORY [--parameters 3e8] [--rounds 9] [--steps 4]
        [--memory 1GiB] [--record FILE]

Arms of each round, in random order: `step` and `step again`, `--steps` calls of AdamW.step and then
`wait`; `step and pin`, the same with a pin after each step. `step again` shows how much two equal
arms differ here. Bytes are write_bytes of /proc/self/io. All slots are written once before. A step
writes 14 B for each bfloat16 parameter, and its record.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

import record
import torch

from iobench.bench.targets.scratch import scratch_directory
from iobench.offload import AdamW
from iobench.units import format_seconds, format_size

_ARMS = ["step", "step again", "step and pin"]
_PINS = 1


def written_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("\nwrite_bytes: ")[1].split()[0])


def block(optimizer: AdamW, steps: int, *, pins: bool) -> tuple[float, float]:
    """Seconds and written bytes of a step."""
    before, began = written_bytes(), time.perf_counter()
    for step in range(steps):
        optimizer.step()
        if pins:
            optimizer.pin(step)
    optimizer.wait()
    return (time.perf_counter() - began) / steps, (written_bytes() - before) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--parameters", type=float, default=3e8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--memory", default="1GiB")
    record.add_option(parser)
    arguments = parser.parse_args()
    parameter = torch.nn.Parameter(torch.zeros(int(arguments.parameters), dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 1e-3)
    seconds: dict[str, list[float]] = {name: [] for name in _ARMS}
    bytes_: dict[str, list[float]] = {name: [] for name in _ARMS}
    with (
        scratch_directory(arguments.target) as scratch,
        record.Record(arguments.record, target=scratch) as samples,
        AdamW(
            [parameter], Path(scratch) / "state", memory=arguments.memory, pins=_PINS
        ) as optimizer,
    ):
        for _ in range(2):
            block(optimizer, _PINS + 2, pins=True)  # the first write of reserved space costs more
        for turn in range(arguments.rounds):
            for name in random.sample(_ARMS, len(_ARMS)):
                pins = name == "step and pin"
                elapsed_s, written = block(optimizer, arguments.steps, pins=pins)
                seconds[name].append(elapsed_s)
                bytes_[name].append(written)
                samples.sample(name, turn, elapsed_s, bytes=round(written))
    for name in _ARMS:
        ratios = [own / base for own, base in zip(seconds[name], seconds["step"], strict=True)]
        more = statistics.median(bytes_[name]) - statistics.median(bytes_["step"])
        print(
            f"{name:13} median {format_seconds(statistics.median(seconds[name]))}, "
            f"{statistics.median(ratios):.3f} of step (min {min(ratios):.3f}, "
            f"max {max(ratios):.3f}); {format_size(statistics.median(bytes_[name]))} written, "
            f"{more:+,.0f} B"
        )


if __name__ == "__main__":
    main()
