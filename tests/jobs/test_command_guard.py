from __future__ import annotations

import os
import subprocess

from underwatt.jobs import command_guard


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    read, write = os.pipe()
    try:
        return subprocess.run(
            [*command_guard.COMMAND, str(read), "1", *command],
            pass_fds=[read],
            env={**os.environ, "UNDERWATT_BEATS": "/nonexistent/beats"},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    finally:
        os.close(read)
        os.close(write)


def test_passes_on_exit_codes_and_output():
    done = _run("sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")


def test_a_signal_becomes_the_code_that_shells_use():
    assert _run("sh", "-c", "kill -9 $$").returncode == 128 + 9


def test_a_program_that_cannot_be_run():
    done = _run("/nonexistent/program")
    assert done.returncode == command_guard.NOT_FOUND
    assert "No such file" in done.stderr


def test_the_job_can_be_ended_politely():
    # The guard itself ignores SIGTERM; the job must not inherit that.
    assert _run("sh", "-c", "kill -TERM $$").returncode == 128 + 15


def test_descendants_of_a_process_with_an_odd_name(tmp_path):
    link = tmp_path / "a) R 1 (b"
    link.symlink_to("/bin/sh")
    with subprocess.Popen([link, "-c", "sleep 100 & echo $!; wait"], stdout=subprocess.PIPE) as process:
        sleeper = int(process.stdout.readline())
        assert set(command_guard.descendants(os.getpid())) >= {process.pid, sleeper}
        os.kill(sleeper, 9)
