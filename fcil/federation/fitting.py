"""A Fit, done step by step: what every way of training has in common, and the plain way.

The plain way is a loop of PyTorch's own optimiser. Networks, optimisers and their buffers are made once and used again
for every client.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fcil.blocks.augment import augmented
from fcil.blocks.training import copy, weights_of
from fcil.errors import UserError
from fcil.federation.calls import Call
from fcil.method import Batch, Fit, Pool, Trained
from fcil.records import Weights
from fcil.scenario.benchmarks import Protocol


@dataclass(frozen=True)
class Work:
    """A Fit with all that the protocol adds to it."""

    fit: Fit
    pools: Mapping[str, Pool]  # those that have anything in them; the Fit's own is called ""
    sizes: Mapping[str, int]  # images of each in a step
    steps: int
    rates: list[float]  # the learning rate of every step
    momentum: float
    weight_decay: float
    clip: float

    new: tuple[int, ...]  # classes that have a share of every step
    new_share: float  # how large it is at least; 0 takes images as they come

    def tables(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw what every step takes of each pool: (steps, size) indices."""
        return {
            name: self._shared(pool, generator) if self.new_share and not name
            else order(len(pool), self.steps * self.sizes[name], generator).view(self.steps, -1)
            for name, pool in self.pools.items()
        }  # fmt: skip

    def _shared(self, pool: Pool, generator: torch.Generator) -> Tensor:
        """Draw so many images of new classes in every step, if fewer would come, and the missing ones of the others."""
        is_new = torch.isin(pool.labels, torch.tensor(self.new, device=pool.labels.device))
        number = min(self.sizes[""] - 1, max(1, round(self.new_share * self.sizes[""])))
        parts = [(is_new.nonzero()[:, 0], number), ((~is_new).nonzero()[:, 0], self.sizes[""] - number)]
        enough = len(parts[0][0]) >= self.new_share * len(pool)
        if enough or self.sizes[""] == 1 or not all(len(rows) for rows, _ in parts):
            parts = [(torch.arange(len(pool), device=is_new.device), self.sizes[""])]
        drawn = [rows[order(len(rows), self.steps * size, generator)].view(self.steps, -1) for rows, size in parts]
        return torch.cat(drawn, 1)


def work(fit: Fit, protocol: Protocol, call: Call) -> Work:
    """Say what is to be done for a Fit whose pool is not empty."""
    size = fit.pool.batch_size or protocol.batch_size
    steps = fit.steps or protocol.steps or math.ceil(protocol.epochs * len(fit.pool) / size)
    pools = {"": fit.pool, **{name: pool for name, pool in fit.beside.items() if len(pool)}}
    shares = [(call.round + step / steps) / call.rounds for step in range(steps + 1)]
    return Work(
        fit, pools, {name: pool.batch_size or size for name, pool in pools.items()}, steps,
        rates=[fit.lr * rate(protocol, begins, ends) for begins, ends in pairwise(shares)],
        momentum=protocol.momentum if fit.momentum is None else fit.momentum,
        weight_decay=protocol.weight_decay if fit.weight_decay is None else fit.weight_decay,
        clip=protocol.clip, new=call.new, new_share=protocol.new_share if fit.new_share is None else fit.new_share,
    )  # fmt: skip


def order(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return `length` indices below `count`: one shuffled pass after the other, so that no batch is ever partial."""
    passes = -(-length // count)
    return torch.rand(passes, count, generator=generator, device=generator.device).argsort(1).flatten()[:length]


def rate(protocol: Protocol, begins: float, ends: float) -> float:
    """Return the factor of the learning rate of a step that begins and ends at these shares of a task's rounds.

    While the rate rises, a step has what is reached at its end: with that of its beginning the first one would change
    nothing, and where a round is one step, neither would the round.
    """
    if begins < protocol.warmup:
        return min(1.0, ends / protocol.warmup)
    progress = (begins - protocol.warmup) / (1 - protocol.warmup)
    if protocol.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return float(0.1**progress) if protocol.schedule == "exponential" else 1.0


def drawn(pools: Mapping[str, Pool], rows: Mapping[str, Tensor], how: str, generator: torch.Generator) -> Batch:
    """Return the batch of one step from the rows of each pool that it takes."""
    batches = {name: _batch(pool, rows[name], how, generator) for name, pool in pools.items()}
    return replace(batches.pop(""), beside=batches)


def _batch(pool: Pool, rows: Tensor, how: str, generator: torch.Generator) -> Batch:
    images = pool.images[rows]
    if images.dtype == torch.uint8:
        images = images.to(torch.get_default_dtype()) / 255
    if images.ndim == 4:
        images = augmented(images, how, generator) if pool.augment else images
        if images.is_cuda or images.shape[1] > 1:  # with one channel there is nothing to gain on a CPU
            images = images.contiguous(memory_format=torch.channels_last)
    return Batch(images, pool.labels[rows], generator, {name: t[rows] for name, t in pool.extra.items()})


def descend(
    value: Tensor, optimizer: torch.optim.Optimizer, clip: float, gather: Callable[[], None] = lambda: None
) -> Tensor:
    """Take one step down from the loss `value`; `gather` puts gradients into their place."""
    value.backward()  # type: ignore[no-untyped-call]
    gather()
    if clip:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
    optimizer.step()
    optimizer.zero_grad()
    return value.detach()


class Networks:
    """The networks of a slot, and the optimisers of what trains in them."""

    def __init__(self, nets: Mapping[str, nn.Module]):
        self.nets = nets
        self._state = {name: net.state_dict(keep_vars=True) for name, net in nets.items()}
        self._modules = [module for net in nets.values() for module in net.modules()]
        self._parameters = [p for net in nets.values() for p in net.parameters()]
        self._learning: dict[tuple[str, ...], tuple[set[int], set[int]]] = {}  # ids of modules and parameters
        self._optimizers: dict[tuple[Any, ...], torch.optim.SGD] = {}

    def load(self, fit: Fit) -> None:
        """Copy the weights that a Fit starts from into its networks."""
        if unheard := fit.load.keys() - self.nets.keys():
            raise UserError(f"a Fit loads {', '.join(unheard)}; this client's networks are {', '.join(self.nets)}")
        if missing := {path.split(".")[0] for path in fit.trains} - fit.load.keys():
            raise ValueError(f"a Fit trains {sorted(missing)} but does not load it: say what weights it starts from")
        for name, weights in fit.load.items():
            copy(self.nets[name], self._state[name], weights)

    def thaw(self, fit: Fit) -> None:
        """Let what a Fit trains learn, and freeze all else."""
        if fit.trains not in self._learning:
            parts = list(self._parts(fit))
            modules = {id(module) for part in parts for module in part.modules()}
            self._learning[fit.trains] = modules, {id(p) for part in parts for p in part.parameters()}
        modules, parameters = self._learning[fit.trains]
        for module in self._modules:
            module.training = id(module) in modules
        for p in self._parameters:
            p.requires_grad_(id(p) in parameters)

    def optimizer(self, fit: Fit, momentum: float, weight_decay: float) -> torch.optim.SGD:
        """Return a fresh optimiser of what a Fit trains: the same one, with its buffers emptied."""
        key = fit.trains, momentum, weight_decay
        if key not in self._optimizers:
            parameters = [p for part in self._parts(fit) for p in part.parameters()]
            device = parameters[0].device
            lr: Any = torch.zeros((), device=device) if device.type == "cuda" else 0.0
            made = torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)
            if momentum:  # from zeros the first step is the same, and none of them differs from the others
                for p in parameters:
                    made.state[p]["momentum_buffer"] = torch.zeros_like(p, requires_grad=False)
            self._optimizers[key] = made
        optimizer = self._optimizers[key]
        if momentum:
            torch._foreach_zero_([state["momentum_buffer"] for state in optimizer.state.values()])
        return optimizer

    def trained(self, fit: Fit, count: int, loss: Tensor) -> Trained:
        """Return copies of what was trained, which is in evaluation mode from here on."""
        names = dict.fromkeys(path.split(".")[0] for path in fit.trains)
        for name in names:
            self.nets[name].eval()
        return Trained({name: self._copied(name) for name in names}, count, loss)

    def untrained(self, fit: Fit) -> Trained:
        """Return what a Fit without images comes to."""
        return self.trained(fit, 0, torch.tensor(float("nan")))

    def _copied(self, name: str) -> Weights:
        return weights_of(self.nets[name])

    def _parts(self, fit: Fit) -> Iterator[nn.Module]:
        for path in fit.trains:
            name, _, rest = path.partition(".")
            yield self.nets[name].get_submodule(rest)


Precision = Callable[[], AbstractContextManager[Any]]


def plainly(
    networks: Networks, todo: Work, how: str, generator: torch.Generator, given: Any, precision: Precision
) -> Trained:
    """Do a local training as a loop."""
    fit = todo.fit
    networks.thaw(fit)
    networks.load(fit)
    optimizer = networks.optimizer(fit, todo.momentum, todo.weight_decay)
    nets = {name: networks.nets[name] for name in fit.load}
    tables, total = todo.tables(generator), torch.zeros((), device=generator.device)
    for step, lr in enumerate(todo.rates):
        _set_rate(optimizer, lr)
        batch = drawn(todo.pools, {name: table[step] for name, table in tables.items()}, how, generator)
        with precision():
            loss = fit.loss(nets, batch, given)
        total += descend(loss, optimizer, todo.clip)
    return networks.trained(fit, len(fit.pool), total / todo.steps)


def _set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    group = optimizer.param_groups[0]
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
