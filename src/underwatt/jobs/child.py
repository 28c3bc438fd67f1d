"""The process of an isolated job: ``python -m underwatt.jobs.child ADDRESS BATCH_SIZE`` trains until ended."""

from __future__ import annotations

import sys

from underwatt.errors import OutOfMemoryError, UnderwattError
from underwatt.jobs import emitter
from underwatt.jobs.load import load_job
from underwatt.jobs.torch_job import TorchWorkload


def main(address: str, batch_size: int) -> int:
    """Train and beat; out of memory is reported, anything else is the last line printed."""
    try:
        run = TorchWorkload(load_job(address)).start(batch_size)
        while True:
            run.step()
            emitter.step()
    except OutOfMemoryError:
        emitter.oom()
        return 0
    except UnderwattError as exc:
        print(exc, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
