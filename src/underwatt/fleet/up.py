"""A fleet of processes on this machine: a SuperLink and a SuperNode for each board, with TLS and node authentication.

For a first try, and for tests: on real boards the same commands run on several machines, as docs/fleet.md shows.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from underwatt._imports import require
from underwatt.errors import UnderwattError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

HOST = "127.0.0.1"
START_S, STOP_S, COMMAND_S = 120.0, 10.0, 120.0
NAME = "up"  # of the connection in Flower's configuration
# What Flower's processes would ask of others.
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


class FleetProcesses:
    """Use as ``with FleetProcesses(folder, nodes) as fleet:``; then ``fleet.run(app)``.

    ``nodes`` are the nodes' configurations, such as ``{"device": "virtual:nano", "budget": "4W"}``. Certificates, keys
    and logs are kept in ``folder``; on leaving, all processes are ended.
    """

    def __init__(self, folder: Path, nodes: Sequence[Mapping[str, Any]]) -> None:
        self.folder, self._nodes = folder.resolve(), nodes
        self.processes: list[subprocess.Popen[bytes]] = []  # of the nodes, in their order
        self._stack = contextlib.ExitStack()
        self._port = 0  # where nodes find the SuperLink
        self.environment = {
            **os.environ,
            **QUIET,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "FLWR_HOME": str(self.folder),
        }
        self._is_new = _flower_version() >= (1, 40)  # which has other names for its addresses

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        certificate(self.folder)
        # Newer versions have one port for all that talk to the SuperLink.
        fleet = free_port()
        control, runtime = (fleet, fleet) if self._is_new else (free_port(), free_port())
        (self.folder / "config.toml").write_text(
            f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{HOST}:{control}"\n'
            f"root-certificates = {json.dumps(str(self.folder / 'ca.crt'))}\n",
            encoding="utf-8",
        )
        with contextlib.ExitStack() as stack:
            self._stack = stack
            own = ["--disable-runtime-dependency-installation"] if self._is_new else []
            self._start(
                "superlink",
                ["flower-superlink", "--enable-supernode-auth", *self._tls(), *own],
                [] if self._is_new else ["--fleet-api-address", f"{HOST}:{fleet}"],
                [] if self._is_new else ["--control-api-address", f"{HOST}:{control}"],
                self._runtime(runtime, "--serverappio-api-address"),
            )
            self._wait_for(fleet, control)
            self._port = fleet
            for at, node in enumerate(self._nodes):
                public = node_key(self.folder / f"node-{at}")
                self.flwr("supernode", "register", str(public), NAME)
                self.processes.append(self.start_node(at, node))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start_node(self, at: int, node: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Start the node of this number; it is let in where its key is registered."""
        said = " ".join(f"{name}={json.dumps(value)}" for name, value in {**node, "partition-id": at}.items())
        return self._start(
            f"node-{at}",
            ["flower-supernode", "--superlink", f"{HOST}:{self._port}", "--node-config", said],
            ["--root-certificates", str(self.folder / "ca.crt")],
            ["--auth-supernode-private-key", str(self.folder / f"node-{at}")],
            self._runtime(free_port(), "--clientappio-api-address"),
        )

    def _tls(self) -> list[str]:
        files = {"ca-certfile": "ca.crt", "certfile": "server.pem", "keyfile": "server.key"}
        return [word for name, file in files.items() for word in (f"--ssl-{name}", str(self.folder / file))]

    def _runtime(self, port: int, older: str) -> list[str]:
        """Where the processes that run the apps are talked to; on this machine alone."""
        return ["--host", HOST, "--port", str(port)] if self._is_new else [older, f"{HOST}:{port}"]

    def _start(self, name: str, *parts: Sequence[str]) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self.folder / f"{name}.log").open("wb"))
        words = [word for part in parts for word in part]
        process = subprocess.Popen(
            words, stdout=log, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
        )
        self._stack.callback(_end, process)
        return process

    def _wait_for(self, *ports: int) -> None:
        until_s = time.monotonic() + START_S
        for port in ports:
            while True:
                with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1.0):
                    break
                if time.monotonic() > until_s:
                    raise UnderwattError(
                        "Flower's SuperLink did not start.", hint=f"Its log is {self.folder / 'superlink.log'}."
                    )
                time.sleep(0.1)

    def flwr(self, *words: str, timeout_s: float = COMMAND_S) -> str:
        """Run Flower's command and return what it says."""
        ended = subprocess.run(
            ["flwr", *words], env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if ended.returncode:
            said = (ended.stdout + ended.stderr).strip()[-600:]
            raise UnderwattError(f"flwr {words[0]} failed: {said}", hint=f"The logs are in {self.folder}.")
        return ended.stdout

    def run(self, app: Path, *, timeout_s: float = 3600.0) -> str:
        """Run a Flower app on the fleet until it ends; what its server said."""
        return self.flwr("run", str(app), NAME, "--stream", timeout_s=timeout_s)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    for signal in ("TERM", "KILL"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15 if signal == "TERM" else 9)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def _flower_version() -> tuple[int, int]:
    from importlib.metadata import version

    require("flwr", extra="fleet")
    major, minor, *_ = version("flwr").split(".")
    return int(major), int(minor)


def certificate(folder: Path) -> None:
    """A certificate authority of this machine's own, and the server's certificate: ca.crt, server.pem, server.key."""
    x509 = require("cryptography.x509", extra="fleet")
    primitives = require("cryptography.hazmat.primitives.serialization", extra="fleet")
    sha256 = require("cryptography.hazmat.primitives.hashes", extra="fleet").SHA256()
    now, names = datetime.datetime.now(datetime.timezone.utc), {}
    authority = _new_key()
    for who, key in (("ca", authority), ("server", _new_key())):
        names[who] = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, f"underwatt fleet {who}")])
        made = (
            x509.CertificateBuilder()
            .subject_name(names[who])
            .issuer_name(names["ca"])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=who == "ca", path_length=None), critical=True)
        )
        if who == "server":
            here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))]
            made = made.add_extension(x509.SubjectAlternativeName(here), critical=False)
        pem = made.sign(authority, sha256).public_bytes(primitives.Encoding.PEM)
        (folder / ("ca.crt" if who == "ca" else "server.pem")).write_bytes(pem)
        if who == "server":
            _write_key(folder / "server.key", key, primitives.PrivateFormat.PKCS8)


def node_key(path: Path) -> Path:
    """A new key of a node, as ``ssh-keygen -t ecdsa -b 384`` makes them; returns the file of its public part."""
    primitives = require("cryptography.hazmat.primitives.serialization", extra="fleet")
    key, public = _new_key(), path.with_name(f"{path.name}.pub")
    _write_key(path, key, primitives.PrivateFormat.OpenSSH)
    public.write_bytes(key.public_key().public_bytes(primitives.Encoding.OpenSSH, primitives.PublicFormat.OpenSSH))
    return public


def _new_key() -> Any:
    curves = require("cryptography.hazmat.primitives.asymmetric.ec", extra="fleet")
    return curves.generate_private_key(curves.SECP384R1())


def _write_key(path: Path, key: Any, form: Any) -> None:
    primitives = require("cryptography.hazmat.primitives.serialization", extra="fleet")
    text = key.private_bytes(primitives.Encoding.PEM, form, primitives.NoEncryption())
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(text)
