"""Typing `fcil ...`: in this process, which is fast, or in one of its own, where signals and pipes matter."""

import hashlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
    from fcil.cli import main  # typer 0.20 imports names that click 8.5 deprecates

TINY = "--set tasks=2 --set rounds=1 --set steps=1"


@dataclass(frozen=True)
class Said:
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str


def typed(line: str) -> Said:
    """Type a command; what it imports stays for the next one."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with mock.patch.object(sys, "argv", ["fcil", *shlex.split(line)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Said(code, out.getvalue(), err.getvalue())


def done(line: str) -> Said:
    """Type a command that must succeed without a complaint."""
    said = typed(line)
    assert said.code == 0 and said.err == "", said
    return said


def start(line: str, cwd: Path, before: str = "", **how: Any) -> subprocess.Popen[str]:
    """Type a command in a process of its own; `before` is what a shell does first."""
    command = f"{before} exec {shlex.quote(sys.executable)} -m fcil {line}"
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": _hear_ctrl_c, **how}
    return subprocess.Popen(["bash", "-c", command], cwd=cwd, text=True, env=dict(os.environ), **how)


def _hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests that run in the background inherit that it is ignored


def ended(process: subprocess.Popen[str]) -> Said:
    """Wait for a process to end."""
    out, err = process.communicate(timeout=900)
    return Said(process.returncode, out or "", err or "")


def wait_for(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    """Wait until a process has come so far."""
    for _ in range(6000):
        if ready():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("it never came so far")


def lines_in(folder: Path) -> int:
    """Count the lines of a run's ledger."""
    path = folder / "ledger.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def matrix(folder: Path) -> Any:
    """Return the accuracies that a finished run found."""
    return json.loads((folder / "result.json").read_text())["matrix"]


def fingerprint(folder: Path) -> dict[str, str]:
    """Return the digest of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def class_folders(root: Path, classes: int = 4, images: int = 10) -> Path:
    """Write small pictures, one colour for each class."""
    rng = np.random.default_rng(0)
    for label in range(classes):
        (root / f"class{label}").mkdir(parents=True)
        for number in range(images):
            pixels = rng.integers(0, 60, (12, 12, 3)).astype(np.uint8)
            pixels[..., label % 3] += 120
            Image.fromarray(pixels).save(root / f"class{label}" / f"{number}.png")
    return root
