from __future__ import annotations

import getpass
import socket
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

import underwatt
from underwatt.api.check import Anonymous, judge
from underwatt.drivers.check import CheckedKnob, Level
from underwatt.records import Capability, DeviceInfo, PowerMode, Status

INFO = DeviceInfo("jetson", "Jetson Nano", "nano-1421021098765@/home/eve/tree", "jetson:/home/eve/tree")
WELL = underwatt.check("virtual:nano", set_knobs=True)


@pytest.fixture
def anonymous(monkeypatch: pytest.MonkeyPatch) -> Anonymous:
    monkeypatch.setattr(socket, "gethostname", lambda: "eves-robot.lan")
    monkeypatch.setattr(getpass, "getuser", lambda: "eve")
    return Anonymous.of(INFO, {"MAXN": PowerMode(gpu_mhz=900), "EVES_OWN": PowerMode(gpu_mhz=300)})


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("Cannot write /home/eve/tree/sys/devices/gpu/max_freq.", "Cannot write /sys/devices/gpu/max_freq."),
        ("/opt/eve/python failed", "(path) failed"),
        ("mode 1 (EVES_OWN) is active", "mode 1 (CUSTOM_1) is active"),
        ("eves-robot.lan, user eve", "(name), user (name)"),
        ("wlan 48:b0:2d:12:34:56", "wlan (address)"),
        ("board 1421021098765", "board (number)"),
        ("In a container, mount /run/underwatt.", "In a container, mount /run/underwatt."),
        ("every level", "every level"),
    ],
)
def test_sentences_lose_what_tells_of_their_owner(anonymous: Anonymous, text: str, becomes: str) -> None:
    assert anonymous.text(text) == becomes


@given(st.text(max_size=60))
def test_any_sentence_can_be_made_anonymous(text: str) -> None:
    made = Anonymous("/home/eve", ("1421021098765",), ("eve",), {"EVES": "CUSTOM_0"}, {}).text(
        f"{text} /home/eve/x 1421021098765 {text}"
    )
    assert "1421021098765" not in made
    assert "/home/eve" not in made


def knob(**changes: object) -> tuple[CheckedKnob, ...]:
    return (*WELL.knobs[:2], replace(WELL.knobs[2], **changes), *WELL.knobs[3:])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "level", "says", "do"),
    [
        ({}, Level.READY, "12 settings measured", ""),
        ({"knobs": knob(usable=False, remedy="Run with sudo.")}, Level.LIMITED, "may not set gpu_mhz", "sudo"),
        (
            {"knobs": knob(values=(), usable=False, detail="It sleeps.", remedy="Wake it.")},
            Level.LIMITED,
            "gpu_mhz cannot be set here (It sleeps)",
            "Wake it.",
        ),
        (
            {"knobs": tuple(replace(one, usable=False, remedy="sudo") for one in WELL.knobs), "set_tried": False},
            Level.LIMITED,
            "`underwatt check --set`, run with the right to set, tries the knobs",
            "sudo",
        ),
        ({"load_on_gpu": False}, Level.LIMITED, "the GPU was not tried under load", "Install"),
        ({"load_w": WELL.idle_w}, Level.LIMITED, "a load did not show", "sensor"),
        ({"knobs": ()}, Level.LIMITED, "no knobs", ""),
        (
            {"measurements": (replace(WELL.measurements[0], status=Status.THROTTLED, note="slowed down: heat"),)},
            Level.LIMITED,
            "slowed itself down at 1 setting",
            "cooling",
        ),
        (
            {"measurements": (replace(WELL.measurements[0], status=Status.FAILED),)},
            Level.LIMITED,
            "1 setting of 1 could not be measured",
            "",
        ),
        (
            {
                "idle_w": float("nan"),
                "notes": ("The Jetson Nano 2GB has no power sensor.",),
                "sensors": (Capability("power", "sensor", False, "", "Use a meter."),),
            },
            Level.UNUSABLE,
            "Not usable: its power cannot be read (The Jetson Nano 2GB has no power sensor)",
            "Use a meter.",
        ),
    ],
)
def test_the_verdict_names_what_is_and_what_to_do(changes: dict[str, object], level: Level, says: str, do: str) -> None:
    found = judge(replace(WELL, **changes))  # type: ignore[arg-type]
    assert found.level is level
    assert says in found.text
    assert do in " ".join(found.remedies)
    assert found.text.startswith({"ready": "Ready:", "works, but": "Works, but:", "not usable": "Not usable:"}[level])
