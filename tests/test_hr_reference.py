"""With one client, Hybrid Replay is a centralised algorithm: written here once more, with nothing of fcil.

The mathematics below is plain PyTorch in float64: autoencoder, Eq. 7, both distillations, SGD, decoding to bytes,
re-encoding, memory. fcil gives the first weights, the images, the order in which random numbers are drawn, and where
the centroids come to rest; that they rest there is checked against the energy itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
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

TASKS, ROUNDS, STEPS, BATCH = 3, 2, 2, 16  # twelve steps
LR, MOMENTUM, DECAY, CLIP = 0.1, 0.9, 5e-3, 1.0
LATENT, PIXELS, SPACING = 6, 64, 4.0
KEPT = [30, 15, 10]  # codes of each class after each task: 1440 bytes hold 60 of six floats
ALONE = replace(
    TINY, clients=1, active=1, train_limit=30, test_limit=5, memory=1440 / (6 * PIXELS), memory_scope="client"
)
TERMS = {"kl": 0.7, "pull": 3.0, "distill_codes": 2.0, "distill_images": 1.5}
SETTINGS = {
    "rounds": ROUNDS, "steps": STEPS, "batch_size": BATCH, "momentum": MOMENTUM, "weight_decay": DECAY, "clip": CLIP,
    "lr": LR, "code_bits": 32, "spacing": SPACING, **TERMS,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("in_double")

Numbers = dict[str, Tensor]
Codes = dict[int, Tensor]


@dataclass
class Outcome:
    """Weights and the client's codes after each task."""

    weights: list[Numbers]
    codes: list[Codes]


@dataclass
class Given:
    """What the reference takes from fcil: the first weights, each task's images and labels, aligned centroids."""

    weights: Numbers
    tasks: list[tuple[Tensor, Tensor]]
    centroids: list[Tensor]
    proposed: list[Codes]  # by fcil's client, to compare with


@cache
def by_fcil(**settings: Any) -> tuple[Given, Outcome]:
    parts = assemble(plan("hr-literal", ALONE, settings={**SETTINGS, **settings}), "cpu")
    given = Given({n: t.clone() for n, t in parts.server.state.weights.items()}, [], [], [])
    outcome = Outcome([], [])
    answer = parts.engine.answer

    def answering(who: int, handler: Callable[..., Any], *rest: Any) -> Any:
        answered = answer(who, handler, *rest)
        if handler.__name__ == "propose_centroids":
            given.tasks.append((rest[1].images, rest[1].labels))
            given.proposed.append({j: t / answered.reply.counts[j] for j, t in answered.reply.sums.items()})
        return answered

    parts.engine.answer = answering  # type: ignore[method-assign]
    for line in learn(parts.scenario, parts.server, parts.door, parts.engine):
        if line["kind"] == "task":
            model, memory = parts.server.state, parts.transport.memories.get(0)
            given.centroids.append(model.centroids)
            outcome.weights.append(model.weights)
            outcome.codes.append(dict(memory.codes) if memory else {})
    return given, outcome


# -- the reference ----------------------------------------------------------------------------------------------------


def normed(w: Numbers, name: str, x: Tensor, training: bool) -> Tensor:
    """Batch norm; in training it moves the running numbers, too."""
    if training:
        mean, var, n = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), x.numel() / x.shape[1]
        with torch.no_grad():
            w[f"{name}.running_mean"] += 0.1 * (mean - w[f"{name}.running_mean"])
            w[f"{name}.running_var"] += 0.1 * (var * n / (n - 1) - w[f"{name}.running_var"])
            w[f"{name}.num_batches_tracked"] += 1
    else:
        mean, var = w[f"{name}.running_mean"], w[f"{name}.running_var"]
    x = (x - mean.view(-1, 1, 1)) / (var.view(-1, 1, 1) + 1e-5).sqrt()
    return x * w[f"{name}.weight"].view(-1, 1, 1) + w[f"{name}.bias"].view(-1, 1, 1)


def encode(w: Numbers, images: Tensor, training: bool = False) -> tuple[Tensor, Tensor]:
    """Three times convolution, batch norm, ReLU; mean over the places; two linear heads."""
    x = (images - 0.5) / 0.5
    for layer, stride in enumerate((1, 2, 2)):
        x = F.conv2d(x, w[f"encoder.body.layers.{layer}.0.weight"], stride=stride, padding=1)
        x = normed(w, f"encoder.body.layers.{layer}.1", x, training).relu()
    mean, logvar = (
        x.mean((2, 3)) @ w[f"encoder.{head}.weight"].T + w[f"encoder.{head}.bias"] for head in ("mean", "logvar")
    )
    return mean, logvar.clamp(-10, 10)


def decode(w: Numbers, codes: Tensor, training: bool = False) -> Tensor:
    """A linear layer to 2x2 places; three convolutions, each place doubled before the first two; sigmoid."""
    x = (codes @ w["decoder.linear.weight"].T + w["decoder.linear.bias"]).view(len(codes), -1, 2, 2)
    x = normed(w, "decoder.norms.0", x, training)
    for layer in range(3):
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3) if layer < 2 else x
        x = F.conv2d(x, w[f"decoder.convolutions.{layer}.weight"], w[f"decoder.convolutions.{layer}.bias"], padding=1)
        if layer < 2:
            x = normed(w, f"decoder.norms.{layer + 1}", x, training)
            x = torch.where(x > 0, x, 0.2 * x)
    return 1 / (1 + (-x).exp())


def length(difference: Tensor) -> Tensor:
    return (difference**2).flatten(1).sum(1)


def objective(
    w: Numbers, w_old: Numbers | None, x: Tensor, p: Tensor, noise: Tensor, terms: dict[str, float]
) -> Tensor:
    """Eq. 7 and what lines 20 and 21 add, over the numbers of an image."""
    mean, logvar = encode(w, x, True)
    variance = logvar.exp()
    off = variance.sqrt() * noise
    decoded = decode(w, mean + off, True)
    total = length(decoded - x) / 2
    total = total + terms["kl"] * (mean**2 + variance - logvar - 1).sum(1) / 2
    total = total + terms["pull"] * (length(mean - p) + variance.sum(1))
    if w_old is not None:
        with torch.no_grad():
            taught = encode(w_old, x)[0]
            shown = decode(w_old, taught + off)
        total = total + terms["distill_codes"] * length(taught - mean)
        total = total + terms["distill_images"] * length(shown - decoded)
    return total.mean() / PIXELS


def sgd(w: Numbers, w_old: Numbers | None, pool: tuple[Tensor, Tensor], p: Tensor, terms: dict[str, float],
        round: int, step: int) -> Numbers:  # fmt: skip
    """One round of local training; batches and noise are drawn as fcil draws them at this step of the run."""
    w = {name: value.detach().clone() for name, value in w.items()}
    fixed = ("running_mean", "running_var", "num_batches_tracked")
    learned = {name: value.requires_grad_() for name, value in w.items() if not name.endswith(fixed)}
    stream, (images, labels) = torch.Generator().manual_seed(seed_of(0, 0, step)), pool
    speed: Numbers = {}
    for s, index in enumerate(order(len(labels), STEPS * BATCH, stream).view(STEPS, BATCH)):
        noise = torch.randn(BATCH, LATENT, generator=stream)
        loss = objective(w, w_old, images[index] / 255.0, p[labels[index]], noise, terms)
        gradients = torch.autograd.grad(loss, list(learned.values()))
        shrink = min(1.0, CLIP / (float(sum(length(g[None]) for g in gradients)) ** 0.5 + 1e-6))
        lr = LR * 0.5 * (1 + math.cos(math.pi * (round + s / STEPS) / ROUNDS))
        for (name, value), g in zip(learned.items(), gradients, strict=True):
            push = shrink * g + DECAY * value.detach()
            speed[name] = MOMENTUM * speed[name] + push if name in speed else push
            with torch.no_grad():
                value -= lr * speed[name]
    return {name: value.detach() for name, value in w.items()}


def as_bytes(images: Tensor) -> Tensor:
    return (images * 255).round()


def drawn_once(task: int, what: str) -> torch.Generator:
    """The stream of what a client draws once in a task."""
    return torch.Generator().manual_seed(seed_of(seed_of(0, 0, "cache", task), what))


def hybrid_replay(given: Given, terms: dict[str, float], reencode: bool = True, keeps: bool = True) -> Outcome:
    w, step, codes, outcome = given.weights, 0, dict[int, Tensor](), Outcome([], [])
    for task, ((images, labels), p) in enumerate(zip(given.tasks, given.centroids, strict=True)):
        step += 1  # the client is asked for centroids
        w_old, codes = w, dict(codes)
        replayed, noise = [(images, labels)], torch.randn(60 * task, LATENT, generator=drawn_once(task, "interleaved"))
        for j in range(2 * task):
            made_up = p[j] + noise[30 * j : 30 * j + 30] * math.sqrt(terms["kl"] / (terms["kl"] + 2 * terms["pull"]))
            z = codes[j].double() + p[j] if keeps else made_up
            replayed.append((as_bytes(decode(w_old, z)), torch.full((len(z),), j)))
        pool = torch.cat([x for x, _ in replayed]), torch.cat([y for _, y in replayed])
        for round in range(ROUNDS):
            step += 1
            w = sgd(w, w_old if task else None, pool, p, terms, round, step)
        step += 1  # the client is asked to remember
        if keeps:
            if reencode:
                codes = {
                    j: (encode(w, as_bytes(decode(w_old, z.double() + p[j])) / 255)[0] - p[j]).float()
                    for j, z in codes.items()
                }
            shuffle = drawn_once(task, "shuffled")
            for j in (2 * task, 2 * task + 1):
                own = images[labels == j][torch.randperm(int((labels == j).sum()), generator=shuffle)]
                codes[j] = (encode(w, own[: KEPT[task]] / 255.0)[0] - p[j]).float()
            codes = {j: z[: KEPT[task]] for j, z in codes.items()}
        outcome.weights.append(w)
        outcome.codes.append(codes)
    return outcome


def energy(points: Tensor) -> Tensor:
    """Eq. 8 over all pairs of points, each counted once."""
    i, j = torch.triu_indices(len(points), len(points), 1)
    r = ((points[i] - points[j]) ** 2).sum(1).sqrt()
    return (4 * ((SPACING / r) ** 12 - (SPACING / r) ** 6)).sum()


# -- both, side by side -----------------------------------------------------------------------------------------------


@cache
def reference(**changes: Any) -> Outcome:
    terms = {**TERMS, **{k: v for k, v in changes.items() if k in TERMS}}
    how = {k: v for k, v in changes.items() if k not in TERMS}
    return hybrid_replay(by_fcil()[0], terms, **how)


def gap(one: Numbers | Codes, other: Numbers | Codes) -> float:
    assert one.keys() == other.keys() and len(one) > 0
    assert all(one[n].dtype == other[n].dtype and one[n].shape == other[n].shape for n in one)
    return max((one[n] - other[n]).abs().max().item() for n in one)


def test_one_client_is_the_centralised_algorithm() -> None:
    given, ours = by_fcil()
    theirs = reference()
    assert len(given.tasks) == len(ours.weights) == TASKS
    for task in range(TASKS):
        assert ours.weights[task]["encoder.mean.weight"].dtype == torch.float64
        assert gap(ours.weights[task], theirs.weights[task]) < 1e-9
        assert gap(ours.codes[task], theirs.codes[task]) < 1e-9
        assert [len(z) for z in ours.codes[task].values()] == [KEPT[task]] * (2 * task + 2)
    assert gap(ours.weights[-1], given.weights) > 1e-2, "nothing was learned, so nothing was compared"


def test_without_exemplars_old_classes_are_made_up_of_noisy_centroids() -> None:
    given, ours = by_fcil(exemplars="none", align_steps=50)
    theirs = hybrid_replay(given, TERMS, keeps=False)
    assert ours.codes == [{}] * TASKS
    assert max(map(gap, ours.weights, theirs.weights)) < 1e-9
    assert gap(ours.weights[-1], hybrid_replay(given, TERMS).weights[-1]) > 1e-4


def test_frozen_codes_are_never_encoded_again() -> None:
    given, ours = by_fcil(memory_update="frozen", align_steps=50)
    theirs = hybrid_replay(given, TERMS, reencode=False)
    assert max(map(gap, ours.weights, theirs.weights)) < 1e-9 and max(map(gap, ours.codes, theirs.codes)) < 1e-9


@pytest.mark.parametrize("change", [*({term: 0.0} for term in TERMS), {"reencode": False}], ids=str)
def test_leaving_a_part_out_changes_the_result(change: dict[str, Any]) -> None:
    _, ours = by_fcil()
    without = reference(**change)
    assert gap(ours.weights[-1], without.weights[-1]) > 1e-5
    assert gap(ours.codes[-1], without.codes[-1]) > 1e-4


@pytest.mark.parametrize("term", ["kl", "distill_codes", "distill_images"])
def test_what_can_be_left_out_is_left_out_alike(term: str) -> None:
    given, ours = by_fcil(**{term: 0.0}, align_steps=50)
    theirs = hybrid_replay(given, {**TERMS, term: 0.0})
    assert gap(ours.weights[-1], theirs.weights[-1]) < 1e-9 and gap(ours.codes[-1], theirs.codes[-1]) < 1e-9


@pytest.mark.parametrize("term", TERMS)
def test_every_number_matters(term: str) -> None:
    assert gap(by_fcil()[1].weights[-1], reference(**{term: 1.01 * TERMS[term]}).weights[-1]) > 1e-7


def test_centroids_are_proposed_as_the_means_of_the_old_encoders_codes() -> None:
    given, ours = by_fcil()
    for task, (images, labels) in enumerate(given.tasks):
        w = ours.weights[task - 1] if task else given.weights
        means = {j: encode(w, images[labels == j] / 255.0)[0].mean(0) for j in (2 * task, 2 * task + 1)}
        assert gap(given.proposed[task], means) < 1e-9


def test_the_first_two_centroids_part_on_their_line_until_they_rest() -> None:
    given, _ = by_fcil()
    jitter = torch.randn(2, LATENT, generator=torch.Generator().manual_seed(seed_of("jitter", 0)))
    start = torch.stack([given.proposed[0][j] for j in (0, 1)]) + 1e-3 * SPACING * jitter
    middle, apart = start.mean(0), start[0] - start[1]
    half = apart / apart.norm() * 2 ** (1 / 6) * SPACING / 2
    assert gap({0: given.centroids[0][0], 1: given.centroids[0][1]}, {0: middle + half, 1: middle - half}) < 1e-5


@pytest.mark.parametrize("task", range(TASKS))
def test_new_centroids_rest_where_the_energy_has_no_slope(task: int) -> None:
    given, _ = by_fcil()
    seen, new = given.centroids[task][: 2 * task + 2], slice(2 * task, None)
    points = seen.clone().requires_grad_()
    (slope,) = torch.autograd.grad(energy(points), points)
    assert slope[new].norm(dim=1).max() * SPACING < 1e-4
    for direction in torch.randn(20, 2, LATENT, generator=torch.Generator().manual_seed(task)):
        moved = seen.clone()
        moved[new] += 0.05 * direction / direction.norm()
        assert energy(moved) > energy(seen) - 1e-9, "it is a minimum, or as good as one"
    if task:
        assert torch.equal(seen[: 2 * task], given.centroids[task - 1][: 2 * task])
        start = torch.cat([seen[: 2 * task], torch.stack(list(given.proposed[task].values()))])
        assert energy(seen) < energy(start)
