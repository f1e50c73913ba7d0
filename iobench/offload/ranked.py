"""ShardedAdamW: optimizer state on storage, each rank with its own range of the parameters."""

from __future__ import annotations

import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, ParamsT

from iobench.dist.agreed import agreed
from iobench.dist.control import shared_control
from iobench.dist.world import World
from iobench.errors import OptionError, TargetError, UsageError
from iobench.offload.agreement import Common, GenerationOffer, chosen, passed_over
from iobench.offload.algorithms import AdamW
from iobench.offload.groups import adam_defaults, kept_values, put_values, specs_of
from iobench.offload.model import flat_view
from iobench.offload.ranges import ParameterRange, range_name, ranges_of
from iobench.offload.rank_directories import (
    complete_sizes,
    is_elsewhere,
    rank_directory,
    records_in,
)
from iobench.offload.resharding import reshard
from iobench.offload.restore import AtState
from iobench.offload.sharded_pins import ShardedPins
from iobench.offload.store import check_no_state
from iobench.units import MIB

__all__ = ["ShardedAdamW"]

_DEADLINE_S = 1800.0
_BROADCAST_BYTES = 64 * MIB
_KNOWN_WITHIN_S, _LOOK_AGAIN_S = 5.0, 0.01
"""A rank that ends is known to the others within this time."""


class ShardedAdamW(Optimizer):
    """AdamW over the ranks of a job: each rank keeps and updates the state of its own range of the
    flat parameters (ZeRO stage 1), in `directory`/rank-R-of-N.

    All ranks have all parameters and the same gradients, as after DistributedDataParallel's
    backward. `step` updates the own range and broadcasts it by `torch.distributed`. The bits are
    those of AdamW in one process. All methods are calls of all ranks.

    Before a rank writes the state of step n+1, that of step n is durable in all ranks. So a kill at
    any point leaves a step that all ranks have, and `resume` takes the newest one. An error in one
    rank is a RankError in the others.
    """

    _local: AdamW | None = None

    def __init__(
        self,
        params: ParamsT,
        directory: str | os.PathLike[str],
        *,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        maximize: bool = False,
        pins: int = 1,
        world: World | None = None,
        group: dist.ProcessGroup | None = None,
        deadline_s: float = _DEADLINE_S,
        **options: Any,
    ) -> None:
        """`pins`: pinned steps that all ranks keep; each reserves the space of one more. `options`
        are `memory`, `engine`, `max_lag`, `chunk_elements`, `iodepth`, `block_size` and
        `clone_pins` of AdamW. `group` has the ranks of `world`; by default all. `deadline_s` bounds
        how long they wait for each other."""
        values = {"lr": lr, "betas": betas, "eps": eps, "maximize": maximize}
        values["weight_decay"] = weight_decay
        self._prepare(params, values, world, group, deadline_s)
        own = self._own_directory(directory)
        if options.get("overlap"):
            raise OptionError("overlap: not with ranks; they exchange parameters after the update")

        def begin() -> str:
            """Look in all ranks before any rank makes files."""
            sizes = complete_sizes(Path(directory))
            if others := [size for size in sizes if size != self._world.size]:
                raise TargetError(
                    f"{directory}: holds the state of a job of {others[0]} ranks; continue it with "
                    "ShardedAdamW.resume(parameters, directory), or choose another directory"
                )
            check_no_state(own)
            return secrets.token_hex(8)

        history = self._agreed("begin", begin)[0]

        def make() -> None:
            self._local = AdamW(self._shards(), own, pins=pins + 1, **values, **options)  # type: ignore[arg-type]  # by name
            self._local._begin_history(history)

        self._agreed("construction", make, close=True)

    @classmethod
    def resume(
        cls,
        params: ParamsT,
        directory: str | os.PathLike[str],
        *,
        step: int | Literal["latest", "pinned"] = "latest",
        world: World | None = None,
        group: dist.ProcessGroup | None = None,
        deadline_s: float = _DEADLINE_S,
        **options: Any,
    ) -> Self:
        """Continue from the newest step, or the pin, that all ranks have.

        A state of another number of ranks is read from `directory`, which all ranks must see then,
        and written anew for this number; the old files are removed when that is durable. A
        RuntimeWarning says when ranks have newer states of different histories, which are
        abandoned. Raises what AdamW.resume raises.
        """
        optimizer = cls.__new__(cls)
        values = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "maximize": False}
        optimizer._prepare(params, {**values, "weight_decay": 0.0}, world, group, deadline_s)
        optimizer._continue(Path(directory), step, options)
        return optimizer

    def _prepare(
        self,
        params: ParamsT,
        values: dict[str, Any],
        world: World | None,
        group: dist.ProcessGroup | None,
        deadline_s: float,
    ) -> None:
        super().__init__(params, adam_defaults(**values, decoupled=True))
        self._world = world or World.detect()
        if self._world.size > 1 and not dist.is_initialized():
            raise UsageError(
                "ranks exchange parameters by torch.distributed; call init_process_group before"
            )
        specs_of(self.param_groups)  # raises for parameters that cannot be offloaded
        self._control = shared_control(self._world).sub("offload")
        self._world = self._control.world
        self._group, self._deadline_s = group, deadline_s
        self._parameters = [p for group in self.param_groups for p in group["params"]]
        self._ranges = ranges_of([p.numel() for p in self._parameters], self._world.size)
        self._unsettled = False
        """Whether a pin was made that may not be durable in all ranks."""
        if not all(self._ranges):
            raise UsageError(f"the parameters are too few for {self._world.size} ranks")

    def _own_directory(self, directory: str | os.PathLike[str]) -> Path:
        return Path(directory) / rank_directory(self._world.rank, self._world.size)

    def _shards(self) -> list[dict[str, Any]]:
        """Return the groups of this rank's ranges, views of the parameters."""
        names = [spec.name for spec in specs_of(self.param_groups)]
        groups: list[dict[str, Any]] = []
        self._own: list[tuple[ParameterRange, torch.nn.Parameter]] = []
        index = 0
        for group in self.param_groups:
            indices = range(index, index + len(group["params"]))
            index = indices.stop
            own = [
                (one, torch.nn.Parameter(self._view(one), requires_grad=False))
                for one in self._ranges[self._world.rank]
                if one.parameter in indices
            ]
            self._own += own
            named = [(range_name(names[one.parameter], one), p) for one, p in own]
            (values,) = kept_values([group])
            groups.append({**values, "betas": tuple(values["betas"]), "params": named})
        return groups

    def _view(self, one: ParameterRange) -> torch.Tensor:
        return flat_view(self._parameters[one.parameter])[one.begin : one.end]

    # Training.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, in all ranks; return the result of `closure`.

        Waits until the step before is durable in all ranks. Raises like AdamW.step, and RankError.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        local = self._running()
        self._settle()
        for one, shard in self._own:
            gradient = self._parameters[one.parameter].grad
            shard.grad = (
                None
                if gradient is None
                else gradient.detach().contiguous().view(-1)[one.begin : one.end]
            )
        self._put_groups(local)
        self._agreed("step", local.step)
        for _, shard in self._own:
            shard.grad = None
        self._exchange()
        return loss

    def _put_groups(self, local: AdamW) -> None:
        """Give the own ranges the values of the groups, after the schedulers."""
        put_values(local.param_groups, kept_values(self.param_groups))

    def _settle(self) -> None:
        """Return when all that was begun is durable in all ranks."""
        self._agreed("durable", self._running().wait)
        self._unsettled = False

    def _exchange(self) -> None:
        """Broadcast the range of each rank."""
        if self._world.size > 1:
            try:
                for rank in range(self._world.size):
                    for views in self._batches(rank):
                        self._broadcast(views, rank)
            except RuntimeError as error:  # of torch.distributed: it names no rank
                self._raise_lost(error)
                raise
        self._running()._note_versions()

    def _raise_lost(self, error: RuntimeError) -> None:
        """Raise RankError for a rank that has ended; else tell the others that this one fails."""
        until_s = time.monotonic() + _KNOWN_WITHIN_S
        while time.monotonic() < until_s:
            self._control.check()
            time.sleep(_LOOK_AGAIN_S)
        self._control.fail(error)

    def _batches(self, rank: int) -> Iterator[list[torch.Tensor]]:
        """Yield views of the range of `rank`, some of one dtype at a time."""
        batch: list[torch.Tensor] = []
        size = 0
        for one in self._ranges[rank]:
            for view in self._view(one).split(_BROADCAST_BYTES // 4):
                if batch and (
                    view.dtype != batch[0].dtype or size + view.nbytes > _BROADCAST_BYTES
                ):
                    yield batch
                    batch, size = [], 0
                batch.append(view)
                size += view.nbytes
        if batch:
            yield batch

    def _broadcast(self, views: Sequence[torch.Tensor], rank: int) -> None:
        flat = torch.cat(list(views)) if len(views) > 1 else views[0].clone()
        source = rank if self._group is None else dist.get_global_rank(self._group, rank)
        dist.broadcast(flat.view(torch.uint8), src=source, group=self._group)
        if rank != self._world.rank:
            with torch.no_grad():
                for view, part in zip(views, flat.split([len(v) for v in views]), strict=True):
                    view.copy_(part)

    @property
    def updates(self) -> int:
        """Calls of `step` so far."""
        return self._running().updates

    # Checkpoints.

    def durable(self) -> int:
        """Return how many calls of `step` are on storage in all ranks."""
        return int(min(self._agreed("durable", self._running().durable)))

    def pin(self, step: int, extra: Any = None) -> None:
        """Keep the state after the last `step` as the checkpoint `step`; see AdamW.pin.

        `extra` is this rank's own. Waits only when no `step` was called since the last pin.
        """
        local = self._running()
        if self._unsettled:  # all ranks need a pin in common at any time
            self._settle()
        self._put_groups(local)
        self._agreed("pin", lambda: local.pin(step, extra))
        self._unsettled = True

    def checkpoint_pins(self) -> ShardedPins:
        """Return the pins that a `Checkpointer(..., offload=optimizer)` holds."""
        return ShardedPins(self)

    def wait(self, step: int | None = None) -> None:
        """Wait until all steps and pins so far are durable in all ranks; see AdamW.wait."""
        local = self._running()
        self._agreed("wait", lambda: local.wait(step))
        self._unsettled = False

    def pinned(self) -> list[int]:
        """Return the steps that are pinned in all ranks, in the order of their pinning."""
        found = self._agreed("pinned", self._running().pinned)
        return [step for step in found[0] if all(step in steps for steps in found)]

    def state_dict(self) -> dict[str, Any]:
        """Raises UsageError: no rank has all of the state."""
        raise UsageError("no rank has the whole state; its directories have it, see resume")

    def load_state_dict(self, state_dict: Any) -> None:  # noqa: ARG002
        """Raises UsageError; see `state_dict`."""
        raise UsageError("no rank has the whole state; its directories have it, see resume")

    # Resume.

    def _continue(
        self, directory: Path, wanted: int | Literal["latest", "pinned"], options: dict[str, Any]
    ) -> None:
        own = self._own_directory(directory)
        leads = self._world.rank == 0
        # Also the generations of a directory that this rank cannot use.
        answers = self._agreed(
            "offer",
            lambda: [
                GenerationOffer.of(records_in(own)).to_json(),
                leads and is_elsewhere(directory, self._world.size),
            ],
        )
        offers = [GenerationOffer.from_json(one) for one, _ in answers]
        elsewhere = answers[0][1]
        if elsewhere is None:  # others are there: of an older version, or of a killed conversion
            elsewhere = not all(one.states for one in offers)
        found = None
        if any(one.states for one in offers) and not elsewhere:
            found = chosen(offers, wanted, str(directory))
        if found is None:
            self._local = reshard(self, directory, wanted, options)
        else:
            self._go_on(own, found, options)
            if leads and (told := passed_over(offers, found[0])):
                warnings.warn(f"{directory}: {told}", RuntimeWarning, stacklevel=4)
        local = self._running()
        put_values(self.param_groups, kept_values(local.param_groups))
        self._exchange()

    def _go_on(self, own: Path, found: Common, options: dict[str, Any]) -> None:
        history = self._new_history()

        def go_on() -> None:
            self._local = AdamW.resume(self._shards(), own, step=AtState(*found), **options)
            self._local._begin_history(history)

        self._agreed("resume", go_on, close=True)

    def _new_history(self) -> str:
        """Return the name of the states that follow; the same in all ranks. See StateName."""
        found: str = self._agreed("history", lambda: secrets.token_hex(8))[0]
        return found

    @property
    def restored(self) -> Any:
        """What `resume` has taken in this rank; see AdamW."""
        return self._running().restored

    # The end.

    def close(self) -> None:
        """Wait until all is durable, and release the directories. Raises like AdamW.close."""
        local, self._local = self._local, None
        if local is not None:
            self._agreed("close", local.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._local is not None:  # the other ranks may not come
            local, self._local = self._local, None
            local.close()

    def _running(self) -> AdamW:
        if self._local is None:
            raise UsageError("the optimizer is closed; continue with resume")
        return self._local

    def _agreed(self, phase: str, work: Callable[[], Any], *, close: bool = False) -> list[Any]:
        """Call `work` in all ranks; with `close`, an error in any closes this rank's own part."""
        try:
            return agreed(self._control, f"offload {phase}", work, deadline_s=self._deadline_s)
        except BaseException:
            if close and self._local is not None:
                self._local.close()
                self._local = None
            raise
