"""The live page of a run: a server of its own that reads the run's log and leaves new budgets in its inbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from underwatt._imports import require

if TYPE_CHECKING:
    from pathlib import Path

    from underwatt.live.server import LiveServer


def watch(run: Path | str | None = None, port: int = 0) -> LiveServer:
    """The live page of a run, by default the one under way: ``watch().run()`` serves it at its ``url``."""
    for module in ("starlette", "uvicorn", "prometheus_client"):
        require(module, extra="watch")
    from underwatt.live.server import LiveServer
    from underwatt.runlog.inbox import run_folder

    return LiveServer(run_folder(run), port)
