"""Numbers that carry their derivatives, so that formulas are written once and differentiated exactly.

A ``Dual`` is an array of values and, for each constant it depends on, the array of derivatives. Forward mode is
the cheap direction here: about thirty constants, each touching few terms, and up to 100,000 settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class Dual:
    """Values with their derivatives by named constants."""

    __slots__ = ("by", "value")

    def __init__(self, value: NDArray[np.float64], by: dict[str, NDArray[np.float64]] | None = None) -> None:
        self.value = value
        self.by = by or {}

    @classmethod
    def constant(cls, name: str, value: float) -> Dual:
        """A constant to be fitted: its derivative by itself is one."""
        return cls(np.asarray(value, float), {name: np.asarray(1.0)})

    def __add__(self, other: Dual | NDArray[np.float64]) -> Dual:
        if not isinstance(other, Dual):
            return Dual(self.value + other, self.by)
        return Dual(self.value + other.value, _merge(self.by, 1.0, other.by, 1.0))

    def __neg__(self) -> Dual:
        return Dual(-self.value, {name: -slope for name, slope in self.by.items()})

    def __sub__(self, other: Dual | NDArray[np.float64]) -> Dual:
        return self + (-other)

    def __mul__(self, other: Dual | NDArray[np.float64]) -> Dual:
        if not isinstance(other, Dual):
            return Dual(self.value * other, {name: slope * other for name, slope in self.by.items()})
        return Dual(self.value * other.value, _merge(self.by, other.value, other.by, self.value))

    def exp(self) -> Dual:
        """The exponential: of a constant, one that cannot be negative."""
        value = np.exp(self.value)
        return Dual(value, {name: slope * value for name, slope in self.by.items()})

    def jacobian(self, names: Sequence[str], rows: int) -> NDArray[np.float64]:
        """Derivatives as a matrix: one row a setting, one column a constant."""
        columns = np.zeros((len(names), rows))
        for at, name in enumerate(names):
            if name in self.by:
                columns[at] = self.by[name]
        return np.asarray(columns.T)


def _merge(
    left: dict[str, NDArray[np.float64]],
    left_scale: NDArray[np.float64] | float,
    right: dict[str, NDArray[np.float64]],
    right_scale: NDArray[np.float64] | float,
) -> dict[str, NDArray[np.float64]]:
    merged = {name: slope * left_scale for name, slope in left.items()}
    for name, slope in right.items():
        merged[name] = merged[name] + slope * right_scale if name in merged else slope * right_scale
    return merged


def smooth_max(log_sharpness: Dual, *terms: Dual) -> Dual:
    """The p-norm of quantities given as logs: their maximum where p is large, their sum where p is one."""
    sharpness = np.exp(log_sharpness.value)
    values = np.stack(np.broadcast_arrays(*(term.value for term in terms)))
    top = values.max(axis=0)
    shares = np.exp(sharpness * (values - top))
    total = shares.sum(axis=0)
    shares /= total
    value = top + np.log(total) / sharpness
    by: dict[str, NDArray[np.float64]] = {}
    for share, term in zip(shares, terms, strict=True):
        by = _merge(by, 1.0, term.by, share)
    by_sharpness = (shares * values).sum(axis=0) - value
    return Dual(value, _merge(by, 1.0, log_sharpness.by, by_sharpness))


def add(*terms: Dual) -> Dual:
    """The sum of quantities given as logs."""
    return smooth_max(Dual(np.asarray(0.0)), *terms)
