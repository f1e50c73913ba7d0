"""Jobs of FSDP2 ranks with offloaded state, and the same jobs with torch.optim.AdamW.

    python -m support.offload_ranks KIND DIRECTORY STEPS [POINT]

runs one rank, with torchrun's variables. It prints a JSON line for each step, with a digest of the
local shards of parameters and state. KIND is "stock" or "offload", and more words say how:

- "bf16": parameters of bfloat16, which is the default dtype too; fp32 master weights
- "even": the same gradients are there in all ranks
- "save": a Checkpointer saves model and optimizer at the end; "load": the training goes on from it
- "ckpt": a Checkpointer(offload=optimizer) saves each step, and the training goes on from there
- "back": it makes one step more before it goes on from there
- "other": the state is in a directory for this number of ranks
- "pinned": it goes on from the newest pin
- "quiet": it neither pins nor prints before its end
"""

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import xxhash

from support.ranks import running

STEPS = 5
PIN_EVERY = 2
VALUES: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99)}
OPTIONS: dict[str, Any] = {"chunk_elements": 1024, "memory": "1MiB", "block_size": "8KiB"}


class _Expert(torch.nn.Module):
    """Two branches, of which a step uses one: the other one has no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(2)])
        self.used = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        used: torch.Tensor = self.branches[self.used](batch)
        return used


def built_model(mesh: Any, seed: int = 0) -> tuple[torch.nn.Module, list[dict[str, Any]]]:
    """A sharded model and its two parameter groups; its first layer is frozen.

    Shards are uneven: 37 rows over 2 or 4 ranks, and 3 of them leave the last rank without any.
    """
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 40),
        torch.nn.Linear(40, 37),
        torch.nn.Linear(37, 64),
        _Expert(),
        torch.nn.Linear(64, 3),
    )
    model[0].requires_grad_(False)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    named = list(model.named_parameters())
    groups = [
        {"params": [one for name, one in named if "weight" in name], "weight_decay": 0.1},
        {"params": [one for name, one in named if "bias" in name], "weight_decay": 0.0, "lr": 3e-3},
    ]
    return model, groups


def train_step(model: torch.nn.Module, optimizer: Any, step: int, *, even: bool = False) -> None:
    """Two backward calls with clipping; in some steps, ranks lack gradients unless `even`."""
    rank = torch.distributed.get_rank()
    model.zero_grad()
    model[3].used = int(step % 3 == 2)
    for batch in range(2):
        made = torch.Generator().manual_seed(1000 * step + 10 * batch + rank)
        model(torch.randn(6, 8, generator=made)).square().mean().backward()
    assert even or model[3].branches[1 - model[3].used].weight.grad is None
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    parameters = list(model.parameters())
    if step == 1 and rank == 1 and not even:  # one parameter, in one rank
        parameters[2].grad = None
    if step in (2, 4) and rank == 0 and not even:  # all of them
        for parameter in parameters:
            parameter.grad = None
    optimizer.step()


class Masters:
    """torch.optim.AdamW on fp32 copies of the local shards of bfloat16 parameters."""

    def __init__(self, groups: list[dict[str, Any]], **values: Any) -> None:
        self.param_groups = groups
        self._locals = [local_of(one) for group in groups for one in group["params"]]
        self._masters = [one.detach().float().requires_grad_() for one in self._locals]
        own = iter(self._masters)
        made = [{**group, "params": [next(own) for _ in group["params"]]} for group in groups]
        self._optimizer = torch.optim.AdamW(made, fused=True, **values)

    def step(self) -> None:
        parameters = [one for group in self.param_groups for one in group["params"]]
        for parameter, master in zip(parameters, self._masters, strict=True):
            gradient = parameter.grad
            master.grad = None if gradient is None else local_of(gradient).float()
        self._optimizer.step()
        with torch.no_grad():
            for local, master in zip(self._locals, self._masters, strict=True):
                local.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        state = self._optimizer.state_dict()["state"]
        return {"state": {n: {**one, "master": self._masters[n]} for n, one in state.items()}}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def digest(optimizer: Any) -> str:
    """Of the shards of this rank: parameters, moments and counts."""
    found = xxhash.xxh3_64()
    state = optimizer.state_dict()["state"]
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for index, parameter in enumerate(parameters):
        values = state.get(index, {})
        own = [parameter, *(value for _, value in sorted(values.items()) if values["step"] > 0)]
        for tensor in own:
            local = local_of(tensor).contiguous()
            found.update(f"{index} {list(local.shape)}".encode())
            found.update(local.view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _say(**what: Any) -> None:
    # One write, because a kill falls between two.
    os.write(1, (json.dumps(what) + "\n").encode())


def _offloaded(groups: list[dict[str, Any]], directory: Path, step: Any) -> Any:
    """The optimizer of the last run, or a new one if the ranks have no generation in common."""
    from iobench.errors import IobenchError
    from iobench.offload import AdamW

    try:
        optimizer = AdamW.resume(groups, directory, step=step, memory=OPTIONS["memory"])
    except IobenchError as error:
        own = (
            directory
            / f"rank-{torch.distributed.get_rank()}-of-{torch.distributed.get_world_size()}"
        )
        torch.distributed.barrier()
        shutil.rmtree(own, ignore_errors=True)
        torch.distributed.barrier()
        _say(resumed=0, why=f"{type(error).__name__}: {error}")
        return AdamW(groups, directory, **VALUES, **OPTIONS)
    found = {"pinned": optimizer.pinned(), "extra": optimizer.restored.extra}
    _say(resumed=optimizer.updates, digest=digest(optimizer), **found)
    return optimizer


def _loaded(model: torch.nn.Module, optimizer: Any, mesh: Any, directory: Path) -> int:
    """Take model and optimizer from the checkpoint of any number of ranks; return its step."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.tensor import Shard, distribute_tensor

    import iobench

    with iobench.Checkpointer(directory, keep=iobench.KeepLast(1)) as ckpt:
        saved = ckpt.load()
    set_model_state_dict(model, saved["model"], options=StateDictOptions(full_state_dict=True))
    if isinstance(optimizer, torch.optim.AdamW):
        for values in saved["optimizer"]["state"].values():
            values.pop("master", None)  # of Checkpointer(offload=...): fp32 parameters have none
            for name, value in values.items():
                values[name] = distribute_tensor(value, mesh, [Shard(0)]) if value.ndim else value
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def _saved(model: torch.nn.Module, optimizer: Any, step: int, directory: Path) -> None:
    import iobench

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    with iobench.Checkpointer(directory, keep=iobench.KeepLast(1)) as ckpt:
        ckpt.save(state, step)


def _with_checkpoints(
    model: torch.nn.Module, optimizer: Any, directory: Path, steps: int, *, even: bool
) -> None:
    """Go on from the newest checkpoint, if there is one, and save each step."""
    import iobench

    keep = iobench.KeepLast(2)
    with iobench.Checkpointer(directory, keep=keep, offload=optimizer) as ckpt:
        if ckpt.latest() is not None:
            before = optimizer.updates
            state = ckpt.load()
            assert state["step"] == optimizer.updates
            assert "optimizer" not in state
            _say(loaded=state["step"], before=before, digest=digest(optimizer))
        for step in range(optimizer.updates, steps):
            train_step(model, optimizer, step, even=even)
            ckpt.save_async({"model": model.state_dict(), "step": step + 1}, step + 1)
            _say(step=step + 1, digest=digest(optimizer))


def _main(kind: str, directory: str, steps: str, *points: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['MEETING']}",
        timeout=timedelta(seconds=30),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    size, words = torch.distributed.get_world_size(), kind.split("-")
    if "bf16" in words:
        torch.set_default_dtype(torch.bfloat16)
    mesh = torch.distributed.init_device_mesh("cpu", (size,))
    model, groups = built_model(mesh)
    if points:
        import iobench.offload.optimizer  # noqa: F401 -- before its functions are replaced
        from support.kill_points import arm

        for point in points[0].split("+"):
            arm(point)
    offload, even, quiet = "offload" in words, "even" in words, "quiet" in words
    checkpoint, first = Path(directory).parent / "checkpoints", 0
    if offload:
        state = Path(directory).with_name(f"state-{size}") if "other" in words else Path(directory)
        optimizer = _offloaded(groups, state, "pinned" if "pinned" in words else "latest")
        first = optimizer.updates
    elif "bf16" in words:
        optimizer = Masters(groups, **VALUES)
    else:
        optimizer = torch.optim.AdamW(groups, **VALUES, fused=True)
    if "ckpt" in words:
        if "back" in words:
            train_step(model, optimizer, first, even=even)
        _with_checkpoints(model, optimizer, checkpoint, int(steps), even=even)
        first = int(steps)
    if "load" in words:
        first = _loaded(model, optimizer, mesh, checkpoint)
        _say(step=first, digest=digest(optimizer))
    for step in range(first, int(steps)):
        train_step(model, optimizer, step, even=even)
        last = step + 1 == int(steps)
        if offload and (step + 1) % PIN_EVERY == 0 and not quiet:
            optimizer.pin(step + 1, {"step": step + 1})
        # A digest waits. In the other steps writes go on.
        if not offload or last or (step % 2 and not quiet):
            _say(step=step + 1, digest=digest(optimizer))
    if "save" in words:
        _saved(model, optimizer, int(steps), checkpoint)
    if offload:
        optimizer.close()
    torch.distributed.barrier()
    _say(done=int(steps))
    os._exit(0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks of a job have printed, and their exit codes."""

    lines: list[list[dict[str, Any]]]
    codes: list[int]
    errors: list[str]

    def digests(self) -> list[dict[int, str]]:
        """The digests of each rank by step."""
        return [
            {
                one.get("step", one.get("resumed", one.get("loaded"))): one["digest"]
                for one in lines
                if "digest" in one
            }
            for lines in self.lines
        ]

    def resumed(self) -> int:
        """The step that all ranks went on from."""
        (step,) = {one["resumed"] for lines in self.lines for one in lines if "resumed" in one}
        return int(step)


def run_job(
    kind: str, size: int, base: Path, *, steps: int = STEPS, point: str = "", victim: int = 0
) -> Job:
    """Run a job of `size` ranks to its end. When the victim has met its `point`, all are killed."""
    meeting = base / f"meeting-{time.monotonic_ns()}"
    program = ["-m", "support.offload_ranks", kind, base / "state", steps]
    common = {
        "WORLD_SIZE": str(size),
        "MEETING": str(meeting),
        # No launcher gives the job a name, and jobs of other tests run at the same time.
        "IOBENCH_STORE": f"{meeting}-ranks",
        "OMP_NUM_THREADS": "1",
    }
    programs = [
        ([*program, *([point] if point and rank == victim else [])], common | {"RANK": str(rank)})
        for rank in range(size)
    ]
    with running(programs) as ranks:
        if ranks.processes[victim].wait(120):  # as torchrun does
            for one in ranks.processes:
                one.kill()
        ends = ranks.ends(120)
    return Job(
        lines=[[json.loads(line) for line in out.splitlines()] for _, out, _ in ends],
        codes=[code for code, _, _ in ends],
        errors=[error for _, _, error in ends],
    )


if __name__ == "__main__":
    _main(*sys.argv[1:])
