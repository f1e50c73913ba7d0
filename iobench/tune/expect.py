"""The expected cost of a tuning: the tuner runs on the rates that a few short trials measured."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import replace

from iobench.tune.measurement import Measurement, Step
from iobench.tune.objective import Objective
from iobench.tune.outcome import Outcome
from iobench.tune.rounds import NoProgress
from iobench.tune.space import Candidate
from iobench.tune.tuning import Tuning

__all__ = ["expected"]

_NOISE = 0.03  # of a log, so that the race has something to decide


def expected(tuning: Tuning) -> Outcome:
    """Return what `tuning` is expected to come to, from a short trial of each known setting.

    Only its budget and its notes count: its rates are those of short trials. A setting without a
    trial is assumed to be as fast as its writer's default. Raises what the tuning would: UsageError
    for a budget that is too small, IobenchError when everything fails.
    """
    probed: dict[str, Measurement] = {}
    known = dict.fromkeys((tuning.space.baseline, *tuning.space.known))
    with tuning.runner(time.perf_counter()) as runner:
        step = Step(phase="probe", round=0, size_bytes=tuning.probe_bytes(), verify=True)
        for candidate in known:
            measured = runner(candidate, step)
            probed.setdefault(candidate.writer, measured)
            probed[candidate.label] = measured
    played = _Played(probed, step, tuning.objective, tuning.seed)
    return tuning.tuner(played, NoProgress()).run()


class _Played:
    """Returns measurements at the rates of the probes, in proportion to the size."""

    def __init__(
        self, probed: Mapping[str, Measurement], step: Step, objective: Objective, seed: int
    ) -> None:
        self._probed, self._step, self._writes = probed, step, objective.writes
        self._random = random.Random(seed)

    def __call__(self, candidate: Candidate, step: Step) -> Measurement:
        known = self._probed.get(candidate.label) or self._probed[candidate.writer]
        if known.error:
            return known
        longer = step.size_bytes / self._step.size_bytes
        noise = self._random.lognormvariate(0, _NOISE)
        save = known.save and replace(known.save, elapsed_s=known.save.elapsed_s * noise)
        copies = self._writes(step.verify) / self._writes(self._step.verify)
        took_s = known.took_s * max(1.0, longer)
        return replace(
            known,
            took_s=took_s,
            spent_s=took_s,
            written_bytes=int(known.written_bytes * longer * copies),
            save=save,
        )
