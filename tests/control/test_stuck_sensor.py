"""A sensor that is stuck, on virtual boards: the run ends with that, whatever it reads; others are left alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from run_world import NET, QUICK, Hurt, experienced, running, settle, virtual, watts

from underwatt.budget import parse_budget
from underwatt.control.live_budget import LiveBudget
from underwatt.errors import SensorError

SOON_S = 40.0  # of the device


def stick(device: Hurt, power_w: float, from_s: float = 0.0) -> None:
    read = device.read_power
    device.read_power = lambda: (  # type: ignore[method-assign]
        replace(read(), power_w=power_w) if device.clock.now_s() >= from_s else read()
    )


@pytest.mark.parametrize("board", ["nano", "tx2-nx", "orin-nano"])
@pytest.mark.parametrize("power_w", [2.5, 999.0])
def test_a_sensor_that_sticks_while_the_budget_is_held_ends_the_run(board: str, power_w: float) -> None:
    device: Any = Hurt(virtual(board))
    with experienced(device, watts(4.0 if board == "nano" else 9.0)) as run:
        settle(run)
        stick(device, power_w)
        stuck_s = run.elapsed_s
        with pytest.raises(SensorError, match=f"reads {power_w:g} W whatever it does"):
            run.train(SOON_S)
        assert run.elapsed_s - stuck_s < SOON_S


def test_a_sensor_that_sticks_at_what_was_read_last_ends_the_run() -> None:
    device: Any = Hurt(virtual())
    with experienced(device, watts(9.0)) as run:
        settle(run)
        stick(device, device.read_power().power_w)
        with pytest.raises(SensorError, match="stuck"):
            run.train(SOON_S)


@pytest.mark.parametrize("knobs", [True, False])
def test_a_sensor_that_is_stuck_from_the_start_certifies_nothing(knobs: bool) -> None:
    """It read 2.5 W while the board drew 6.9 W, and the run held that for 9 W."""
    device: Any = Hurt(virtual(), knobs=knobs)
    stick(device, 2.5)
    with running(device, watts(9.0)) as run:
        with pytest.raises(SensorError, match=r"reads 2\.5 W"):
            run.train(SOON_S)
        assert not run.said("measured"), "nothing false is kept"


@pytest.mark.parametrize("budget", ["9W", "9W peak"])
def test_a_sensor_that_sticks_during_the_search_ends_the_run(budget: str) -> None:
    device: Any = Hurt(virtual())
    stick(device, 6.0, from_s=6.0)
    with pytest.raises(SensorError, match="stuck"), running(device, LiveBudget(parse_budget(budget))) as run:
        run.train(2 * SOON_S)


def test_a_sensor_in_coarse_steps_without_noise_is_left_alone() -> None:
    """It reads the same for minutes: a pause shows that it can move, and is soon not asked for any more."""
    device: Any = Hurt(virtual())

    def coarse() -> Any:
        board = device.board
        return replace(sample(), power_w=0.64 * round(board.power_w / 0.64) + 0.64)

    sample = device.read_power
    device.read_power = coarse
    with experienced(device, watts(9.0)) as run:
        run.train(600)
        assert run.controller.pause_share < 0.05


def test_live_sensors_are_asked_for_no_pause() -> None:
    for board in ("nano", "orin-nano"):
        device: Any = Hurt(virtual(board))
        with running(device, watts(30.0), options=QUICK, cost=NET) as run:
            run.train(300)
            assert run.controller.pause_share == 0.0


@pytest.mark.parametrize("from_s", [6.0, 60.0])
def test_a_sensor_that_sticks_at_nothing_ends_the_run(from_s: float) -> None:
    """During the search it was a division by zero."""
    device: Any = Hurt(virtual())
    stick(device, 0.0, from_s=from_s)
    with running(device, watts(9.0)) as run, pytest.raises(SensorError, match="reads 0 W, which cannot be"):
        run.train(from_s + SOON_S)
