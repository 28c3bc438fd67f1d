"""What the live page costs a training: 50 viewers against no page at all, in turns, in one run.

    python benchmarks/watch.py --json OUT

Three processes on this machine: a small convolutional network that PyTorch trains and that writes a run's log;
``underwatt watch``, the real command; and 50 viewers that ask once a second what changed, as the page does. Training
and server are put on the same core, so that all that the server does is taken from the training; the viewers, in life
browsers on other machines, stay off that core where there is another one, at the lowest priority.

Blocks of two seconds with the page served alternate with blocks in which its server is stopped (SIGSTOP; the viewers
stay connected), in the order off, on, on, off, so that a drift of the machine cancels out. Each pair of neighbours is
one ratio, with viewers over without. Of these ratios the Hodges-Lehmann estimate is taken, with the 95% interval of
Wilcoxon's signed ranks: other programs' bursts are outliers, which move neither far. Three figures:

step time       time between the ends of steps, mean of a block: what a user would see. The claim of under 2% is shown
                where the upper end of its interval is below 2%, refuted where the lower end is above, else not decided.
own work        time on a core that the training process used for a step: what the run itself does for viewers. It
                writes its log whether or not somebody watches, so this should not change.
server, viewers time on a core that these processes used, as a share of the time: the most that the training can lose.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _table import Column, add_output, as_table, write

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

VIEWERS = 50
PAIRS = 44
ORDER = (False, True, True, False)  # of two pairs
BLOCK_S = 2.0  # two lines of the log, and each viewer asks twice
ASK_S = 1.0
SETTLE_S = 0.3  # catching up with the log is not part of a block
CLAIM = 0.02
Z95 = 1.96
WATTS = 9.5
BATCH = 16  # some milliseconds a step, so that a block has many


def train(folder: Path, threads: int) -> None:
    """The training process: steps until it is ended, the log written as a run writes it.

    Of each step's end it keeps the time, and the time on a core that the process used until then, all threads together.
    """
    import torch

    from underwatt.events import BudgetChanged, Progressed, SettingChanged, Started
    from underwatt.records import DeviceInfo, PowerMode, Setting, WorkloadInfo
    from underwatt.runlog.log import RunLog

    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(32, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    ended: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    ends, used, log = array("d"), array("d"), RunLog(folder / "log.jsonl")
    device = DeviceInfo("virtual", "watts made up for this benchmark", "none", "virtual:none", simulated=True)
    log.write(
        Started(
            at_s=0.0,
            started_at="2026-01-01T00:00:00+00:00",
            job="benchmark",
            device=device,
            workload=WorkloadInfo("convolutions", "none"),
            budget="10 W mean",
            batch_sizes=(BATCH,),
            simulated=True,
            pid=os.getpid(),
        )
    )
    log.write(BudgetChanged(at_s=0.0, power_w=10.0, why="start"))
    log.write(SettingChanged(at_s=0.0, setting=Setting(PowerMode(), BATCH), state="holding", why="the only one"))
    log.flush()
    began = read_at = told_at = time.monotonic()
    while not ended:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        now = time.monotonic()
        ends.append(now)
        used.append(time.process_time())
        while read_at < now:
            log.power(read_at - began, WATTS)
            read_at += 0.1
        if now - told_at >= 1.0:
            told_at = now
            step_s = (ends[-1] - ends[-20]) / 19 if len(ends) >= 20 else math.nan
            log.write(
                Progressed(
                    at_s=now - began,
                    steps=len(ends),
                    samples=BATCH * len(ends),
                    batch_size=BATCH,
                    loss=loss.item(),
                    step_s=step_s,
                    power_w=WATTS,
                    budget_w=10.0,
                    energy_j=WATTS * (now - began),
                    state="holding",
                    gap_share=0.0,
                )
            )
            log.flush()
    log.close()
    (folder / "ends").write_bytes(ends.tobytes())
    (folder / "used").write_bytes(used.tobytes())


class Viewer:
    """An open page: asks once a second what changed, over a connection that stays open."""

    def __init__(self, port: int, token: str, asks_at: float) -> None:
        self._head = f"Host: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n\r\n"
        self._text = b""
        self.client = socket.create_connection(("127.0.0.1", port))
        self.asks_at, self.number, self.updates = asks_at, 0, 0

    def ask(self) -> None:
        """Ask, and then wait for the answer."""
        self.asks_at = math.inf
        self.client.sendall(f"GET /state?since={self.number} HTTP/1.1\r\n{self._head}".encode())

    def take(self) -> None:
        """Read what came; a whole answer is counted, and asked for on from there."""
        part = self.client.recv(1 << 16)
        if not part:
            raise SystemExit("a viewer was dropped")
        self._text += part
        head, found, body = self._text.partition(b"\r\n\r\n")
        if not found:
            return
        lengths = [line for line in head.lower().splitlines() if line.startswith(b"content-length:")]
        if lengths and len(body) < int(lengths[0].split()[1]):
            return
        self._text, self.asks_at = b"", time.monotonic() + ASK_S
        if body:
            self.number = json.loads(body)["number"]
            self.updates += 1


def view(port: int, token: str, viewers: int) -> None:
    """The viewers' process: ask until it is ended, then say how many updates each viewer got."""
    ended: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    now = time.monotonic()
    everybody = [Viewer(port, token, now + ASK_S * number / viewers) for number in range(viewers)]
    with selectors.DefaultSelector() as chosen:
        for viewer in everybody:
            chosen.register(viewer.client, selectors.EVENT_READ, viewer)
        print("connected", flush=True)
        while not ended:
            for viewer in everybody:
                if viewer.asks_at <= time.monotonic():
                    viewer.ask()
            wait_s = min(viewer.asks_at for viewer in everybody) - time.monotonic()
            for key, _ in chosen.select(min(max(0.0, wait_s), 0.5)):
                key.data.take()
    print(json.dumps([viewer.updates for viewer in everybody]), flush=True)


def start(cores: Iterable[int], *arguments: str) -> subprocess.Popen[str]:
    """A process of this interpreter that stays on some cores."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, bufsize=1)
    os.sched_setaffinity(process.pid, set(cores))
    return process


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def core_s(pid: int) -> float:
    """Time on a core that the main thread of a process used so far; in nanoseconds, for its bursts are below a tick."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[0]) / 1e9


def peak_of(pid: int) -> float:
    """The most memory that a process ever held, in MB."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def blocks(server: subprocess.Popen[str], viewing: subprocess.Popen[str], pairs: int) -> list[dict[str, Any]]:
    """Serve and stop in turns; when each block began and ended, and what server and viewers used in it."""
    found = []
    for on in ORDER * (pairs // 2):
        server.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
        time.sleep(SETTLE_S)
        before = core_s(server.pid), core_s(viewing.pid)
        began = time.monotonic()
        time.sleep(BLOCK_S)
        row: dict[str, Any] = {"on": on, "began": began, "ended": time.monotonic()}
        row["server_s"], row["viewers_s"] = core_s(server.pid) - before[0], core_s(viewing.pid) - before[1]
        found.append(row)
    server.send_signal(signal.SIGCONT)
    return found


def measure(viewers: int, pairs: int, threads: int) -> dict[str, Any]:
    here = str(Path(__file__).resolve())
    cores = sorted(os.sched_getaffinity(0))
    own, others = cores[:threads], cores[threads:] or cores
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = [start(own, here, "--train", name, "--threads", str(threads))]
        try:
            while not (folder / "log.jsonl").exists():
                time.sleep(0.1)
            running.append(start(own, "-m", "underwatt", "watch", "--run", name, "--json"))
            page = json.loads(said(running[-1]))
            arguments = ("--view", str(page["port"]), f"--token={page['token']}", "--viewers", str(viewers))
            running.append(start(others, here, *arguments))
            _, server, viewing = running
            os.setpriority(os.PRIO_PROCESS, viewing.pid, 19)
            assert said(viewing) == "connected\n"
            time.sleep(2.0)
            rows = blocks(server, viewing, pairs)
            peak_mb = peak_of(server.pid)
            viewing.terminate()
            updates = json.loads(said(viewing))
        finally:
            for process in reversed(running):
                process.terminate()
                process.send_signal(signal.SIGCONT)
                process.wait(30)
        ends, used = array("d"), array("d")
        ends.frombytes((folder / "ends").read_bytes())
        used.frombytes((folder / "used").read_bytes())
    for row in rows:
        first, last = bisect_left(ends, row["began"]), bisect_right(ends, row["ended"]) - 1
        row["step_s"] = (ends[last] - ends[first]) / (last - first)
        row["own_s"] = (used[last] - used[first]) / (last - first)
    found = {"viewers": viewers, "pairs": pairs, "threads": threads, "cores": len(cores)} | summary(rows)
    served_s = sum(row["ended"] - row["began"] + SETTLE_S for row in rows if row["on"])
    return found | {"server_peak_mb": peak_mb, "fewest_updates_per_viewer_s": min(updates) / served_s}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Added step time and added work of the training, with intervals, and what server and viewers used."""
    on = [row for row in rows if row["on"]]
    time_s = sum(row["ended"] - row["began"] for row in on)
    found: dict[str, Any] = {"step_ms_without": 1e3 * statistics.median(r["step_s"] for r in rows if not r["on"])}
    for name, field in (("added", "step_s"), ("added_own_work", "own_s")):
        middle, low, high = (100 * math.expm1(value) for value in paired(log_ratios(rows, field)))
        found |= {f"{name}_pct": middle, f"{name}_pct_95": [low, high]}
    for name in ("server", "viewers"):
        found[f"{name}_core_pct"] = 100 * sum(row[f"{name}_s"] for row in on) / time_s
    low, high = (bound / 100 for bound in found["added_pct_95"])
    found["claim"] = "shown" if high < CLAIM else "refuted" if low > CLAIM else "not decided"
    return found


def log_ratios(rows: Sequence[dict[str, Any]], field: str) -> list[float]:
    """Logarithm of the ratio of each pair, with viewers over without."""
    turns = (sorted(rows[at : at + 2], key=lambda row: bool(row["on"])) for at in range(0, len(rows), 2))
    return [math.log(on[field] / off[field]) for off, on in turns]


def paired(values: Sequence[float]) -> tuple[float, float, float]:
    """Hodges-Lehmann estimate of the middle, and the 95% interval that Wilcoxon's signed ranks give (normal limit)."""
    count = len(values)
    means = sorted((values[i] + values[j]) / 2 for i in range(count) for j in range(i, count))
    spread = Z95 * math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    outside = max(0, math.floor(len(means) / 2 - spread))
    return statistics.median(means), means[outside], means[-1 - outside]


COLUMNS = (Column("what"), Column("pct", "%", "+.2f"), Column("low", "95% from", "+.2f"), Column("high", "to", "+.2f"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--viewers", type=int, default=VIEWERS)
    parser.add_argument(
        "--pairs", type=int, default=PAIRS, help=f"of blocks, {2 * (BLOCK_S + SETTLE_S):g} s each; even"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the training, on so many cores, with the server")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--view", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--token", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        return train(arguments.train, arguments.threads)
    if arguments.view:
        return view(arguments.view, arguments.token, arguments.viewers)
    row = measure(arguments.viewers, arguments.pairs, arguments.threads)
    print(f"{row['viewers']} viewers, {row['threads']} of {row['cores']} cores train; {row['pairs']} pairs of blocks:")
    shown: list[dict[str, Any]] = []
    for text, name in (("added step time", "added"), ("added own work", "added_own_work")):
        low, high = row[f"{name}_pct_95"]
        shown.append({"what": text, "pct": row[f"{name}_pct"], "low": low, "high": high})
    shown += [{"what": f"core used by {name}", "pct": row[f"{name}_core_pct"]} for name in ("server", "viewers")]
    print(as_table(shown, COLUMNS))
    print(f"under {100 * CLAIM:g}% added step time: {row['claim']}")
    write("watch", [row], arguments)
    return None


if __name__ == "__main__":
    main()
