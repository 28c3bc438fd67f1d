from __future__ import annotations

import numpy as np

from underwatt.predict.expert import leave_out

RNG = np.random.default_rng(0)


def test_left_out_readings_are_those_of_a_fit_without_them() -> None:
    rows = 5
    root = RNG.normal(size=(2 * rows, 2 * rows))
    total = root @ root.T + np.eye(2 * rows)
    residual = RNG.normal(size=2 * rows)
    inverse = np.linalg.inv(total)
    errors, variances = leave_out(inverse, inverse @ residual)
    for row in range(rows):
        out = np.array([row, row + rows])
        rest = np.setdiff1d(np.arange(2 * rows), out)
        gain = total[np.ix_(out, rest)] @ np.linalg.inv(total[np.ix_(rest, rest)])
        np.testing.assert_allclose(errors[out], residual[out] - gain @ residual[rest])
        np.testing.assert_allclose(variances[out], np.diag(total[np.ix_(out, out)] - gain @ total[np.ix_(rest, out)]))
