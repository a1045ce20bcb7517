"""A training step captured as a CUDA graph.

A graph replays the same kernels on the same addresses. So whatever varies lies in buffers that stay: the weights in
the slot's networks, the images of each pool, the rows that each step takes of it, the learning rate of each step, the
number of the step, `given`. Clients of different sizes need no new graph, only a larger buffer now and then.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.federation.fitting import Networks, Work, descend, drawn
from fcil.federation.purity import identity, watched
from fcil.method import Loss, Pool, Trained
from fcil.records import NUMBERS, flatten, unflatten

WARM_UP = 3  # steps before a capture, in which libraries choose their kernels


class Graph:
    """One step of a kind of training in one slot, captured; `begin`, `launch` and `trained` are one training."""

    def __init__(self, networks: Networks, todo: Work, how: str, generator: torch.Generator, precision: Any):
        fit, device = todo.fit, generator.device
        self.networks, self.generator = networks, generator
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
        self.given_flat = _flat(self.given)
        networks.thaw(fit)
        self.optimizer = networks.optimizer(fit, todo.momentum, todo.weight_decay)
        nets = {name: networks.nets[name] for name in fit.load}
        self.half = Halves(nets) if isinstance(precision(), torch.autocast) else None
        self.counters = Counters(nets)

        def one_step(loss: Loss) -> None:
            self.optimizer.param_groups[0]["lr"].copy_(self.rates.index_select(0, self.step).squeeze(0))
            rows = {name: table.index_select(0, self.step).squeeze(0) for name, table in self.rows.items()}
            batch = drawn(self.pools, rows, how, generator)
            with self.half or nullcontext(), precision():
                value = loss(nets, batch, self.given)
            self.total += descend(value, self.optimizer, todo.clip, self.half.gather if self.half else lambda: None)
            self.step += 1

        self.begin(todo)
        try:
            with torch.cuda.stream(self.stream):
                with self.counters.counting():
                    one_step(watched(fit.loss))
                for _ in range(WARM_UP):
                    self.step.zero_()
                    one_step(fit.loss)
        finally:  # whoever gets the buffers next, after a loss that was refused, waits for what still reads them
            torch.cuda.current_stream(device).wait_stream(self.stream)
        self.graph.register_generator_state(generator)
        # only this thread's work is captured: a checkpoint may be on its way to the disk
        capture = torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local")
        with self.counters.stopped(), capture:
            one_step(fit.loss)

    def fits(self, todo: Work) -> bool:
        """Tell whether the buffers have room for a training of this kind."""
        return todo.steps <= len(self.rates) and all(len(pool) <= len(self.pools[n]) for n, pool in todo.pools.items())

    def begin(self, todo: Work) -> None:
        """Put everything that this training starts from into the buffers."""
        self.todo = todo
        self.networks.load(todo.fit)
        self.networks.optimizer(todo.fit, todo.momentum, todo.weight_decay)  # emptied
        for name, pool in todo.pools.items():
            buffers = self.pools[name]
            buffers.images[: len(pool)].copy_(pool.images)
            buffers.labels[: len(pool)].copy_(pool.labels)
            for key, extra in pool.extra.items():
                buffers.extra[key][: len(pool)].copy_(extra)
        for name, table in todo.tables(self.generator).items():
            self.rows[name][: todo.steps].copy_(table)
        self.rates[: todo.steps].copy_(torch.tensor(todo.rates), non_blocking=True)
        for name, tensor in _flat(todo.fit.given).items():
            self.given_flat[name].copy_(tensor)
        if self.half:
            self.half.refresh_frozen()
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
        self.counters.add(self.todo.steps)
        return self.networks.trained(self.todo.fit, len(self.todo.fit.pool), self.total / self.todo.steps)


class Halves:
    """Copies in half precision of the weights of convolutions and linear layers, all made at once.

    Inside, those layers compute with them, as autocasting would have them do after casting one weight after the other.
    The weights themselves are untouched: a loss that looks at them sees them in full precision.
    """

    def __init__(self, nets: Mapping[str, nn.Module]):
        modules = dict.fromkeys(module for net in nets.values() for module in net.modules())  # each once
        self.layers = [module for module in modules if type(module) in (nn.Conv2d, nn.Linear)]
        found = list(dict.fromkeys(p for layer in self.layers for p in layer.parameters(recurse=False)))
        self.halves = {id(p): p.detach().to(torch.bfloat16).requires_grad_(p.requires_grad) for p in found}
        pairs: list[tuple[Tensor, Tensor]] = [(p, self.halves[id(p)]) for p in found]
        self.learning = [(p, half) for p, half in pairs if p.requires_grad]
        self.frozen = [(p, half) for p, half in pairs if not p.requires_grad]

    def __enter__(self) -> None:
        _copied(self.learning)
        for layer in self.layers:
            vars(layer)["forward"] = partial(self._computed, layer)

    def _computed(self, layer: Any, x: Tensor) -> Tensor:
        # what stands in a weight's place for the moment, as in functional_call, has no half and is taken as it is
        weight, bias = (self.halves.get(id(p), p) for p in (layer.weight, layer.bias))
        result: Tensor = (
            layer._conv_forward(x, weight, bias) if isinstance(layer, nn.Conv2d) else F.linear(x, weight, bias)
        )
        return result

    def __exit__(self, *_: object) -> None:
        for layer in self.layers:
            del layer.forward

    def refresh_frozen(self) -> None:
        """Copy the weights that do not learn."""
        _copied(self.frozen)

    def gather(self) -> None:
        """Add the copies' gradients to those of the weights."""
        used = [(p, half, half.grad) for p, half in self.learning if half.grad is not None]
        grads = [torch.empty_like(p) for p, _, _ in used]
        if used:
            torch._foreach_copy_(grads, [grad for _, _, grad in used])
        for (p, half, _), grad in zip(used, grads, strict=True):
            p.grad, half.grad = grad if p.grad is None else p.grad + grad, None


def _copied(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([half for _, half in pairs], [p for p, _ in pairs])


class Counters:
    """The counters of batches that normalisation layers keep: added up once a training, not once a step."""

    def __init__(self, nets: Mapping[str, nn.Module]):
        found = [m for net in nets.values() for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.layers = [layer for layer in found if layer.momentum is not None and layer.num_batches_tracked is not None]
        self.tensors: list[Tensor] = [layer.num_batches_tracked for layer in self.layers]  # type: ignore[misc]
        self.each: list[int] = []  # what a step adds

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Find out what the step inside adds."""
        before = torch.stack(self.tensors).tolist() if self.tensors else []
        yield
        after = torch.stack(self.tensors).tolist() if self.tensors else []
        self.each = [new - old for old, new in zip(before, after, strict=True)]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Do not count inside."""
        for layer in self.layers:
            layer.num_batches_tracked = None
        try:
            yield
        finally:
            for layer, tensor in zip(self.layers, self.tensors, strict=True):
                layer.num_batches_tracked = tensor

    def add(self, steps: int) -> None:
        """Count these steps."""
        for each in set(self.each) - {0}:
            torch._foreach_add_([t for t, n in zip(self.tensors, self.each, strict=True) if n == each], each * steps)


def kind(todo: Work, client: object) -> Any:
    """Return what two trainings must have in common to share a graph; raise `Impure` where none can be made."""
    fit = todo.fit
    pools = [
        (name, todo.sizes[name], pool.augment, pool.images.dtype, pool.images.shape[1:],
         pool.labels.dtype, pool.labels.shape[1:],
         tuple((key, extra.dtype, extra.shape[1:]) for key, extra in pool.extra.items()))
        for name, pool in todo.pools.items()
    ]  # fmt: skip
    given = {name: (tensor.dtype, tensor.shape) for name, tensor in _flat(fit.given).items()}
    numbers = (
        [(f.name, value) for f in fields(fit.given) if type(value := getattr(fit.given, f.name)) in NUMBERS]
        if is_dataclass(fit.given)
        else []
    )
    return (
        identity(fit.loss, client), tuple(fit.load), fit.trains, tuple(pools), tuple(given.items()), tuple(numbers),
        todo.momentum, todo.weight_decay,
    )  # fmt: skip


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
    if given is None:
        return {}
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
