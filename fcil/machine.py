"""The machine under a run: its device, the commit of its code, the memory it took and keeps."""

import ctypes
import resource
import subprocess
import sys
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path

import torch

from fcil.errors import UserError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def commit() -> str:
    """Return the commit that the code is at, marked if it was changed since; empty where it is in no repository."""
    here = Path(__file__).parent
    try:
        tracked = _git("ls-files", "--error-unmatch", Path(__file__).name, at=here)
        head, changes = _git("rev-parse", "HEAD", at=here), _git("status", "--porcelain", "--", ".", at=here)
    except (OSError, subprocess.SubprocessError):
        return ""
    return head + ("-changed" if changes else "") if tracked else ""


def reset_peak() -> None:
    """Start counting anew: the runs of a sweep share a process."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int:
    """Return the most memory since then, in bytes: on the GPU where the run was there, else of process and workers."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved())  # what graphs hold is not allocated, but it is taken
    try:
        return _most("self") + sum(_most(child.pid) for child in active_children())
    except (OSError, IndexError, ValueError):
        scale = 1 if sys.platform == "darwin" else 1024
        return scale * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _most(process: object) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def keep_memory() -> None:
    """Let this process keep the memory that it frees: getting it anew takes longer than a small training needs it."""
    with suppress(AttributeError, OSError):  # where the C library is another one
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**30)


def _git(*words: str, at: Path) -> str:
    done = subprocess.run(["git", *words], cwd=at, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def the_device(wanted: str) -> str:
    """Return the device to compute on; `auto` takes a GPU if there is one."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={wanted} is not allowed; device takes auto, cpu, cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no usable CUDA device here; choose --device cpu or auto")
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"
