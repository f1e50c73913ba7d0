r"""How long saves of scripts take that do not know iobench: as they are, and under `iobench exec`.

    python benchmarks/exec.py --target /mnt/nvme [--writer hybrid] [--size 1.5GiB] [--rounds 2]
        [--saves 3] [--pause 20] [--record FILE]

Two scripts, a loop with torch.save and a stock Transformers Trainer, each as three arms: `stock`,
whose clock stops when the call returns, the bytes being in the page cache still; `stock, synced`,
whose clock also has the fsync of every file and directory; and `exec`, which is durable on return.
The clock runs inside the script, around the save alone; it stops while the Trainer removes
older checkpoints, which has a clock of its own, as `iobench exec` changes nothing there. Arms are
interleaved in random order, each save begins after a sync and a pause that are not counted, as
there is training between checkpoints, and losses of all arms must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import arms

from iobench.units import parse_size

_CLOCK = """
import json, os, sys, time

SYNCED = os.environ["BENCH_SYNCED"] == "1"
removal_s = 0.0

def removing(remove):
    def timed(*args, **kwargs):
        global removal_s
        began = time.perf_counter()
        remove(*args, **kwargs)
        removal_s += time.perf_counter() - began
    return timed

def clocked(save, place):
    global removal_s
    os.sync()
    time.sleep(float(os.environ["BENCH_PAUSE_S"]))
    removal_s = 0.0
    began = time.perf_counter()
    save()
    if SYNCED:
        for directory, _, names in os.walk(place):
            for path in [os.path.join(directory, name) for name in names] + [directory]:
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
    elapsed_s = time.perf_counter() - began - removal_s
    size = sum(os.path.getsize(os.path.join(d, n)) for d, _, names in os.walk(place) for n in names)
    sample = {"seconds": elapsed_s, "removal_s": removal_s, "bytes": size}
    print("SAMPLE", json.dumps(sample), flush=True)
"""

_LOOP = (
    _CLOCK
    + """
import shutil, torch

size, saves = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(1)
state = {f"layer.{n}": torch.randn(16 * 2**20) for n in range(size // (64 * 2**20))}
for step in range(saves):
    state["layer.0"] += 1
    os.mkdir(f"step-{step}")
    clocked(lambda: torch.save(state, f"step-{step}/state.pt"), f"step-{step}")
    shutil.rmtree(f"step-{step}")
print("LOSS", float(state["layer.0"].double().sum()))
"""
)

_TRAINER = (
    _CLOCK
    + """
import torch
import transformers.trainer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

size, saves = int(sys.argv[1]), int(sys.argv[2])
set_seed(1)
width, layers = 1024, max(1, round((size / 12 - 2 * 2048 * 1024) / (16 * 1024**2)))
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
    num_attention_heads=8, num_key_value_heads=8, vocab_size=2048,
))
rows = [{"input_ids": row, "labels": row} for row in torch.arange(256).view(16, 16)]
stock = Trainer._save_checkpoint

def timed(self, model, trial, *args, **kwargs):
    place = os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")
    clocked(lambda: stock(self, model, trial, *args, **kwargs), place)

Trainer._save_checkpoint = timed
transformers.trainer.rotate_checkpoints = removing(transformers.trainer.rotate_checkpoints)
trainer = Trainer(
    model=model, train_dataset=rows,
    args=TrainingArguments(
        output_dir="out", max_steps=saves, save_steps=1, logging_steps=1, save_total_limit=1,
        per_device_train_batch_size=1, report_to=[], disable_tqdm=True, use_cpu=True,
    ),
)
trainer.train()
print("LOSS", [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
"""
)

_SCRIPTS = {"torch.save loop": _LOOP, "Transformers Trainer": _TRAINER}
_ARMS = ("stock", "stock, synced", "exec")


def _run(script: str, arm: str, asked: argparse.Namespace) -> tuple[list[Any], str]:
    """(samples of one run of the script in one arm, its losses)."""
    command = [sys.executable, "-c", script, str(asked.size), str(asked.saves)]
    if arm == "exec":
        command = [
            sys.executable,
            "-m",
            "iobench",
            "exec",
            "--config",
            asked.writer,
            "--",
            *command,
        ]
    own = {"BENCH_SYNCED": str(int(arm == "stock, synced")), "BENCH_PAUSE_S": str(asked.pause)}
    with tempfile.TemporaryDirectory(prefix="iobench-exec-bench-", dir=asked.target) as place:
        done = subprocess.run(
            command, cwd=place, env=os.environ | own, capture_output=True, text=True, check=False
        )
    if done.returncode:
        sys.exit(f"{arm} failed:\n{done.stderr}")
    summary = [line for line in done.stderr.splitlines() if line.startswith("iobench exec: ")]
    print("\n".join(summary), file=sys.stderr)
    lines = done.stdout.splitlines()
    samples = [json.loads(line.removeprefix("SAMPLE ")) for line in lines if "SAMPLE " in line]
    return samples, next(line for line in lines if line.startswith("LOSS"))


def main() -> None:
    parser = arms.options(__doc__, rounds=2)
    parser.add_argument("--writer", default="hybrid", help="as --config of iobench exec")
    parser.add_argument("--size", type=parse_size, default="1.5GiB", help="of a checkpoint, about")
    parser.add_argument("--saves", type=int, default=3, help="of each run")
    parser.add_argument("--pause", type=float, default=20, help="idle seconds before each save")
    parser.add_argument("--only", default="", help="scripts whose name contains this")
    asked = parser.parse_args()
    names = [(name, arm) for name in _SCRIPTS if asked.only in name for arm in _ARMS]
    losses: dict[str, set[str]] = {}
    with arms.Record(asked.record, target=asked.target) as kept:
        for turn, (name, arm) in arms.in_rounds(names, asked.rounds):
            found, loss = _run(_SCRIPTS[name], arm, asked)
            losses.setdefault(name, set()).add(loss)
            for one in found:
                elapsed_s = one.pop("seconds")
                kept.sample(f"{name}: {arm}", turn, elapsed_s, **one)
    if any(len(found) != 1 for found in losses.values()):
        sys.exit(f"losses differ between the arms: {losses}")
    kept.print_table()


if __name__ == "__main__":
    main()
