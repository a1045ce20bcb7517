"""A server and a node as an operator starts them: checks first, then Flower's programs, then watching over them."""

import fcntl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fcil.deploy import certificates
from fcil.deploy.folders import check_folder
from fcil.deploy.processes import (
    Address,
    await_listening,
    last_words,
    register,
    stop,
    submit,
    superlink,
    supernode,
)
from fcil.deploy.script import Terms
from fcil.errors import UserError, quoted

LOOK = 1.0  # seconds between two looks at what goes on
AGAIN = 5.0  # seconds between two tries to join
SLOW = 300.0  # seconds that the server's script may take to begin, on a busy machine
LETS_GO = 60.0  # seconds that another process may take to let go of a run
LAST = 30  # lines of a log in which Flower's program says why it ended
Say = Callable[[str], None]


def serve(run: Path, terms: Terms, say: Say) -> None:
    """Serve a run folder until it is finished; `terms` and the plan are in it."""
    listen, tls = Address.read(terms.listen, "--listen"), Path(terms.tls) if terms.tls else None
    check_server(listen, tls)
    _await_unlocked(run)
    place, log = run / "flower", run / "server.log"
    with _running(lambda: superlink(listen, place, tls)) as process:
        await_listening(listen.near, process, place / "superlink.log")
        admitted: set[tuple[Path, int]] = set()
        _admit(place, tls, admitted, say)
        heard = log.stat().st_size if log.exists() else 0
        submit(place, run)
        say(f"listening on {listen}; nodes may join; log: {log}")
        begun, idle = False, 0.0
        while not (run / "result.json").exists():
            time.sleep(LOOK)
            heard, lines = _new_lines(log, heard)
            for line in lines:
                say(line)
            at_work = _is_locked(run)
            begun = begun or at_work or any(" stopped: " in line for line in lines)
            idle = 0.0 if at_work else idle + LOOK
            if process.poll() is not None:
                raise UserError(f"Flower's SuperLink ended: {last_words(place / 'superlink.log')}")
            if idle > (5 if begun else SLOW) and not (run / "result.json").exists():
                raise UserError(
                    f"the server's script ended: {last_words(log)}; go on with: fcil serve --resume {quoted(run)}"
                )
            _admit(place, tls, admitted, say)
        for line in _new_lines(log, heard)[1]:
            say(line)


def check_server(listen: Address, tls: Path | None) -> None:
    """Say what keeps a server from starting."""
    if tls is not None:
        for name in ("ca.crt", "server.crt"):
            certificates.check(tls / name)
        if not (tls / "server.key").is_file():
            raise UserError(f"there is no {tls / 'server.key'}; make one with: fcil certs {quoted(tls)} --host HOST")
    listen.require_free()


@dataclass(frozen=True)
class Seat:
    """Where, and as whom, a node joins."""

    server: Address
    name: str
    data: Path  # class folders
    state: Path  # what it remembers
    key: Path | None  # None is without authentication
    ca: Path | None  # None is without TLS
    device: str = "cpu"

    @property
    def log(self) -> Path:
        """Where Flower's program says what it does."""
        return self.state / "flower" / "supernode.log"

    def check(self) -> None:
        """Say what keeps this node from joining."""
        if not self.data.is_dir():
            raise UserError(f"there is no folder {self.data}; --data is a folder of class folders")
        check_folder(self.data)
        if self.key is not None:
            certificates.check_key(self.key)
        if self.ca is not None:  # which is looked for beside the key
            certificates.check(self.ca)
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {self.state}: {error.strerror}; choose another --state") from None

    def start(self) -> "subprocess.Popen[bytes]":
        """Start Flower's program."""
        where = {"data": str(self.data.resolve()), "state": str(self.state.resolve())}
        return supernode(
            self.server, self.log.parent, self.key, self.ca, {"name": self.name, **where, "device": self.device}
        )


def join(seat: Seat, patience: float, say: Say) -> None:
    """Be a node until stopped. Where no server admits it, try again for `patience` seconds; then say why."""
    seat.check()
    with (seat.state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another node keeps its memory in {seat.state}; give each node its own --state") from None
        say(f"node {seat.name} joins {seat.server}; log: {seat.log}")
        until, said = time.monotonic() + patience, ""
        while True:
            why, may_pass = seat.server.unreachable(), True
            if not why:
                heard = seat.log.stat().st_size if seat.log.exists() else 0
                with _running(seat.start) as process:
                    if _watched(process, seat.log, heard, lambda: say(f"node {seat.name} is admitted")):
                        until = time.monotonic() + patience
                why, may_pass = why_not("\n".join(_new_lines(seat.log, heard)[1]), seat)
            if not may_pass or time.monotonic() > until:
                raise UserError(why)
            if why != said:
                say(f"trying again: {why}")
            said = why
            time.sleep(AGAIN)


def _watched(process: "subprocess.Popen[bytes]", log: Path, heard: int, admitted: Callable[[], None]) -> bool:
    """Wait until a SuperNode ends; tell whether the server had admitted it."""
    known = False
    while process.poll() is None:
        time.sleep(LOOK)
        heard, lines = _new_lines(log, heard)
        if not known and any("SuperNode ID" in line for line in lines):
            known = True
            admitted()
    return known


def why_not(tail: str, seat: Seat) -> tuple[str, bool]:
    """Say in a sentence why a SuperNode ended, from the end of its log; and whether it may pass by itself."""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    end = "\n".join(lines[-LAST:])
    if "CERTIFICATE_VERIFY_FAILED" in end:
        return (
            f"the certificate of {seat.server} is not one that {seat.ca or 'this machine'} vouches for, has expired, "
            "or names another host; copy ca.crt from the server, or make the certificate anew: fcil certs DIR --host"
        ), False
    if "[code: 2001]" in end:
        return f"{seat.server} admits nodes with a key only; give it with --key", False
    if "[code: 2004]" in end:
        return (
            f"{seat.server} did not admit node {seat.name}: its key is not registered there, or it still counts as "
            "online, as it does for a minute after a crash"
        ), True
    return f"Flower's SuperNode ended: {lines[-1][-300:] if lines else 'it said nothing'}", False


@contextmanager
def _running(begin: Callable[[], "subprocess.Popen[bytes]"]) -> Iterator["subprocess.Popen[bytes]"]:
    process = begin()
    try:
        yield process
    finally:
        stop(process)


def _admit(place: Path, tls: Path | None, tried: set[tuple[Path, int]], say: Say) -> None:
    """Register the nodes whose public keys lie in the folder of certificates, also those that come later."""
    for key in sorted((tls / "nodes").glob("*/*.pub")) if tls is not None else []:
        if (this := (key, key.stat().st_mtime_ns)) in tried:
            continue
        tried.add(this)
        try:
            certificates.check_public_key(key)
            register(place, key)
        except UserError as error:
            say(f"{error}; {key} is passed over until it changes")
        else:
            say(f"node {key.stem} may join")


def _new_lines(log: Path, heard: int) -> tuple[int, list[str]]:
    try:
        with log.open("rb") as file:
            file.seek(heard)
            fresh = file.read()
    except OSError:
        return heard, []
    whole = fresh[: fresh.rfind(b"\n") + 1]
    return heard + len(whole), whole.decode(errors="replace").splitlines()


def _is_locked(run: Path) -> bool:
    try:
        with (run / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _await_unlocked(run: Path) -> None:
    until = time.monotonic() + LETS_GO
    while _is_locked(run):
        if time.monotonic() > until:
            raise UserError(f"{run} is being written by another process; wait for it, or stop it")
        time.sleep(LOOK)
