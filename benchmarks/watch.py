"""What the live page costs a training: 50 viewers against no page at all, in turns, in one run.

    python benchmarks/watch.py --json OUT

Three processes on this machine: a small convolutional network that PyTorch trains on all cores and that writes a run's
log; ``underwatt watch``, the real command; and viewers that read the stream of updates. Stretches with the page and
its viewers alternate with stretches in which the page is stopped and nobody is connected (in the order ABBA, so that a
drift of the machine cancels out). For each pair of stretches the mean step time with viewers is divided by the one
without; the result is the median over the pairs. A mean, since the few steps that an update delays are what counts,
and a median would not see them. The viewers' own work is on the same cores and is in the result; beside it stands
the share of a core that the server and the viewers used.
"""

from __future__ import annotations

import argparse
import json
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
from itertools import pairwise
from pathlib import Path
from typing import Any

VIEWERS = 50
PAIRS = 20
STRETCH_S = 3.0
SETTLE_S = 0.6  # connecting, and catching up with the log, are not part of a stretch
WATTS = 9.5


def train(folder: Path, threads: int) -> None:
    """The training process: steps until it is ended, each step's end kept, the log written as a run writes it."""
    import torch

    from underwatt.records import DeviceInfo, PowerMode, Setting, WorkloadInfo
    from underwatt.run.log import RunLog

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
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    ended: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    ends, log = array("d"), RunLog(folder / "log.jsonl")
    device = DeviceInfo("virtual", "watts made up for this benchmark", "none", "virtual:none", simulated=True)
    log.write(
        "start",
        0.0,
        started_at="2026-01-01T00:00:00+00:00",
        job="benchmark",
        device=device,
        workload=WorkloadInfo("convolutions", "none"),
        budget="10 W mean",
        goal="soonest",
        target=None,
        simulated=True,
        pid=os.getpid(),
    )
    log.write("budget", 0.0, power_w=10.0, why="start")
    log.write("setting", 0.0, setting=Setting(PowerMode(), 32), state="holding", why="the only one")
    log.flush()
    began = read_at = told_at = time.monotonic()
    while not ended:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        now = time.monotonic()
        ends.append(now)
        while read_at < now:
            log.power(read_at - began, WATTS)
            read_at += 0.1
        if now - told_at >= 1.0:
            told_at = now
            step_s = (ends[-1] - ends[-20]) / 19 if len(ends) >= 20 else None
            log.write(
                "progress",
                now - began,
                steps=len(ends),
                samples=32 * len(ends),
                batch_size=32,
                loss=loss.item(),
                step_s=step_s,
                power_w=WATTS,
                budget_w=10.0,
                energy_j=WATTS * (now - began),
                time_left_s=None,
                state="holding",
                gap_share=0.0,
            )
            log.flush()
    log.close()
    (folder / "ends").write_bytes(ends.tobytes())


def view(port: int, token: str, viewers: int) -> None:
    """The viewers' process: connect on a line of input, read all streams, disconnect on the next line."""
    request = f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    for _ in iter(sys.stdin.readline, ""):
        with selectors.DefaultSelector() as chosen:
            chosen.register(sys.stdin, selectors.EVENT_READ)
            clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(viewers)]
            updates = 0
            for client in clients:
                client.sendall(request)
                chosen.register(client, selectors.EVENT_READ)
            reading = True
            while reading:
                for key, _ in chosen.select():
                    if key.fileobj is sys.stdin:
                        sys.stdin.readline()
                        reading = False
                    else:
                        text = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                        if not text:
                            raise SystemExit("a viewer was dropped")
                        updates += text.count(b"event: update")
            for client in clients:
                client.close()
        print(updates, flush=True)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def core_s(pid: int) -> float:
    """Time on a core that a process used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_of(pid: int) -> float:
    """The most memory that a process ever held, in MB."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def stretches(server: subprocess.Popen[str], viewing: subprocess.Popen[str], pairs: int) -> list[dict[str, Any]]:
    """Alternate without and with viewers; when each stretch began and ended, and what it used."""
    found = []
    for with_viewers in (turn for pair in range(pairs) for turn in ((False, True), (True, False))[pair % 2]):
        if with_viewers:
            server.send_signal(signal.SIGCONT)
            time.sleep(SETTLE_S / 2)
            say(viewing, "connect")
        else:
            server.send_signal(signal.SIGSTOP)
        time.sleep(SETTLE_S)
        used, began = core_s(server.pid) + core_s(viewing.pid), time.monotonic()
        time.sleep(STRETCH_S)
        row = {"viewers": with_viewers, "began": began, "ended": time.monotonic()}
        row["core_s"] = core_s(server.pid) + core_s(viewing.pid) - used
        if with_viewers:
            say(viewing, "disconnect")
            assert viewing.stdout is not None
            row["updates"] = int(viewing.stdout.readline())
        found.append(row)
    server.send_signal(signal.SIGCONT)
    return found


def measure(viewers: int, pairs: int, threads: int) -> dict[str, Any]:
    here = str(Path(__file__).resolve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        training = start(here, "--train", name, "--threads", str(threads))
        while not (folder / "log.jsonl").exists():
            time.sleep(0.1)
        server = start("-m", "underwatt", "watch", "--run", name, "--json")
        assert server.stdout is not None
        said = json.loads(server.stdout.readline())
        viewing = start(here, "--view", str(said["port"]), said["token"], "--viewers", str(viewers))
        time.sleep(3.0)
        try:
            rows = stretches(server, viewing, pairs)
            peak_mb = peak_of(server.pid)
        finally:
            for process in (viewing, server, training):
                process.terminate()
            server.send_signal(signal.SIGCONT)
            for process in (viewing, server, training):
                process.wait(30)
        ends = array("d")
        ends.frombytes((folder / "ends").read_bytes())
    for row in rows:
        within = [end for end in ends if row["began"] <= end <= row["ended"]]
        row["mean_s"] = (within[-1] - within[0]) / (len(within) - 1)
        row["median_s"] = statistics.median(later - earlier for earlier, later in pairwise(within))
    return summary(rows, viewers) | {"threads": threads, "server_peak_mb": peak_mb}


def summary(rows: list[dict[str, Any]], viewers: int) -> dict[str, Any]:
    turns = [sorted(rows[place : place + 2], key=lambda row: row["viewers"]) for place in range(0, len(rows), 2)]
    mean = [on["mean_s"] / off["mean_s"] for off, on in turns]
    middle = [on["median_s"] / off["median_s"] for off, on in turns]
    watched = [on for _, on in turns]
    quartiles = statistics.quantiles(mean, n=4)
    return {
        "viewers": viewers,
        "pairs": len(turns),
        "step_ms_without": 1e3 * statistics.median(off["mean_s"] for off, _ in turns),
        "step_ms_with": 1e3 * statistics.median(row["mean_s"] for row in watched),
        "added_pct": 100 * (statistics.median(mean) - 1),
        "added_pct_quartiles": [100 * (quartiles[0] - 1), 100 * (quartiles[2] - 1)],
        "added_to_median_step_pct": 100 * (statistics.median(middle) - 1),
        "core_pct": 100 * statistics.median(row["core_s"] / (row["ended"] - row["began"]) for row in watched),
        "updates_per_viewer_s": statistics.median(row["updates"] for row in watched) / viewers / STRETCH_S,
        "cores": len(os.sched_getaffinity(0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the row")
    parser.add_argument("--viewers", type=int, default=VIEWERS)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="stretches with viewers, each beside one without")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="of the training; all cores by default")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--view", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        return train(arguments.train, arguments.threads)
    if arguments.view:
        return view(int(arguments.view[0]), arguments.view[1], arguments.viewers)
    row = measure(arguments.viewers, arguments.pairs, arguments.threads)
    low, high = row["added_pct_quartiles"]
    print(f"{row['viewers']} viewers, {row['threads']} training threads on {row['cores']} cores:")
    print(f"  step time {row['added_pct']:+.2f}% (quartiles of the pairs {low:+.2f} to {high:+.2f})")
    print(f"  {row['step_ms_without']:.2f} ms a step without, {row['step_ms_with']:.2f} ms with")
    print(f"  server and viewers used {row['core_pct']:.2f}% of a core")
    if arguments.json:
        arguments.json.write_text(json.dumps([row], indent=1))
    return None


if __name__ == "__main__":
    main()
