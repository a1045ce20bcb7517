"""The engine: runs a client's answers, and its trainings, on this machine. Eager, one client at a time.

An answer computes with one thread on the CPU and draws from generators seeded by (run, client, step), so its bits do
not depend on where or beside whom it runs.
"""

import math
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fcil.blocks.augment import augmented
from fcil.blocks.training import weights_of
from fcil.errors import UserError
from fcil.federation.calls import Answered, Call
from fcil.method import Batch, Fit, Method, Pictures, Pool, Setting, Trained
from fcil.records import flatten, size_in_bytes, unflatten
from fcil.scenario.benchmarks import Protocol
from fcil.scenario.tasks import LocalData
from fcil.seeds import seed_of


class Engine:
    """One slot: a client object, its scratch networks, and a device."""

    def __init__(self, method: Method, config: Any, setting: Setting, device: str = "cpu"):
        self.setting, self.device = setting, torch.device(device)
        if self.device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        self.client = method.client(config, setting)
        self.nets = {name: net.to(self.device) for name, net in self.client.networks().items()}

    def receive(self, message: Any) -> Any:
        """Bring a record or a tensor onto the device; on the CPU it is passed on as it is."""
        if self.device.type == "cpu" or message is None:
            return message
        if isinstance(message, Tensor):
            return message.to(self.device)
        return unflatten(type(message), {name: tensor.to(self.device) for name, tensor in flatten(message).items()})

    def answer(
        self, who: int, handler: Callable[..., Any], memory: Any, data: LocalData, message: Any, call: Call
    ) -> Answered:
        """Run one answer; where it trains, do what it describes."""
        images, losses = 0, list[Tensor]()
        data = self._seeded(data, who, call)
        with threads(1), seeded(call.seed, who, call.step, "stray"):
            reply = handler(self.client, memory, data, message)
            if isinstance(reply, Generator):
                try:
                    fit = next(reply)
                    while True:
                        trained = self.fit(fit, call, data.generator)
                        images, losses = images + trained.count, [*losses, *([trained.loss] if trained.count else [])]
                        fit = reply.send(trained)
                except StopIteration as end:
                    reply = end.value
        if not is_dataclass(reply):
            raise UserError(f"{handler.__qualname__} answers with a {type(reply).__name__}; it must be a record")
        loss = losses[-1] if losses else float("nan")
        return Answered(reply, size_in_bytes(memory), loss, images)

    def look(
        self, who: int, memory: Any, data: LocalData, message: Any, call: Call, classes: tuple[int, ...]
    ) -> Pictures:
        """Return what a client that can show its memory shows of some classes; nothing of it leaves the machine."""
        with threads(1):
            seen: Pictures = self.client.look(memory, self._seeded(data, who, call), message, classes)  # type: ignore[attr-defined]
        return seen

    def _seeded(self, data: LocalData, who: int, call: Call) -> LocalData:
        generator = torch.Generator(self.device).manual_seed(seed_of(call.seed, who, call.step))
        return replace(data, generator=generator, cache_seed=seed_of(call.seed, who, "cache", call.task))

    def fit(self, fit: Fit, call: Call, generator: torch.Generator) -> Trained:
        """Do a local training."""
        protocol = self.setting.protocol
        if unheard := fit.load.keys() - self.nets.keys():
            raise UserError(f"a Fit loads {', '.join(unheard)}; this client's networks are {', '.join(self.nets)}")
        for name, weights in fit.load.items():
            self.nets[name].load_state_dict(weights)
        trains = {path.split(".")[0]: self.nets[path.split(".")[0]] for path in fit.trains}
        if missing := trains.keys() - fit.load.keys():
            raise ValueError(f"a Fit trains {sorted(missing)} but does not load it: say what weights it starts from")
        parameters, nets = self._thaw(fit.trains), {name: self.nets[name] for name in fit.load}
        if len(fit.pool) == 0:
            return Trained({n: weights_of(net) for n, net in trains.items()}, 0, torch.tensor(float("nan")))
        batch_size = fit.pool.batch_size or protocol.batch_size
        steps = fit.steps or protocol.steps or math.ceil(protocol.epochs * len(fit.pool) / batch_size)
        optimizer = torch.optim.SGD(
            parameters,
            lr=fit.lr,
            momentum=protocol.momentum if fit.momentum is None else fit.momentum,
            weight_decay=protocol.weight_decay if fit.weight_decay is None else fit.weight_decay,
            fused=True,
        )
        total, given = torch.zeros((), device=self.device), self.receive(fit.given)
        batches = self._batches(fit, steps, batch_size, generator)
        for step, batch in enumerate(batches):
            optimizer.param_groups[0]["lr"] = fit.lr * rate(protocol, (call.round + step / steps) / call.rounds)
            optimizer.zero_grad()
            loss = fit.loss(nets, batch, given)
            loss.backward()  # type: ignore[no-untyped-call]
            if protocol.clip:
                nn.utils.clip_grad_norm_(parameters, protocol.clip)
            optimizer.step()
            total += loss.detach()
        for net in trains.values():
            net.eval()
        return Trained({n: weights_of(net) for n, net in trains.items()}, len(fit.pool), total / steps)

    def classify(self, message: Any, images: Tensor) -> Tensor:
        """Return the class of each image, from the broadcast alone, with all cores."""
        message = self.receive(message)
        pixels = 2**17 if self.device.type == "cpu" else 2**20  # at once: keeps activations in hundreds of megabytes
        batch_size = min(1000, max(1, pixels // (images.shape[-1] * images.shape[-2])))
        with threads(cores()), torch.inference_mode():
            parts = [
                self.client.predict(message, part.to(self.device)).argmax(1) for part in torch.split(images, batch_size)
            ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=self.device)

    def _thaw(self, trains: tuple[str, ...]) -> list[nn.Parameter]:
        for net in self.nets.values():
            net.eval().requires_grad_(False)
        parts = [self.nets[name].get_submodule(rest) for name, _, rest in (path.partition(".") for path in trains)]
        for part in parts:
            part.train().requires_grad_(True)
        return [p for part in parts for p in part.parameters()]

    def _batches(self, fit: Fit, steps: int, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        pools = {"": fit.pool, **{name: pool for name, pool in fit.beside.items() if len(pool)}}
        sizes = {name: pool.batch_size or batch_size for name, pool in pools.items()}
        tables = {name: order(len(pool), steps * sizes[name], generator) for name, pool in pools.items()}
        for step in range(steps):
            drawn = {
                name: self._batch(pool, tables[name][step * sizes[name] : (step + 1) * sizes[name]], generator)
                for name, pool in pools.items()
            }
            yield replace(drawn.pop(""), beside=drawn)

    def _batch(self, pool: Pool, index: Tensor, generator: torch.Generator) -> Batch:
        images = pool.images[index]
        if images.dtype == torch.uint8:
            images = images.to(torch.get_default_dtype()) / 255
        if pool.augment and images.ndim == 4:
            images = augmented(images, self.setting.augment, generator)
        return Batch(images, pool.labels[index], generator, {name: t[index] for name, t in pool.extra.items()})


def order(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return `length` indices below `count`: one shuffled pass after the other, so that no batch is ever partial."""
    passes = -(-length // count)
    return torch.rand(passes, count, generator=generator, device=generator.device).argsort(1).flatten()[:length]


def rate(protocol: Protocol, progress: float) -> float:
    """Return the factor of the learning rate when the share `progress` of a task's rounds is done."""
    if protocol.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return float(0.1**progress) if protocol.schedule == "exponential" else 1.0


def cores() -> int:
    """Return how many cores this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with `count` threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def seeded(*key: int | str) -> Iterator[None]:
    """Seed what draws from the global generator, such as initial weights or dropout, and leave it as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(*key))
        yield
