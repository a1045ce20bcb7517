"""With one client, GLFC is a centralised algorithm: written here once more, with nothing of fcil.

The mathematics below is plain PyTorch in float64: network, weights, both halves of the loss, SGD, the entropy, herding,
prototypes, their gradients by autograd, PyTorch's own L-BFGS, the choice of the old model, the draws of batches. fcil
gives the first weights, those of the LeNet, and the images.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.federation.loop import learn
from fcil.parts import assemble
from fcil.plan import plan
from tests.conftest import TINY
from tests.test_reference import order, seed_of

TASKS, ROUNDS, STEPS, BATCH, IMAGES = 2, 3, 4, 16, 24
LR, DECAY, CLIP, RISE = 2.0, 1e-5, 10.0, 0.4
PERTURB, PERTURB_LR, INVERT, INNER, LAST = 4, 0.2, 30, 8, 3
KEPT = 4  # exemplars of each of the two first classes: eight fit
ALONE = replace(
    TINY, tasks=TASKS, clients=1, active=1, train_limit=IMAGES, test_limit=5,
    memory=(2 * KEPT * 64 + 4) / (2 * TASKS * 64), memory_scope="client",
)  # fmt: skip
SETTINGS = {
    "rounds": ROUNDS, "steps": STEPS, "batch_size": BATCH, "lr": LR, "entropy_rise": RISE, "perturb_steps": PERTURB,
    "perturb_lr": PERTURB_LR, "inversion_steps": INVERT, "inversion_inner": INNER, "iterates": LAST,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("in_double")

Numbers = dict[str, Tensor]


@dataclass
class Outcome:
    """What a run comes to, round by round."""

    weights: list[Numbers] = field(default_factory=list)
    taught_by: list[int] = field(default_factory=list)  # the round whose model is best_1; -1 is none
    best: list[int] = field(default_factory=list)  # and best_2
    accuracy: list[float] = field(default_factory=list)
    proxies: list[Tensor] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    exemplars: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Given:
    """What the reference takes from fcil."""

    weights: Numbers
    lenet: Numbers
    tasks: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@cache
def by_fcil(**settings: Any) -> tuple[Given, Outcome]:
    parts = assemble(plan("glfc", ALONE, settings={**SETTINGS, **settings}), "cpu", workers=1)
    state, out = parts.server.state, Outcome()
    given = Given({n: t.clone() for n, t in state.weights.items()}, dict(parts.server.proxy.lenet.named_parameters()))  # type: ignore[attr-defined]
    for task in parts.scenario.tasks:
        parts.scenario.begin(task)
        data = parts.scenario.local(0, task)
        given.tasks.append((data.images, data.labels))
    before, past = 0, []
    for line in learn(parts.scenario, parts.server, parts.door, parts.engine):
        if line["kind"] == "task":
            before, out.exemplars = 0, dict(parts.transport.memories[0].exemplars)
            continue
        past.append(state.weights["head.weight"])
        out.weights.append(dict(state.weights))
        out.taught_by.append(round_of(past, state.best_1))
        out.best.append(round_of(past, state.best_2))
        out.accuracy.append(state.accuracy)
        order = state.labels.argsort(stable=True)
        out.proxies.append(state.proxies[order])
        out.signals.append(state.signals - before)
        before = state.signals
    return given, out


def round_of(past: list[Tensor], best: Numbers) -> int:
    return next((i for i, w in enumerate(past) if best and torch.equal(w, best["head.weight"])), -1)


# -- the reference ----------------------------------------------------------------------------------------------------


def features(w: Numbers, x: Tensor, training: bool = False) -> Tensor:
    """Three times convolution, batch norm, ReLU; mean over the places; `x` is within -1..1."""
    for layer, stride in enumerate((1, 2, 2)):
        x = F.conv2d(x, w[f"body.layers.{layer}.0.weight"], stride=stride, padding=1)
        norm = f"body.layers.{layer}.1"
        if training:
            mean, var, n = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), x.numel() / x.shape[1]
            with torch.no_grad():
                w[f"{norm}.running_mean"] += 0.1 * (mean - w[f"{norm}.running_mean"])
                w[f"{norm}.running_var"] += 0.1 * (var * n / (n - 1) - w[f"{norm}.running_var"])
        else:
            mean, var = w[f"{norm}.running_mean"], w[f"{norm}.running_var"]
        x = (x - mean.view(-1, 1, 1)) / (var.view(-1, 1, 1) + 1e-5).sqrt()
        x = (x * w[f"{norm}.weight"].view(-1, 1, 1) + w[f"{norm}.bias"].view(-1, 1, 1)).relu()
    return x.mean((2, 3))


def scores(w: Numbers, x: Tensor, training: bool = False) -> Tensor:
    return features(w, x, training) @ w["head.weight"].T + w["head.bias"]


def scaled(images: Tensor) -> Tensor:
    return images.double() / 127.5 - 1


def each_error(logits: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of all these outputs, image by image."""
    p = logits.sigmoid()
    return -(target * p.log() + (1 - target) * (1 - p).log()).mean(1)


def local_loss(w: Numbers, x: Tensor, y: Tensor, seen: int, old: Numbers | None, known: int, learned: int) -> Tensor:
    logits = scores(w, x, True)[:, :seen]
    target = torch.eye(seen)[y]
    off = 1 - logits.detach().sigmoid()[range(len(y)), y]
    weights = torch.ones(len(y))
    if learned:
        for kind in (y < learned, y >= learned):
            if kind.any():
                weights[kind] = off[kind] / off[kind].mean()
    total = (weights * each_error(logits, target)).mean()
    if old is None:
        return total
    with torch.no_grad():
        held = torch.cat([scores(old, x).sigmoid()[:, :known], target[:, known:]], 1)
    return 0.5 * total + 0.5 * each_error(logits, held).mean()


def sgd(w: Numbers, loss: Callable[[Numbers, Tensor, Tensor], Tensor], x: Tensor, y: Tensor, r: int, s: int) -> Numbers:
    w = {name: value.detach().clone() for name, value in w.items()}
    learned = {n: v.requires_grad_() for n, v in w.items() if n.endswith(("weight", "bias"))}
    drawn = order(len(y), STEPS * BATCH, torch.Generator().manual_seed(seed_of(0, 0, s))).view(STEPS, BATCH)
    for step, index in enumerate(drawn):
        lr = LR * 0.5 * (1 + math.cos(math.pi * (r + step / STEPS) / ROUNDS))
        gradients = torch.autograd.grad(loss(w, x[index], y[index]), list(learned.values()))
        norm = sum((g**2).sum() for g in gradients) ** 0.5
        shrink = min(1.0, CLIP / (float(norm) + 1e-6))
        with torch.no_grad():
            for value, g in zip(learned.values(), gradients, strict=True):
                value -= lr * (shrink * g + DECAY * value)
    return {name: value.detach() for name, value in w.items()}


def entropy(w: Numbers, x: Tensor, seen: int) -> float:
    p = scores(w, x)[:, :seen].softmax(1)
    return float(-(p * (p + 1e-5).log()).sum(1).mean())


def lenet(v: Numbers, x: Tensor) -> Tensor:
    for layer, stride in enumerate((2, 2, 1)):
        x = F.conv2d(x, v[f"layers.{layer}.weight"], v[f"layers.{layer}.bias"], stride=stride, padding=2).sigmoid()
    return x.flatten(1) @ v["head.weight"].T + v["head.bias"]


def lenet_gradient(v: Numbers, x: Tensor, label: int) -> list[Tensor]:
    v = {name: value.detach().requires_grad_() for name, value in v.items()}
    loss = -lenet(v, x).log_softmax(1)[0, label]
    return list(torch.autograd.grad(loss, list(v.values()), create_graph=True))


def prototype(w: Numbers, own: Tensor, label: int, seen: int) -> Tensor:
    """The image nearest to the mean feature, moved a little to where the model is surer of it."""
    unit = F.normalize(features(w, own))
    x = own[(unit - unit.mean(0)).norm(dim=1).argmin()][None]
    for _ in range(PERTURB):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(each_error(scores(w, x)[:, :seen], torch.eye(seen)[[label]]).sum(), x)
        x = x - PERTURB_LR * (slope + DECAY * x)
    return x.detach()


def inverted(v: Numbers, sent: list[Tensor]) -> tuple[list[Tensor], int]:
    label = int(sent[-2].sum(1).argmin())
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(label)).requires_grad_()
    optimizer = torch.optim.LBFGS([x], lr=0.1, max_iter=INNER)
    found = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        off = sum(((a - b) ** 2).sum() for a, b in zip(lenet_gradient(v, x, label), sent, strict=True))
        (x.grad,) = torch.autograd.grad(off, x)
        return off

    for _ in range(INVERT):
        optimizer.step(closure)
        found.append(((x.detach() + 1) * 127.5).round().clamp(0, 255)[0])
    return found[-LAST:], label


def herding(w: Numbers, own: Tensor, number: int) -> list[int]:
    unit, picked = F.normalize(features(w, own)), []
    for _ in range(number):
        best, least = -1, math.inf
        for i in set(range(len(own))) - set(picked):
            off = float((unit.mean(0) - unit[[*picked, i]].mean(0)).norm())
            best, least = (i, off) if off < least else (best, least)
        picked.append(best)
    return picked


def by_hand(given: Given, reset: bool = False) -> Outcome:
    out, w, step, last = Outcome(), given.weights, 0, 0.0
    bests: list[tuple[int, Numbers | None, int]] = [(-1, None, 0), (-1, None, 0)]  # round, weights, classes it knows
    accuracy, proxies, labels = 0.0, torch.zeros(0, 1, 8, 8), torch.zeros(0)
    for task, (images, y) in enumerate(given.tasks):
        seen, kept = 2 * (task + 1), sorted(out.exemplars)
        pool = torch.cat([scaled(images), *(scaled(out.exemplars[j]) for j in kept)])
        pool_labels = torch.cat([y, *(torch.full((len(out.exemplars[j]),), j) for j in kept)])
        for round in range(ROUNDS):
            step += 2  # others, of whom there are none, are asked first
            now = entropy(w, scaled(images), seen)
            signal, last = now - last > RISE * math.log10(2), now
            _, old, known = bests[1] if signal else bests[0]

            facts = (seen, old, known, len(kept))

            def loss(v: Numbers, x: Tensor, t: Tensor, a: Any = facts) -> Tensor:
                return local_loss(v, x, t, *a)

            w = sgd(w, loss, pool, pool_labels, round, step)
            if signal:
                sent = [
                    [g.detach() for g in lenet_gradient(given.lenet, prototype(w, scaled(images[y == j]), j, seen), j)]
                    for j in sorted(set(y.tolist()))
                ]
                found = [inverted(given.lenet, gradient) for gradient in sent]
                proxies = torch.cat([torch.stack(pictures) for pictures, _ in found])
                labels = torch.tensor([label for pictures, label in found for _ in pictures])
                bests[0] = bests[1]
                accuracy = 0.0 if reset else accuracy
            right = float((scores(w, scaled(proxies))[:, :seen].argmax(1) == labels).double().mean())
            if right >= accuracy:
                accuracy, bests[1] = right, (len(out.weights), w, seen)
            out.weights.append(w)
            out.taught_by.append(bests[0][0])
            out.best.append(bests[1][0])
            out.accuracy.append(accuracy)
            out.proxies.append(proxies)
            out.signals.append(int(signal))
        step += 1
        number = 2 * KEPT // seen
        out.exemplars = {j: e[:number] for j, e in out.exemplars.items()} | {
            j: images[y == j][herding(w, scaled(images[y == j]), number)] for j in sorted(set(y.tolist()))
        }
    return out


@pytest.mark.parametrize("reset", [False, True])
def test_with_one_client_glfc_is_the_centralised_algorithm(reset: bool) -> None:
    given, ours = by_fcil(reset_best=reset)
    theirs = by_hand(given, reset)
    assert ours.signals == theirs.signals and ours.signals[0] == ours.signals[ROUNDS] == 1 and 0 in ours.signals
    assert ours.taught_by == theirs.taught_by and ours.best == theirs.best
    assert ours.accuracy == pytest.approx(theirs.accuracy) and ours.taught_by[-1] >= 0, "an old model taught"
    for one, other in zip(ours.weights, theirs.weights, strict=True):
        for name, value in one.items():
            if value.is_floating_point():
                assert (value - other[name]).abs().max() < 1e-9, name
    for one, other in zip(ours.proxies, theirs.proxies, strict=True):
        assert (one.double() - other).abs().mean() < 1, "of 255, by two searches from different starts"
    assert ours.exemplars.keys() == theirs.exemplars.keys()
    assert all(torch.equal(e, theirs.exemplars[j]) for j, e in ours.exemplars.items())
