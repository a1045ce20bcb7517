"""With one client, `podnet` is a centralised algorithm: written here once more, with nothing of fcil.

The mathematics below is plain PyTorch in float64: network, proxies, both distillations, imprinting, SGD, herding, the
fine-tuning of the proxies, and the draws of random numbers. fcil gives the first weights and the images.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from sklearn.cluster import KMeans, kmeans_plusplus
from torch import Tensor
from torch.nn import functional as F

from fcil.federation.loop import learn
from fcil.parts import assemble
from fcil.plan import plan
from tests.conftest import TINY
from tests.test_reference import order, seed_of

TASKS, ROUNDS, STEPS, BATCH = 3, 2, 3, 16  # six steps a task, and six of fine-tuning
LR, TUNE_LR, MOMENTUM, DECAY, CLIP = 0.1, 0.05, 0.9, 5e-3, 1.0
KEPT = [12, 6, 4]  # exemplars of each class after each task, of 24 in all
ALONE = replace(TINY, tasks=TASKS, clients=1, active=1, train_limit=30, test_limit=5, memory=4, memory_scope="client")
PROTOCOL = {
    "rounds": ROUNDS, "steps": STEPS, "batch_size": BATCH, "momentum": MOMENTUM, "weight_decay": DECAY, "clip": CLIP,
    "lr": LR, "tune_lr": TUNE_LR,
}  # fmt: skip
TERMS: dict[str, Any] = {
    "spatial": 3.0, "flat": 1.0, "margin": 0.6, "proxies": 10, "nca": "paper", "similarity": "distance",
    "tune_share": 1.0,
}  # fmt: skip
HEAD = "head.weight"

pytestmark = pytest.mark.usefixtures("in_double")

Numbers = dict[str, Tensor]
Data = tuple[Tensor, Tensor]  # images, labels


@cache
def by_fcil(**settings: Any) -> tuple[Numbers, list[Data], Numbers, dict[int, Tensor]]:
    """The first weights, the data of each task, the last weights, and the exemplars kept in the end."""
    parts = assemble(plan("podnet", ALONE, settings={**PROTOCOL, **TERMS, **settings}), "cpu", workers=1)
    first = {n: t.clone() for n, t in parts.server.state.weights.items()}
    data = []
    for task in parts.scenario.tasks:
        parts.scenario.begin(task)
        data.append(parts.scenario.local(0, task))
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        pass
    kept = {j: codes.view(-1, 1, 8, 8) for j, codes in parts.transport.memories[0].exemplars.items()}
    return first, [(d.images, d.labels) for d in data], parts.server.state.weights, kept


# -- the reference ----------------------------------------------------------------------------------------------------


def raw_maps(w: Numbers, images: Tensor, training: bool) -> list[Tensor]:
    """Three times convolution and batch norm, with a ReLU between: what each stage has before it."""
    x, maps = (images / 255 - 0.5) / 0.5, []
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
        x = x * w[f"{norm}.weight"].view(-1, 1, 1) + w[f"{norm}.bias"].view(-1, 1, 1)
        maps.append(x)
        x = x.clamp_min(0)
    return maps


def unit(rows: Tensor) -> Tensor:
    return rows / (rows**2).sum(-1, keepdim=True).sqrt()


def features(w: Numbers, images: Tensor) -> Tensor:
    with torch.no_grad():
        return raw_maps(w, images, False)[-1].mean((2, 3))


def similarities(features: Tensor, proxies: Tensor, similarity: str) -> Tensor:
    """One score a class, from the proxies of each class in turn."""
    columns = []
    for own in proxies:
        f, p = unit(features)[:, None], unit(own)
        near = -((f - p) ** 2).sum(2) if similarity == "distance" else (f * p).sum(2)
        weight = near.exp() / near.exp().sum(1, keepdim=True)
        columns.append((weight * near).sum(1))
    return torch.stack(columns, 1)


def classification(s: Tensor, y: Tensor, eta: Tensor, terms: dict[str, Any]) -> Tensor:
    each = []
    for row, label in zip(s, y.tolist(), strict=True):
        others = torch.cat([row[:label], row[label + 1 :]])
        if terms["nca"] != "code":
            far = (eta if terms["nca"] == "printed" else eta.item()) * terms["margin"]
            value = -(eta * row[label]) + far + (eta * others).exp().sum().log()
            each.append(value.clamp_min(0))
        else:
            top = row.max()
            each.append(-eta * (row[label] - top) + (1 + (eta * (others - top)).exp().sum()).log())
    return torch.stack(each).mean()


def spatial(one: list[Tensor], other: list[Tensor]) -> Tensor:
    stages = []
    for a, b in zip(one, other, strict=True):
        pooled = [torch.cat([(m**2).sum(3).flatten(1), (m**2).sum(2).flatten(1)], 1) for m in (a, b)]
        gap = ((unit(pooled[0]) - unit(pooled[1])) ** 2).sum(1)
        stages.append(torch.where(gap > 0, gap.clamp_min(1e-300).sqrt(), 0.0).mean())
    return sum(stages) / len(stages)  # type: ignore[return-value]


def flat(one: Tensor, other: Tensor) -> Tensor:
    return (1 - (unit(one) * unit(other)).sum(1)).mean()


def sgd(w: Numbers, loss: Callable[[Numbers, Tensor, Tensor], Tensor], data: Data, learns: Callable[[str], bool],
        still: int, rate: float, round: int, rounds: int, step: int) -> Numbers:  # fmt: skip
    """One round of `rounds` of local training; the proxies of the first `still` classes stay."""
    images, labels = data
    w = {name: value.detach().clone() for name, value in w.items()}
    learned = {name: value.requires_grad_() for name, value in w.items() if learns(name)}
    drawn = order(len(labels), STEPS * BATCH, torch.Generator().manual_seed(seed_of(0, 0, step))).view(STEPS, BATCH)
    speed: Numbers = {}
    for s, index in enumerate(drawn):
        lr = rate * 0.5 * (1 + math.cos(math.pi * (round + s / STEPS) / rounds))
        value = loss(w, images[index], labels[index])
        gradients = dict(zip(learned, torch.autograd.grad(value, list(learned.values())), strict=True))
        gradients[HEAD][:still] = 0
        norm = sum((g**2).sum() for g in gradients.values()) ** 0.5
        shrink = min(1.0, CLIP / (float(norm) + 1e-6))
        for name, value in learned.items():
            push = shrink * gradients[name] + DECAY * value.detach()
            if name == HEAD:
                push[:still] = 0
            speed[name] = push if name not in speed else MOMENTUM * speed[name] + push
            with torch.no_grad():
                value -= lr * speed[name]
    return {name: value.detach() for name, value in w.items()}


def is_parameter(name: str) -> bool:
    return not name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def herding(rows: Tensor, number: int) -> list[int]:
    rows, chosen = unit(rows), []
    for k in range(1, number + 1):
        total = rows[chosen].sum(0)
        off = [math.inf if i in chosen else float(((rows.mean(0) - (total + rows[i]) / k) ** 2).sum())
               for i in range(len(rows))]  # fmt: skip
        chosen.append(off.index(min(off)))
    return chosen


def imprinted(w: Numbers, data: Data, old: int, proxies: int, step: int) -> Numbers:
    """Put the proxies of two new classes where their features gather."""
    images, labels = data
    found, length = w[HEAD].clone(), (w[HEAD][:old] ** 2).sum(2).sqrt().mean()
    draws = torch.Generator().manual_seed(seed_of(0, 0, step))
    for j in (old, old + 1):
        seed = int(torch.randint(2**31, (), generator=draws))
        rows = unit(features(w, images[labels == j])).numpy()
        start, _ = kmeans_plusplus(rows, proxies, random_state=seed, n_local_trials=1)
        centres = KMeans(proxies, init=start, n_init=1).fit(rows).cluster_centers_
        found[j] = unit(torch.from_numpy(centres)) * length
    return {**w, HEAD: found}


def podnet(first: Numbers, tasks: list[Data], tune: bool = True, imprint: bool = True, freeze: bool = True,
           **changed: Any) -> tuple[Numbers, dict[int, Tensor]]:  # fmt: skip
    terms, w, step, kept = {**TERMS, **changed}, first, 0, dict[int, Tensor]()
    for task, (images, labels) in enumerate(tasks):
        old, seen = 2 * task, 2 * task + 2
        teacher, factor = dict(w), math.sqrt(seen / 2)
        if task:
            step += 1
            w = imprinted(w, (images, labels), old, terms["proxies"], step) if imprint else w

        def scored(v: Numbers, found: Tensor, y: Tensor, seen: int = seen) -> Tensor:
            return classification(similarities(found, v[HEAD][:seen], terms["similarity"]), y, v["scale"], terms)

        def loss(v: Numbers, x: Tensor, y: Tensor, past: Numbers = teacher, factor: float = factor,
                 task: int = task, scored: Any = scored) -> Tensor:  # fmt: skip
            maps = raw_maps(v, x, True)
            total = scored(v, maps[-1].mean((2, 3)), y)
            if task:
                with torch.no_grad():
                    before = raw_maps(past, x, False)
                total = total + factor * terms["spatial"] * spatial(maps, before)
                total = total + factor * terms["flat"] * flat(maps[-1].mean((2, 3)), before[-1].mean((2, 3)))
            return total

        pool = (torch.cat([images, *kept.values()]),
                torch.cat([labels, *(torch.full((len(rows),), j) for j, rows in kept.items())]))  # fmt: skip
        for round in range(ROUNDS):
            step += 1
            w = sgd(w, loss, pool, is_parameter, old if freeze else 0, LR, round, ROUNDS, step)
        step += 1  # the clients are asked to remember
        for j in range(old, seen):
            own = images[labels == j]
            kept[j] = own[herding(features(w, own), KEPT[task])]
        kept = {j: rows[: KEPT[task]] for j, rows in kept.items()}
        if task and tune:
            every = (torch.cat(list(kept.values())),
                     torch.cat([torch.full((len(rows),), j) for j, rows in kept.items()]))  # fmt: skip
            rounds = math.ceil(terms["tune_share"] * ROUNDS)
            for round in range(rounds):
                step += 1
                w = sgd(w, lambda v, x, y, scored=scored: scored(v, features(v, x), y), every, lambda n: n == HEAD, 0,
                        TUNE_LR, round, rounds, step)  # fmt: skip
    return w, kept


# -- both, side by side -----------------------------------------------------------------------------------------------


def gap(one: Numbers, other: Numbers) -> float:
    assert one.keys() == other.keys() and all(one[n].dtype == other[n].dtype for n in one)
    return max((one[n] - other[n]).abs().max().item() for n in one)


def test_one_client_is_the_centralised_algorithm() -> None:
    first, tasks, ours, exemplars = by_fcil()
    reference, kept = podnet(first, tasks)
    assert ours[HEAD].dtype == torch.float64 and ours[HEAD].shape == (6, 10, 64)
    assert gap(ours, reference) < 1e-9
    assert gap(ours, first) > 1e-2, "nothing was learned, so nothing was compared"
    assert kept.keys() == exemplars.keys() and all(torch.equal(kept[j], exemplars[j]) for j in kept)


@pytest.mark.parametrize(
    "settings",
    [{"nca": "code"}, {"nca": "printed"}, {"similarity": "cosine"}, {"proxies": 3, "spatial": 1.0, "flat": 0.0},
     {"tune_share": 0.5}],
    ids=lambda settings: "-".join(map(str, next(iter(settings.items())))),
)  # fmt: skip
def test_every_option_is_the_centralised_algorithm_with_that_option(settings: dict[str, Any]) -> None:
    first, tasks, ours, _ = by_fcil(**settings)
    assert gap(ours, podnet(first, tasks, **settings)[0]) < 1e-9
    if "proxies" not in settings:
        assert gap(ours, by_fcil()[2]) > 1e-4


@pytest.mark.parametrize(
    "without",
    [{"spatial": 0.0}, {"flat": 0.0}, {"margin": 0.5}, {"tune": False}, {"imprint": False}, {"freeze": False}],
    ids=lambda without: next(iter(without)),
)
def test_leaving_a_part_out_changes_the_result(without: dict[str, Any]) -> None:
    first, tasks, ours, _ = by_fcil()
    assert gap(ours, podnet(first, tasks, **without)[0]) > 1e-5
