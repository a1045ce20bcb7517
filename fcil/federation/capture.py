"""A training step captured as a CUDA graph, and what keeps a loss from being captured.

A graph replays the same kernels on the same addresses. So whatever varies lies in buffers that stay: the weights in
the slot's networks, the images of each pool, the rows that each step takes of it, the learning rate of each step, the
number of the step, `given`. Clients of different sizes need no new graph, only a larger buffer now and then.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fcil.federation.fitting import Networks, Work, copy, descend, drawn
from fcil.method import Pool, Trained
from fcil.records import NUMBERS, flatten, unflatten

WARM_UP = 3  # steps before a capture, in which libraries choose their kernels
ONE_RULE = "a loss must be a pure tensor function (CONTRIBUTING.md)"


class Impure(Exception):
    """A loss does something that a graph cannot replay."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise `Impure` where a value is read back to Python, a shape depends on values, or a draw has no generator."""

    READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
    SHAPES = ("aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name in self.READS:
            raise Impure("it reads a value back to Python, as .item(), float(...) or a branch on a tensor does")
        if name in self.SHAPES or (name == "aten::index" and _by_mask(args[1])):
            raise Impure(f"the shape of a result depends on values ({name.removeprefix('aten::')})")
        if torch.Tag.nondeterministic_seeded in func.tags and _generator(func, args, kwargs) is None:
            raise Impure(f"it draws ({name.removeprefix('aten::')}) without the batch's generator")
        return func(*args, **kwargs)


def _by_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _generator(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("generator") if "generator" in names else len(args)
    return kwargs.get("generator", args[place] if place < len(args) else None)


def identity(loss: Callable[..., Any]) -> Any:
    """Return what tells one loss from another; raise `Impure` for one that is made anew with every message."""
    if isinstance(loss, MethodType):
        return id(loss.__self__), identity(loss.__func__)
    if isinstance(loss, partial) or not isinstance(loss, FunctionType) or loss.__closure__:
        raise Impure("it is made anew for every Fit; make it a function of the module or a method of the client")
    return loss.__code__


class Graph:
    """One step of a kind of training in one slot, captured; `begin`, `launch` and `trained` are one training."""

    def __init__(self, networks: Networks, todo: Work, how: str, generator: torch.Generator, precision: Any):
        fit, device = todo.fit, generator.device
        self.networks, self.generator, self.momentum, self.decay = (
            networks, generator, todo.momentum, todo.weight_decay
        )  # fmt: skip
        self.stream, self.graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.total = torch.zeros((), device=device)
        self.rates = torch.zeros(_room(todo.steps), device=device)
        self.pools = {name: _buffers(pool) for name, pool in todo.pools.items()}
        self.rows = {
            name: torch.zeros(len(self.rates), todo.sizes[name], dtype=torch.int64, device=device)
            for name in self.pools
        }
        self.given = _like(fit.given)
        networks.thaw(fit)
        self.optimizer = networks.optimizer(fit, todo.momentum, todo.weight_decay)
        nets = {name: networks.nets[name] for name in fit.load}

        def one_step(watched: bool = False) -> None:
            self.optimizer.param_groups[0]["lr"].copy_(self.rates.index_select(0, self.step).squeeze(0))
            rows = {name: table.index_select(0, self.step).squeeze(0) for name, table in self.rows.items()}
            batch = drawn(self.pools, rows, how, generator)
            loss = _watched(fit.loss) if watched else fit.loss
            self.total += descend(loss, nets, batch, self.given, self.optimizer, todo.clip, precision())
            self.step += 1

        self.begin(todo)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            for number in range(WARM_UP):
                one_step(watched=number == 0)
                self.step.zero_()
        torch.cuda.current_stream(device).wait_stream(self.stream)
        self.graph.register_generator_state(generator)
        # only this thread's work is captured: a checkpoint may be on its way to the disk
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            one_step()

    def fits(self, todo: Work) -> bool:
        """Tell whether the buffers have room for a training of this kind."""
        return todo.steps <= len(self.rates) and all(len(pool) <= len(self.pools[n]) for n, pool in todo.pools.items())

    def begin(self, todo: Work) -> None:
        """Put everything that this training starts from into the buffers."""
        self.todo = todo
        self.networks.load(todo.fit)
        self.networks.optimizer(todo.fit, self.momentum, self.decay)
        for name, pool in todo.pools.items():
            buffers = self.pools[name]
            buffers.images[: len(pool)].copy_(pool.images)
            buffers.labels[: len(pool)].copy_(pool.labels)
            for key, extra in pool.extra.items():
                buffers.extra[key][: len(pool)].copy_(extra)
        for name, table in todo.tables(self.generator).items():
            self.rows[name][: todo.steps].copy_(table)
        self.rates[: todo.steps].copy_(torch.tensor(todo.rates), non_blocking=True)
        if self.given is not None:
            copy(_flat(self.given), _flat(todo.fit.given))
        self.step.zero_()
        self.total.zero_()
        self.stream.wait_stream(torch.cuda.current_stream())

    def launch(self) -> None:
        """Let one step run; the caller does not wait for it."""
        with torch.cuda.stream(self.stream):
            self.graph.replay()

    def trained(self) -> Trained:
        """Return what came of it, for whoever computes after it on the current stream."""
        torch.cuda.current_stream().wait_stream(self.stream)
        return self.networks.trained(self.todo.fit, len(self.todo.fit.pool), self.total / self.todo.steps)


def kind(todo: Work) -> Any:
    """Return what two trainings must have in common to share a graph; raise `Impure` where none can be made."""
    fit = todo.fit
    pools = [
        (name, todo.sizes[name], pool.augment, pool.images.dtype, pool.images.shape[1:],
         tuple((key, extra.dtype, extra.shape[1:]) for key, extra in pool.extra.items()))
        for name, pool in todo.pools.items()
    ]  # fmt: skip
    given = {name: (t.dtype, t.shape) for name, t in _flat(fit.given).items()} if fit.given is not None else {}
    numbers = (
        [(f.name, value) for f in fields(fit.given) if type(value := getattr(fit.given, f.name)) in NUMBERS]
        if is_dataclass(fit.given)
        else []
    )
    return (
        identity(fit.loss), tuple(fit.load), fit.trains, tuple(pools), tuple(given.items()), tuple(numbers),
        todo.momentum, todo.weight_decay,
    )  # fmt: skip


def _watched(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def watched(*args: Any) -> Tensor:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with Watch():  # type: ignore[no-untyped-call]
                return loss(*args)
        except RuntimeError as error:
            if "synchronizing" in str(error):
                raise Impure("it makes Python wait for the GPU, as .tolist() or .cpu() does") from error
            raise
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return watched


def _room(count: int) -> int:
    """Return a size with some room above, so that growing clients need few new graphs."""
    return max(16, 1 << (count - 1).bit_length())


def _buffers(pool: Pool) -> Pool:
    room = _room(len(pool))

    def grown(tensor: Tensor) -> Tensor:
        return torch.zeros((room, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)

    extra = {key: grown(tensor) for key, tensor in pool.extra.items()}
    return Pool(grown(pool.images), grown(pool.labels), pool.augment, pool.batch_size, extra)


def _flat(given: Any) -> dict[str, Tensor]:
    if isinstance(given, Tensor):
        return {"": given}
    return {
        name: tensor
        for name, tensor in flatten(given).items()
        if "/" in name or isinstance(getattr(given, name), Tensor)
    }


def _like(given: Any) -> Any:
    """Return buffers of the same kind; numbers of a record stay as they are."""
    if given is None:
        return None
    if isinstance(given, Tensor):
        return given.clone()
    return unflatten(type(given), {name: tensor.clone() for name, tensor in flatten(given).items()})
