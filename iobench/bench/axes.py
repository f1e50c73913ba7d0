"""Axes: the values that a run varies besides the contenders. Variant: a contender at one point.

`restores` (all tensors, or slices) is not part of a variant: each save is restored in every way.

To add an axis, change four files of the package:

1. `results/setting.py`: a field of `AxisValues` with a default. Records, their reader, reports,
   labels, CSV columns, ratios and verdicts follow from it.
2. `bench/axes.py`: a field of `Axes` with its parser and of `Variant` with its value.
3. `cli/run.py`: the option.
4. The module that acts on the value, such as `workloads/reshape.py` for `granularity`. Where the
   value chooses what a trial uses, as a target does, that is `bench/runner.py`.

The tables of docs/cli.md and docs/results.md name the option and the field, and the test of a
record's bytes (tests/unit/results/test_codec.py) has the new key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Self, TypeVar, cast

from iobench.bench.contenders.base import Contender
from iobench.bench.data.sliced_files import ALL, OFF, Sliced
from iobench.errors import OptionError
from iobench.ranks.restore_plan import RestoreMode, check_restore_mode
from iobench.results.setting import AxisValues, Setting
from iobench.workloads.reshape import Shape

_MOST_JOBS = 256
_MOST_TP = 1024
_SAME = "same"
_NONE, _RESTORE = "none", "restore"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A contender with files of one shape, saved and restored by `numjobs` processes at once.

    `target` is the location, in a run of several targets; None in a run of one. With a
    `restore_mode` all processes restore the same files together. With `slices` they save the same
    files once: the first one alone (`off`), all of them, or so many of each node. With a
    `background`, another process restores an earlier checkpoint at the same time.
    """

    contender: Contender
    shape: Shape = field(default_factory=Shape)
    numjobs: int = 1
    target: str | None = None
    restore_mode: RestoreMode | None = None
    slices: str | None = None
    background: str | None = None

    def setting(self, tp: int | None = None) -> Setting:
        """Return the setting for a record; with `tp`, of a restore by one of so many ranks.

        Peers have a format of their own, so their `format` is None.
        """
        granularity = self.shape.granularity
        axes = AxisValues(
            format=None if self.contender.is_peer else self.shape.serializer,
            granularity=None if granularity is None else str(granularity),
            restore_as=restore_text(tp),
            numjobs=self.numjobs,
            target=self.target,
            restore_mode=self.restore_mode,
            slices=self.slices,
            background=self.background,
        )
        return Setting(writer=self.contender.name, options=self.contender.options, axes=axes)

    @property
    def sliced(self) -> Sliced | None:
        """How the processes save the same files once; None where each saves its own."""
        return None if self.slices is None else Sliced(how=self.slices, jobs=self.numjobs)

    @property
    def replicas(self) -> bool:
        """Whether all processes restore the same files."""
        return self.restore_mode is not None or self.slices is not None

    @property
    def saves(self) -> int:
        """How often the bytes of one process are saved."""
        return self.numjobs if self.slices is None else 1

    @property
    def label(self) -> str:
        """The contender with its options, and the axes that differ from the default."""
        return " ".join([self.contender.label, *self.setting().axes.changed()])

    def is_meant_by(self, text: str) -> bool:
        """Return whether a text such as `odirect,threads=4` or `odirect numjobs=4` matches."""
        if text == self.label:  # the name of a target may contain spaces
            return True
        who, *axes = text.split() or [""]
        mine = set(self.setting().axes.texts())
        return who in (self.contender.name, self.contender.label) and set(axes) <= mine


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The values of each axis, in the order given; by default one value for each.

    `shapes` are the combinations of serializers and granularities. `restores` are
    numbers of tensor parallel ranks, one of which restores its slices (None: everything).
    `numjobs` are the numbers of concurrent processes.
    `targets` are the locations of several targets, or None for the one target of a run.
    `restore_modes`: with one, all ranks are replicas of the first one and restore its files.
    `slices`: with one, all processes are replicas and save these files once. `backgrounds`: what
    another process does while they save or restore; None for nothing.
    `absent` has the reasons why contenders take no part in some of them, by contender and location.
    """

    shapes: tuple[Shape, ...] = (Shape(),)
    restores: tuple[int | None, ...] = (None,)
    numjobs: tuple[int, ...] = (1,)
    targets: tuple[str | None, ...] = (None,)
    restore_modes: tuple[RestoreMode | None, ...] = (None,)
    slices: tuple[str | None, ...] = (None,)
    backgrounds: tuple[str | None, ...] = (None,)
    absent: Mapping[tuple[Contender, str | None], str] = field(default_factory=dict)

    @classmethod
    def parse(
        cls,
        *,
        serializer: str | None = None,
        granularity: str | None = None,
        restore_as: str = _SAME,
        numjobs: str = "1",
        restore_mode: str | None = None,
        slices: str | None = None,
        background: str = _NONE,
    ) -> Self:
        """Parse the options of `iobench run`: each has one value, or several between commas.

        Raises OptionError and UnknownNameError for invalid values.
        """
        shapes = product(
            _values("--serializer", _SAME if serializer is None else serializer, _changed),
            _values("--granularity", _SAME if granularity is None else granularity, _changed),
        )
        return cls(
            shapes=tuple(Shape.parse(*one) for one in shapes),
            restores=tuple(_values("--restore-as", restore_as, _tp)),
            numjobs=tuple(_values("--numjobs", numjobs, _jobs)),
            restore_modes=(None,)
            if restore_mode is None
            else tuple(_values("--restore-mode", restore_mode, _mode)),
            slices=(None,) if slices is None else tuple(_values("--slices", slices, _slices)),
            backgrounds=tuple(_values("--background", background, _background)),
        )

    @property
    def most_jobs(self) -> int:
        """The largest number of concurrent processes of any variant."""
        return max(self.numjobs)

    @property
    def replicas(self) -> bool:
        """Whether all processes have, and restore, the same files."""
        return self.restore_modes != (None,) or self.sliced

    @property
    def sliced(self) -> bool:
        """Whether the same files are saved once, by all processes together or by one of them."""
        return self.slices != (None,)

    def takes(self, one: Contender) -> bool:
        """Whether a contender takes part, with some restore mode and some slices."""
        return any(
            self._suits(one, mode, slices)
            for mode, slices in product(self.restore_modes, self.slices)
        )

    def _suits(self, one: Contender, mode: RestoreMode | None, slices: str | None) -> bool:
        """Whether a contender takes part: a peer saves alone, and has one way to restore.

        Next to a peer our writers restore into new memory, which replicas do with slices only.
        """
        alone = mode is None and one.restore_mode == "all"
        if not one.is_peer or (alone and slices is None):
            return True
        # Of slices of tensors every contender allocates the memory.
        return all(self.restores) and slices in (None, OFF) and (alone or mode == one.restore_mode)

    @property
    def earlier(self) -> int:
        """How many checkpoints a background process needs in each target: one of each shape."""
        return len(self.shapes) if any(self.backgrounds) else 0

    @property
    def with_and_without(self) -> bool:
        """Whether everything is measured with a background process and without it."""
        return any(self.backgrounds) and None in self.backgrounds

    @property
    def saves(self) -> int:
        """How often the bytes of one process are saved, at most."""
        return 1 if self.sliced else self.most_jobs

    def check_writers(self, most: int) -> None:
        """Raise OptionError if more ranks are to write slices than a node has, which is `most`."""
        for text in filter(None, self.slices):
            if text not in (OFF, ALL) and int(text) > most:
                raise OptionError(
                    f"--slices {text}: a node has {most} processes at most; "
                    f"give {OFF}, {ALL}, or a number from 1 to {most}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the values of each axis for the plan's record."""
        return {
            "serializers": list(dict.fromkeys(shape.serializer for shape in self.shapes)),
            "granularities": list(
                dict.fromkeys(shape.granularity and str(shape.granularity) for shape in self.shapes)
            ),
            "restore_subsets": list(map(restore_text, self.restores)),
            "numjobs": list(self.numjobs),
            **({"targets": list(self.targets)} if len(self.targets) > 1 else {}),
            **({"restore_modes": list(self.restore_modes)} if any(self.restore_modes) else {}),
            **({"slices": list(self.slices)} if self.sliced else {}),
            **({"backgrounds": list(self.backgrounds)} if any(self.backgrounds) else {}),
        }

    def variants(self, contenders: Sequence[Contender]) -> Iterator[Variant]:
        """Yield every contender at every point that applies to it.

        Peers have a format of their own, so they take part with the first serializer only, and with
        one restore mode. A contender that stores nothing takes no part next to a background
        process: there is nothing to share.
        """
        for one in contenders:
            for shape in self.shapes:
                if one.is_peer and shape.serializer != self.shapes[0].serializer:
                    continue
                for numjobs, target, mode, slices, background in product(
                    *(self.numjobs, self.targets, self.restore_modes, self.slices),
                    self.backgrounds,
                ):
                    suits = self._suits(one, mode, slices) and (one.stores or not background)
                    if suits and (one, target) not in self.absent:
                        yield Variant(
                            contender=one,
                            shape=shape,
                            numjobs=numjobs,
                            target=target,
                            restore_mode=mode,
                            slices=slices,
                            background=background,
                        )

    def skipped(self, contenders: Sequence[Contender]) -> list[str]:
        """Return the combinations that are left out, each with its reason."""
        reasons = list(self.absent.values())
        if any(self.backgrounds):
            reasons += [
                f"{one.name} with --background {_RESTORE}: it stores nothing"
                for one in contenders
                if not one.stores
            ]
        with_them = " with --slices" if self.sliced else " with --restore-mode"
        reasons += [
            f"{one.label}{with_them if self.replicas else ''}: it takes part in restores of "
            f"--restore-as tp=N, with --restore-mode {one.restore_mode} and --slices {OFF} or none"
            for one in contenders
            if not self.takes(one)
        ]
        if self.replicas:
            return reasons
        serializers = dict.fromkeys(shape.serializer for shape in self.shapes)
        if len(serializers) == 1:
            return reasons
        return reasons + [
            f"{one.name} with --serializer {', '.join(map(str, list(serializers)[1:]))}: "
            "it has a format of its own, and takes part once"
            for one in contenders
            if one.is_peer
        ]


def _values(option: str, text: str, parse: Callable[[str], T]) -> list[T]:
    """Parse the values between commas; raise OptionError for an empty or repeated one."""
    parts = [part.strip() for part in text.split(",")]
    for index, part in enumerate(parts):
        if not part:
            raise OptionError(f"{option} {text!r}: a value is missing between the commas")
        if part in parts[:index]:
            raise OptionError(f"{option} {text!r}: {part} is given twice")
    return [parse(part) for part in parts]


def restore_text(tp: int | None) -> str | None:
    """Return the value of `restore_as` in records: `tp=8`; None for a restore of everything."""
    return None if tp is None else f"tp={tp}"


def _tp(text: str) -> int | None:
    kind, _, ranks = text.partition("=")
    if text == _SAME:
        return None
    if kind != "tp" or not re.fullmatch("[0-9]{1,9}", ranks) or not 2 <= int(ranks) <= _MOST_TP:
        raise OptionError(
            f"--restore-as {text:.40}: must be {_SAME}, or tp=RANKS with 2 to {_MOST_TP} ranks"
        )
    return int(ranks)


def _changed(text: str) -> str | None:
    return None if text == _SAME else text


def _mode(text: str) -> RestoreMode:
    check_restore_mode(text)
    return cast(RestoreMode, text)


def _slices(text: str) -> str:
    if text not in (OFF, ALL) and not (re.fullmatch("[1-9][0-9]{0,8}", text)):
        raise OptionError(
            f"--slices {text:.40}: must be {OFF}, {ALL}, or how many ranks of each node write"
        )
    return text


def _background(text: str) -> str | None:
    if text not in (_NONE, _RESTORE):
        raise OptionError(f"--background {text:.40}: must be {_NONE} or {_RESTORE}")
    return None if text == _NONE else text


def _jobs(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= _MOST_JOBS:
        raise OptionError(f"--numjobs {text:.40}: must be a number from 1 to {_MOST_JOBS}")
    return int(text)
