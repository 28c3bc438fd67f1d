from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from underwatt.jobs.loop import Completion


class Events:
    """Stands in for PyTorch on a GPU: notes which event was recorded and which was waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.count = 0

    def torch(self, *, available: bool = True, initialized: bool = True) -> SimpleNamespace:
        def event(*, blocking: bool) -> SimpleNamespace:
            assert blocking, "waiting must not take a CPU core"
            self.count += 1
            name = str(self.count)
            return SimpleNamespace(
                record=lambda: self.log.append(f"record {name}"), synchronize=lambda: self.log.append(f"wait {name}")
            )

        cuda = SimpleNamespace(is_available=lambda: available, is_initialized=lambda: initialized, Event=event)
        return SimpleNamespace(cuda=cuda)


def test_steps_that_follow_each_other_are_waited_for_one_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    monkeypatch.setitem(sys.modules, "torch", events.torch())
    completion = Completion()
    for pausing in (False, False, False, True, True, False, False):
        completion.wait(pausing=pausing)
    waited = [text for text in events.log if text.startswith("wait")]
    assert waited == ["wait 1", "wait 1", "wait 2", "wait 4", "wait 5", "wait 6", "wait 6"]


@pytest.mark.parametrize(("available", "initialized"), [(False, False), (True, False)])
def test_without_a_gpu_in_use_nothing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, available: bool, initialized: bool
) -> None:
    events = Events()
    monkeypatch.setitem(sys.modules, "torch", events.torch(available=available, initialized=initialized))
    completion = Completion()
    completion.wait(pausing=True)
    assert events.log == []


def test_on_a_simulated_device_pytorchs_gpu_is_none_of_our_business(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    monkeypatch.setitem(sys.modules, "torch", events.torch())
    Completion(on_gpu=False).wait(pausing=True)
    assert events.log == []
