"""Failures: the distribution of the times between two failures of a job."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Failures", "integral"]

_TERMS = 128  # of a sum; what is left out of the rest is then below 1e-7
_LAST = 40.0  # exponent from which survival counts as 0: e^-40
_NODES = 64
_LEAST_RATIO = 1e-9  # where an integral from 0 begins, as a part of its end

_Times = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Failures:
    """A renewal process: independent Weibull times between failures, with the mean `mtbf_s`.

    Shape 1 is the exponential distribution: failures without memory. Below 1 the rate falls with
    the time since the last failure, so failures come in groups. All times are seconds.
    """

    mtbf_s: float
    shape: float = 1.0

    @property
    def scale_s(self) -> float:
        """Weibull's scale: `M / Gamma(1 + 1 / k)` for the mean M and the shape k."""
        return self.mtbf_s / math.gamma(1 + 1 / self.shape)

    def survival(self, after_s: _Times) -> _Times:
        """Return the probability that the next failure comes later than `after_s`."""
        return np.exp(-((after_s / self.scale_s) ** self.shape))

    def draw(self, generator: np.random.Generator, count: int) -> _Times:
        """Return `count` times between failures.

        They are powers of exponential times, so one seed gives comparable failures at all shapes.
        """
        exponential = generator.exponential(self.scale_s**self.shape, count)
        return exponential ** (1 / self.shape)

    def summed(self, first_s: _Times, period_s: _Times) -> _Times:
        """Return the sums of the survival at `first_s + n period_s` over n = 0, 1, 2, ...

        Geometric at shape 1. At other shapes 128 terms are added, and the rest is an integral.
        """
        if self.shape == 1:
            return np.exp(-first_s / self.mtbf_s) / -np.expm1(-period_s / self.mtbf_s)
        terms = self.survival(first_s[:, None] + period_s[:, None] * np.arange(_TERMS))
        # A term is about the mean over the period around it. The next term of that expansion, of
        # Euler and Maclaurin, is the derivative at the begin of the rest over 24.
        rest_s = first_s + (_TERMS - 0.5) * period_s
        slope = -self.shape / rest_s * (rest_s / self.scale_s) ** self.shape * self.survival(rest_s)
        end_s = self.scale_s * _LAST ** (1 / self.shape)
        rest = integral(self.survival, rest_s, np.maximum(rest_s, end_s)) / period_s
        return np.asarray(terms.sum(axis=1) + rest + slope * period_s / 24)


def integral(function: Callable[[_Times], _Times], begin_s: _Times, end_s: _Times) -> _Times:
    """Return the integrals of `function`, by Gauss and Legendre over the logarithm of the time.

    Survival is smooth over that. Over time itself it bends sharply near 0 at shapes below 1.
    """
    begin = np.log(np.maximum(begin_s, _LEAST_RATIO * end_s))
    half = (np.log(end_s) - begin) / 2
    nodes, weights = _gauss()
    at_s = np.exp(begin[:, None] + half[:, None] * (nodes + 1))
    return np.asarray(half * np.sum(weights * at_s * function(at_s), axis=1))


@functools.cache
def _gauss() -> tuple[_Times, _Times]:
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return nodes, weights
