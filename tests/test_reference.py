"""With one client, each method is its paper's centralised algorithm: written here once more, with nothing of fcil.

The mathematics below is plain PyTorch in float64: network, masked cross-entropy, SGD with momentum, decay, clipping and
cosine, the draws of batches, and each method's own term. fcil gives the first weights and the images.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.federation.loop import learn
from fcil.parts import assemble
from fcil.plan import plan
from tests.conftest import TINY

TASKS, ROUNDS, STEPS, BATCH = 3, 2, 2, 16  # twelve steps
LR, MOMENTUM, DECAY, CLIP = 0.1, 0.9, 5e-3, 1.0
ALONE = replace(TINY, clients=1, active=1, train_limit=30, test_limit=5)
PROTOCOL = {
    "rounds": ROUNDS, "steps": STEPS, "batch_size": BATCH, "momentum": MOMENTUM, "weight_decay": DECAY, "clip": CLIP,
    "lr": LR,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("in_double")

Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class Given:
    """What the reference takes from fcil: the first weights, and each task's images and labels."""

    weights: Numbers
    tasks: list[tuple[Tensor, Tensor]]


def by_fcil(method: str, **settings: object) -> tuple[Given, Numbers]:
    parts = assemble(plan(method, ALONE, settings={**PROTOCOL, **settings}), "cpu")
    first = {n: t.clone() for n, t in parts.server.state.weights.items()}
    data = []
    for task in parts.scenario.tasks:
        parts.scenario.begin(task)
        data.append(parts.scenario.local(0, task))
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        pass
    return Given(first, [(d.images, d.labels) for d in data]), parts.server.state.weights


# -- the reference ----------------------------------------------------------------------------------------------------


def seed_of(*key: int | str) -> int:
    """The seed that a key stands for: eight bytes of its hash, but for one bit."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") // 2


def order(count: int, length: int, generator: torch.Generator) -> Tensor:
    """So many rows below `count`: one shuffled pass after the other."""
    passes = torch.rand(math.ceil(length / count), count, generator=generator)
    return torch.cat([row.argsort() for row in passes])[:length]


def scores(w: Numbers, images: Tensor, training: bool) -> Tensor:
    """Three times convolution, batch norm, ReLU; mean over the places; linear head."""
    x = (images / 255 - 0.5) / 0.5
    for layer, stride in enumerate((1, 2, 2)):
        x = F.conv2d(x, w[f"body.layers.{layer}.0.weight"], stride=stride, padding=1)
        norm = f"body.layers.{layer}.1"
        if training:
            mean, var, n = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), x.numel() / x.shape[1]
            with torch.no_grad():
                w[f"{norm}.running_mean"] += 0.1 * (mean - w[f"{norm}.running_mean"])
                w[f"{norm}.running_var"] += 0.1 * (var * n / (n - 1) - w[f"{norm}.running_var"])
                w[f"{norm}.num_batches_tracked"] += 1
        else:
            mean, var = w[f"{norm}.running_mean"], w[f"{norm}.running_var"]
        x = (x - mean.view(-1, 1, 1)) / (var.view(-1, 1, 1) + 1e-5).sqrt()
        x = (x * w[f"{norm}.weight"].view(-1, 1, 1) + w[f"{norm}.bias"].view(-1, 1, 1)).relu()
    return x.mean((2, 3)) @ w["head.weight"].T + w["head.bias"]


def likelihood(logits: Tensor, labels: Tensor, classes: list[int]) -> Tensor:
    """Mean negative log-likelihood of a softmax over `classes`."""
    chosen = logits[:, classes]
    right = logits.gather(1, labels[:, None])[:, 0]
    return (chosen.exp().sum(1).log() - right).mean()


def is_parameter(name: str) -> bool:
    return not name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def sgd(w: Numbers, loss: Callable[[Numbers, Tensor, Tensor], Tensor], images: Tensor, labels: Tensor,
        round: int, step: int) -> Numbers:  # fmt: skip
    """One round of local training on the batches that fcil draws at this step of the run."""
    w = {name: value.detach().clone() for name, value in w.items()}
    learned = {name: value.requires_grad_() for name, value in w.items() if is_parameter(name)}
    drawn = order(len(labels), STEPS * BATCH, torch.Generator().manual_seed(seed_of(0, 0, step))).view(STEPS, BATCH)
    speed: Numbers = {}
    for s, index in enumerate(drawn):
        lr = LR * 0.5 * (1 + math.cos(math.pi * (round + s / STEPS) / ROUNDS))
        gradients = torch.autograd.grad(loss(w, images[index], labels[index]), list(learned.values()))
        norm = sum((g**2).sum() for g in gradients) ** 0.5
        shrink = min(1.0, CLIP / (float(norm) + 1e-6))
        for (name, value), g in zip(learned.items(), gradients, strict=True):
            push = shrink * g + DECAY * value.detach()
            speed[name] = push if name not in speed else MOMENTUM * speed[name] + push
            with torch.no_grad():
                value -= lr * speed[name]
    return {name: value.detach() for name, value in w.items()}


def classes_until(task: int) -> list[int]:
    return list(range(2 * task + 2))


def finetune(given: Given) -> Numbers:
    w, step = given.weights, 0
    for task, (images, labels) in enumerate(given.tasks):
        for round in range(ROUNDS):
            step += 1
            w = sgd(w, lambda v, x, y, t=task: likelihood(scores(v, x, True), y, classes_until(t)), images, labels,
                    round, step)  # fmt: skip
    return w


def joint(given: Given) -> Numbers:
    w, step = given.weights, 0
    for task, (images, labels) in enumerate(given.tasks):
        kept = [(i[y == j], y[y == j]) for i, y in given.tasks[:task] for j in sorted(set(y.tolist()))]
        every = torch.cat([images, *(i for i, _ in kept)]), torch.cat([labels, *(y for _, y in kept)])
        for round in range(ROUNDS):
            step += 1
            w = sgd(w, lambda v, x, y, t=task: likelihood(scores(v, x, True), y, classes_until(t)), *every, round, step)
        step += 1  # the clients are asked to remember
    return w


def fedprox(given: Given, mu: float) -> Numbers:
    w, step = given.weights, 0
    for task, (images, labels) in enumerate(given.tasks):
        for round in range(ROUNDS):
            step += 1
            anchor = dict(w)

            def loss(v: Numbers, x: Tensor, y: Tensor, a: Numbers = anchor, t: int = task) -> Tensor:
                pull = sum(((v[n] - a[n]) ** 2).sum() for n in v if is_parameter(n))
                return likelihood(scores(v, x, True), y, classes_until(t)) + mu / 2 * pull

            w = sgd(w, loss, images, labels, round, step)
    return w


def lwf(given: Given, distill: float, temperature: float) -> Numbers:
    w, step = given.weights, 0
    for task, (images, labels) in enumerate(given.tasks):
        teacher, old, new = dict(w), classes_until(task - 1), classes_until(task)[-2:]

        def loss(
            v: Numbers, x: Tensor, y: Tensor, w_old: Numbers = teacher, old: list[int] = old, new: list[int] = new
        ) -> Tensor:
            said = scores(v, x, True)
            total = likelihood(said, y, new)
            if old:
                with torch.no_grad():
                    taught = (scores(w_old, x, False)[:, old] / temperature).softmax(1)
                says = (said[:, old] / temperature).log_softmax(1)
                divergence = (taught * (taught.log() - says)).sum(1).mean()
                total = total + distill * temperature**2 * divergence
            return total

        for round in range(ROUNDS):
            step += 1
            w = sgd(w, loss, images, labels, round, step)
    return w


def ewc(given: Given, strength: float, decay: float) -> Numbers:
    w, step = given.weights, 0
    fisher = {name: torch.zeros_like(value) for name, value in w.items() if is_parameter(name)}
    anchor = dict(w)
    for task, (images, labels) in enumerate(given.tasks):

        def loss(v: Numbers, x: Tensor, y: Tensor, f: Numbers = fisher, a: Numbers = anchor, t: int = task) -> Tensor:
            penalty = sum((f[n] * (v[n] - a[n]) ** 2).sum() for n in f)
            return likelihood(scores(v, x, True), y, classes_until(t)) + strength / 2 * penalty

        for round in range(ROUNDS):
            step += 1
            w = sgd(w, loss, images, labels, round, step)
        step += 1  # the clients are asked to measure
        squares = {name: torch.zeros_like(value) for name, value in fisher.items()}
        for image, label in zip(images, labels, strict=True):
            leaves = {n: v.clone().requires_grad_(is_parameter(n)) for n, v in w.items()}
            own = likelihood(scores(leaves, image[None], False), label[None], classes_until(task))
            for name, g in zip(fisher, torch.autograd.grad(own, [leaves[n] for n in fisher]), strict=True):
                squares[name] += g**2
        fisher = {name: decay * fisher[name] + squares[name] / len(labels) for name in fisher}
        anchor = dict(w)
    return w


# -- both, side by side -----------------------------------------------------------------------------------------------


REFERENCES: dict[str, tuple[Callable[..., Numbers], dict[str, float], dict[str, float]]] = {
    "finetune": (finetune, {}, {}),
    "joint": (joint, {}, {}),
    "fedprox": (fedprox, {"mu": 0.5}, {}),
    "lwf": (lwf, {"distill": 3.0, "temperature": 2.0}, {}),
    "ewc": (ewc, {"strength": 300.0, "decay": 0.7}, {"samples": 1000}),
}


@cache
def both(method: str) -> tuple[Given, Numbers, Numbers]:
    reference, terms, more = REFERENCES[method]
    given, ours = by_fcil(method, **terms, **more)
    return given, ours, reference(given, **terms)


def gap(one: Numbers, other: Numbers) -> float:
    assert one.keys() == other.keys() and all(one[n].dtype == other[n].dtype for n in one)
    return max((one[n] - other[n]).abs().max().item() for n in one)


@pytest.mark.parametrize("method", REFERENCES)
def test_one_client_is_the_centralised_algorithm(method: str) -> None:
    given, ours, reference = both(method)
    assert ours["head.weight"].dtype == torch.float64 and len(given.tasks) == TASKS
    assert gap(ours, reference) < 1e-9
    assert gap(ours, given.weights) > 1e-2, "nothing was learned, so nothing was compared"


@pytest.mark.parametrize(("method", "term"), [("fedprox", "mu"), ("lwf", "distill"), ("ewc", "strength")])
def test_leaving_a_part_out_changes_the_result(method: str, term: str) -> None:
    given, ours, _ = both(method)
    reference, terms, more = REFERENCES[method]
    without = reference(given, **{**terms, term: 0.0})
    assert gap(ours, without) > 1e-4
    assert gap(by_fcil(method, **{**terms, **more, term: 0.0})[1], without) < 1e-9


@pytest.mark.parametrize(("method", "term"), [("fedprox", "mu"), ("lwf", "temperature"), ("ewc", "decay")])
def test_every_number_matters(method: str, term: str) -> None:
    given, ours, _ = both(method)
    reference, terms, _ = REFERENCES[method]
    assert gap(ours, reference(given, **{**terms, term: 0.5 * terms[term]})) > 1e-6


def test_without_its_term_fedprox_is_fine_tuning() -> None:
    given, _, plain = both("finetune")
    assert gap(fedprox(given, mu=0.0), plain) < 1e-12
