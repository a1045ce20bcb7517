"""Flower's own programs, started and stopped: they do transport, TLS and authentication.

Telemetry, update checks and installation at run time are off.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import fcil
from fcil.errors import UserError, lacking

CONNECTION = "fcil"  # what flwr's config.toml calls the SuperLink
KEY_IN_USE = "[code: 23]"  # Flower's error for a public key that is registered already
PDEATHSIG = 1  # of prctl(2)


def environment(home: Path) -> dict[str, str]:
    """Return what Flower's programs see: its files in `home`, nothing sent home, nothing installed."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": os.environ.get("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.3"),
        "PYTHONUNBUFFERED": "1",
    }


def program(name: str) -> str:
    """Return where one of Flower's programs is."""
    found = shutil.which(name, path=environment(Path())["PATH"])
    if found is None:
        raise lacking(f"there is no {name} here, which is one of Flower's programs", "flower")
    return found


def shim() -> Path:
    """Return the folder of the Flower app: a pyproject.toml and the few lines that lead back here."""
    here = Path(fcil.__file__).parent
    for place in (here / "deploy" / "app", here.parent / "deploy"):
        if (place / "pyproject.toml").is_file():
            return place
    raise UserError(f"the Flower app is missing from {here / 'deploy' / 'app'}; install fcil again")


@dataclass(frozen=True)
class Address:
    """Where the server listens."""

    host: str
    port: int

    @staticmethod
    def read(text: str, option: str) -> "Address":
        """Read HOST:PORT."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
            near = "0.0.0.0" if option == "--listen" else "fcil.example.org"
            raise UserError(f"{option} {text} is not allowed; it takes HOST:PORT, such as {near}:9092")
        return Address(host.strip("[]"), int(port))

    def __str__(self) -> str:
        """Write it as HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def near(self) -> "Address":
        """How a program on the same machine reaches it."""
        return Address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host), self.port)

    def require_free(self) -> None:
        """Say so if another program listens there."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                why = "another program listens there" if error.errno == 98 else (error.strerror or str(error))
                raise UserError(f"cannot listen on {self}: {why}; choose another --listen HOST:PORT") from None

    def unreachable(self) -> str:
        """Say why nobody can be spoken to there; nothing if somebody can."""
        try:
            with socket.create_connection((self.host, self.port), 10.0):
                return ""
        except OSError as error:
            why = error.strerror or str(error)
            return f"cannot reach {self}: {why}; is the server running, and does its firewall let nodes in?"


def free_port() -> int:
    """Return a port on this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(command: Sequence[str], home: Path, log: Path) -> "subprocess.Popen[bytes]":
    """Start a program that writes to `log` and ends when we do, however we end."""
    home.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment(home),
            start_new_session=True, preexec_fn=die_with_us,
        )  # fmt: skip


def die_with_us() -> None:
    """Let a program that is about to start be ended when the one that starts it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGTERM)


def stop(process: "subprocess.Popen[bytes]", patience: float = 10.0) -> None:
    """End a program, gently first, and then whatever it has started."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def superlink(listen: Address, folder: Path, tls: Path | None) -> "subprocess.Popen[bytes]":
    """Start a SuperLink whose files lie in `folder`."""
    command = [
        program("flower-superlink"), "--host", listen.host, "--port", str(listen.port),
        "--database", str(folder / "superlink.db"), "--disable-runtime-dependency-installation",
    ]  # fmt: skip
    if tls is None:
        command += ["--insecure"]
    else:
        files = {"certfile": "server.crt", "keyfile": "server.key", "ca-certfile": "ca.crt"}
        command += [word for option, name in files.items() for word in (f"--ssl-{option}", str(tls / name))]
        command += ["--enable-supernode-auth"]
    _write_connection(folder, listen.near, tls)
    return start(command, folder, folder / "superlink.log")


def supernode(
    server: Address, folder: Path, key: Path | None, ca: Path | None, facts: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start a SuperNode that tells its app `facts`."""
    command = [
        program("flower-supernode"), "--superlink", str(server), "--host", "127.0.0.1", "--port", str(free_port()),
        "--node-config", " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in facts.items()),
    ]  # fmt: skip
    command += ["--insecure"] if ca is None else ["--root-certificates", str(ca)]
    command += [] if key is None else ["--auth-supernode-private-key", str(key)]
    return start(command, folder, folder / "supernode.log")


def _write_connection(folder: Path, address: Address, tls: Path | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    how = "insecure = true" if tls is None else f"root-certificates = {json.dumps(str((tls / 'ca.crt').resolve()))}"
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{address}"\n{how}\n'
    )


def flwr(home: Path, *words: str, patience: float = 300.0) -> "subprocess.CompletedProcess[str]":
    """Run Flower's command line to its end."""
    command = [program("flwr"), *words]
    try:
        return subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"flwr {' '.join(words[:2])} did not end within {patience:.0f} s; is this machine busy?"
        ) from None


def await_listening(address: Address, process: "subprocess.Popen[bytes]", log: Path, patience: float = 300.0) -> None:
    """Wait until a program listens; say what it said if it ended instead."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        if process.poll() is not None:
            raise UserError(f"Flower's SuperLink ended: {last_words(log)}")
        if not address.unreachable():
            return
        time.sleep(0.2)
    raise UserError(f"Flower's SuperLink does not listen on {address} after {patience:.0f} s; see {log}")


def register(home: Path, key: Path) -> None:
    """Admit a node by its public key; one that was admitted before stays so."""
    done = flwr(home, "supernode", "register", str(key), CONNECTION, "--name", key.stem, "--format", "json")
    why = not_registered(done.stdout, done.stderr)
    if why and KEY_IN_USE not in why:
        raise UserError(f"node {key.stem} was not admitted: {why[-300:]}")


def not_registered(stdout: str, stderr: str) -> str:
    """Read what `flwr supernode register --format json` says: why it did not, or nothing if it did."""
    try:
        found = json.loads(stdout)
        if found["success"] is True:
            return ""
        said = str(found["error-message"])
    except (ValueError, KeyError, TypeError):
        said = f"{stdout} {stderr}"
    return " ".join(said.split()) or "Flower said nothing"


def submit(home: Path, run: Path) -> None:
    """Let the SuperLink start the server's script for a run folder."""
    done = flwr(home, "run", str(shim()), CONNECTION, "-c", f"run={json.dumps(str(run.resolve()))}")
    if done.returncode:
        raise UserError(f"Flower did not start the run: {' '.join((done.stdout + done.stderr).split())[-300:]}")


def last_words(log: Path) -> str:
    """Return the last line of a log that says something."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return lines[-1][-300:] if lines else "it said nothing"
