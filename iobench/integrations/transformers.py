"""Checkpoints of the Transformers Trainer through a writer.

    from iobench.integrations.transformers import patch

    patch(writer="writer.toml")                 # every Trainer made from now on
    patch(trainer, writer="writer.toml")        # or this one

or in a class of your own: `class MyTrainer(WriterMixin, Trainer): writer = "writer.toml"`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iobench.checkpoint.store import STAGING_SUFFIX
from iobench.errors import UsageError
from iobench.exports.staged_directory import StagedDirectory, shared_token
from iobench.integrations.default_writer import chosen_writer
from iobench.integrations.needs import needs
from iobench.integrations.routed import routed, staged_save
from iobench.writers.base import Writer
from iobench.writers.config import WriterLike
from iobench.writers.own_directory import remove_killed

with needs("transformers", "transformers>=5"):
    import transformers
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints

__all__ = ["WriterMixin", "patch", "unpatch"]

if TYPE_CHECKING:
    _Trainer = transformers.Trainer
else:
    _Trainer = object  # a Trainer follows only in the classes that users make


class WriterMixin(_Trainer):  # type: ignore[misc, valid-type]  # untyped package
    """Base class to put before a Trainer: `writer` saves and loads its checkpoints.

    The files are the stock ones: a stock Trainer resumes from ours, and we resume from its own.
    `checkpoint-N` is written in `_checkpoint-N.<random>.iobench-staging`, a name that resume,
    rotation and push ignore. It gets its name when all of it is durable, and replaces an old one
    atomically. A save that fails or is killed leaves the old checkpoints. Rotation follows after
    that.
    """

    writer: WriterLike = "hybrid"
    """A Writer, the name of one, or the path of a config."""

    _staged: StagedDirectory | None = None

    @functools.cached_property
    def _iobench_writer(self) -> Writer:
        return chosen_writer(self.writer)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run = self._get_output_dir(trial=trial)
        final = Path(run, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        staged = StagedDirectory(final, hidden=Path(run, f"_{final.name}"), token=shared_token())
        publishes = bool(self.args.should_save)
        if publishes:
            remove_killed(Path(run), f"_{PREFIX_CHECKPOINT_DIR}-*{STAGING_SUFFIX}")  # of any step
        _find_best(self, run, final)
        self._staged = staged
        try:
            with staged_save(self.accelerator, self._iobench_writer, staged, publishes=publishes):
                super()._save_checkpoint(model, trial)
                if self.state.best_model_checkpoint == str(staged.path):
                    _rename_best(self, str(final), staged.path)
        finally:
            self._staged = None
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if publishes:
            rotate_checkpoints(
                output_dir=run,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _get_output_dir(self, trial: Any) -> str:
        if self._staged is not None:
            return str(self._staged.root)
        found: str = super()._get_output_dir(trial=trial)
        return found

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staged is None:  # a staged checkpoint is pushed after it gets its name
            super()._push_from_checkpoint(checkpoint_folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with routed(self._iobench_writer, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with routed(self._iobench_writer, checkpoint or "."):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with routed(self._iobench_writer, checkpoint or "."):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with routed(self._iobench_writer, checkpoint or "."):
            super()._load_scaler(checkpoint)

    def _load_best_model(self) -> None:
        with routed(self._iobench_writer, self.state.best_model_checkpoint or "."):
            super()._load_best_model()


def _find_best(trainer: Any, run: str, final: Path) -> None:
    """Set the state's path of the best checkpoint to its place in `run`, as a stock save does.

    A stock save looks in the directory where it writes, which is the staging directory here. The
    recorded path is wrong after the run was moved; the recorded step is not.
    """
    state = trainer.state
    if not state.best_global_step or trainer.args.save_strategy == SaveStrategy.NO:
        return
    best = Path(run, f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
    if best != final and best.is_dir():
        state.best_model_checkpoint = str(best)


def _rename_best(trainer: Any, final: str, staged: Path) -> None:
    """Replace the staging path by the final one: the checkpoint being saved is the best one."""
    trainer.state.best_model_checkpoint = final
    if trainer.args.should_save:
        trainer.state.save_to_json(str(staged / TRAINER_STATE_NAME))


def patch(trainer: Any = None, *, writer: WriterLike = "hybrid") -> None:
    """Let `trainer` save and load by `writer`; without `trainer`, every Trainer made from now on.

    That includes subclasses of `transformers.Trainer`. See `WriterMixin`. Raises UsageError if it
    is patched already, and the errors of choosing the writer.
    """
    chosen = chosen_writer(writer)
    if trainer is not None:
        _mix_in(trainer, chosen)
        return
    stock = transformers.Trainer.__init__
    if hasattr(stock, "_iobench_stock"):
        raise UsageError("transformers.Trainer is patched already; call unpatch() first")

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if not isinstance(self, WriterMixin):
            _mix_in(self, chosen)

    init._iobench_stock = stock  # type: ignore[attr-defined]  # a new attribute
    transformers.Trainer.__init__ = init


def unpatch(trainer: Any = None) -> None:
    """Undo `patch`. Trainers that were made before this call keep their writer."""
    if trainer is None:
        init = transformers.Trainer.__init__
        transformers.Trainer.__init__ = getattr(init, "_iobench_stock", init)
    elif type(trainer) in _mixed.values():
        trainer.__class__ = type(trainer).__bases__[1]
        del trainer.writer
        vars(trainer).pop("_iobench_writer", None)


def _mix_in(trainer: Any, writer: Writer) -> None:
    if isinstance(trainer, WriterMixin):
        raise UsageError(
            "this Trainer already has a writer of iobench; call unpatch(trainer) first"
        )
    stock = type(trainer)
    if stock not in _mixed:
        _mixed[stock] = type(stock.__name__, (WriterMixin, stock), {"__module__": stock.__module__})
    trainer.__class__ = _mixed[stock]
    trainer.writer = writer


_mixed: dict[type, type] = {}
"""Trainer class -> the same class with WriterMixin before it."""
