"""What a server computes over and over on the same tensors: on a GPU recorded once as a CUDA graph, then replayed.

A step of a small network is hundreds of kernels, and starting them takes longer than they do. The work must be pure
tensor code whose tensors stay where they are: what varies is copied into them.
"""

from collections.abc import Callable

import torch
from torch import nn

WARM_UP = 3  # calls before it is recorded, in which libraries choose their kernels


class Recorded:
    """`work()`, done as it is on a CPU, and in the first calls on a GPU."""

    def __init__(self, work: Callable[[], None], device: torch.device):
        self.work, self.device, self.calls = work, device, 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.device.type != "cuda":
            return self.work()
        if self.calls < WARM_UP:
            self.calls += 1
            return self._aside()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # only this thread's work is recorded: a checkpoint may be on its way to the disk
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.work()
        self.graph.replay()

    def _aside(self) -> None:
        stream, now = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            self.work()
        now.wait_stream(stream)


def adam(net: nn.Module) -> torch.optim.Adam:
    """Return an optimiser that can be recorded; `restarted` says how fast it is."""
    cuda = _on_a_gpu(net)
    return torch.optim.Adam(net.parameters(), _rate(net), fused=True, capturable=cuda)


def sgd(net: nn.Module, weight_decay: float) -> torch.optim.SGD:
    """Return another one, without momentum."""
    return torch.optim.SGD(net.parameters(), _rate(net), weight_decay=weight_decay, fused=True)


def restarted(optimizer: torch.optim.Optimizer, lr: float) -> torch.optim.Optimizer:
    """Let an optimiser forget what it has done, in place, and go on at this rate."""
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    group = optimizer.param_groups[0]
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
    return optimizer


def _on_a_gpu(net: nn.Module) -> bool:
    return next(net.parameters()).is_cuda


def _rate(net: nn.Module) -> float | torch.Tensor:
    return torch.zeros((), device=next(net.parameters()).device) if _on_a_gpu(net) else 0.0
