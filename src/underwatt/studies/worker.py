"""The process of a study's worker: ``python -m underwatt.studies.worker ADDRESS`` makes the runs it is told to.

Lines of JSON come in on standard input, one a run, and go out where standard output was: scores on the way, then the
outcome. What the job prints goes to standard error. When standard input ends, whoever asked is gone, and so is this.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import sys
import threading
from typing import Any

from underwatt.errors import UnderwattError
from underwatt.jobs._torch import torch
from underwatt.jobs.load import load_job
from underwatt.records import to_json
from underwatt.studies.train import Effort, train_to_target


def main(address: str) -> int:
    """Make runs until told to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us in good order
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    orders: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    torch.set_num_threads(1)  # the study uses the cores by running side by side
    try:
        job = load_job(address)
    except UnderwattError as exc:
        _say(replies, error=exc.message, hint=exc.hint)
        return 1
    while True:
        order = orders.get()
        effort = Effort(order["limit_samples"], order["evaluate_every_samples"])
        hopeless = order["hopeless_samples"]
        try:
            outcome = train_to_target(
                job,
                order["batch_size"],
                order["seed"],
                effort,
                hopeless_samples=math.inf if hopeless is None else hopeless,
                on_score=lambda samples, score: _say(replies, samples=samples, score=score),
            )
            _say(replies, run=outcome.run, ended=outcome.ended)
        except UnderwattError as exc:
            _say(replies, error=exc.message, hint=exc.hint)


def _listen(orders: queue.Queue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    os._exit(0)  # from a thread, in the middle of a training: nothing here is worth keeping


def _say(replies: Any, **message: Any) -> None:
    replies.write(json.dumps(to_json(message)) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
