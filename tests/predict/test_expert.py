from __future__ import annotations

import numpy as np

from underwatt.predict.expert import _BLOCK, kernel, leave_out

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


def test_points_compared_in_blocks_are_as_near_as_one_by_one() -> None:
    points, others = RNG.normal(size=(2 * _BLOCK + 3, 6)), RNG.normal(size=(4, 6))
    near = kernel(points, others, 0.5)
    distance = np.sqrt(5) / 0.5 * np.linalg.norm(points[:, None] - others[None], axis=2)
    np.testing.assert_allclose(near, (1 + distance + distance**2 / 3) * np.exp(-distance), rtol=1e-9)
    assert kernel(points.astype(np.float32), others.astype(np.float32), 0.5).dtype == np.float32
