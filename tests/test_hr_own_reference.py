"""With one client, `hr` is a centralised algorithm: written here once more, with nothing of fcil.

The mathematics below is plain PyTorch in float64: the codec from its fit to its bytes, the encoder, the pull, the
softmax, the distillation, SGD, memory. fcil gives the first weights, the images, the order in which random numbers are
drawn, and where the centroids come to rest. fcil codes in float32; that nothing here lies so near to where rounding
turns that it could matter is checked, too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.federation.loop import learn
from fcil.parts import assemble
from fcil.plan import plan
from fcil.scenario.scenario import Scenario
from tests.conftest import TINY
from tests.test_reference import order, seed_of

TASKS, ROUNDS, STEPS, BATCH = 2, 2, 5, 16  # ten steps a task
LR, MOMENTUM, DECAY, CLIP = 0.1, 0.9, 5e-3, 1.0
LATENT, SIDE, SPACING, IMAGES = 8, 8, 4.0, 23
SIZE, SHRINK, POINTS = 12, 0.3, 100_000  # bytes of a code; of covariances; quantiles that stand for a density
GAINS = [2 ** (0.3 * step) for step in range(-4, 4)]  # of which each image takes the best, by three bits of its code
KEPT = [20, 10]  # codes of each class after each task: 480 bytes hold 40
ALONE = replace(
    TINY, tasks=TASKS, clients=1, active=1, train_limit=IMAGES, test_limit=5,
    memory=480 / (4 * SIDE * SIDE), memory_scope="client",
)  # fmt: skip
TERMS = {"pull": 0.3, "contrast": 0.2, "temperature": 1.5, "calibrate": 0.4, "distill": 2.0, "balance": 0.5}
SETTINGS = {
    "rounds": ROUNDS, "steps": STEPS, "batch_size": BATCH, "momentum": MOMENTUM, "weight_decay": DECAY, "clip": CLIP,
    "lr": LR, "spacing": SPACING, "code_bytes": SIZE, **TERMS,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("in_double")

Numbers = dict[str, Tensor]
ByClass = dict[int, Tensor]


@dataclass
class Outcome:
    """What a run comes to: the codec, and after each task the weights, the client's codes and the codec's error."""

    codec: dict[str, Any] = field(default_factory=dict)
    weights: list[Numbers] = field(default_factory=list)
    codes: list[ByClass] = field(default_factory=list)
    psnr: list[float] = field(default_factory=list)
    margins: tuple[float, float, float] = (0.0, 0.0, 0.0)  # see Margin


@dataclass
class Given:
    """What the reference takes from fcil: the first weights, each task's images and labels, aligned centroids."""

    weights: Numbers
    tasks: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    centroids: list[Tensor] = field(default_factory=list)
    proposed: list[ByClass] = field(default_factory=list)  # by fcil's client, to compare with


@cache
def scenario() -> Scenario:
    return Scenario(ALONE, 0)


@cache
def by_fcil(**settings: Any) -> tuple[Given, Outcome]:
    parts = assemble(plan("hr", ALONE, settings={**SETTINGS, **settings}), "cpu", scenario(), workers=1)
    given, outcome = Given({n: t.clone() for n, t in parts.server.state.weights.items()}), Outcome()
    answer = parts.engine.answer

    def answering(who: int, handler: Callable[..., Any], *rest: Any) -> Any:
        answered = answer(who, handler, *rest)
        if handler.__name__ == "propose":
            given.tasks.append((rest[1].images, rest[1].labels))
            given.proposed.append({j: t / answered.reply.counts[j] for j, t in answered.reply.sums.items()})
        return answered

    parts.engine.answer = answering  # type: ignore[method-assign]
    for line in learn(parts.scenario, parts.server, parts.door, parts.engine):
        if line["kind"] == "task":
            model, memory = parts.server.state, parts.transport.memories.get(0)
            given.centroids.append(model.centroids)
            outcome.codec = model.codec
            outcome.weights.append(model.weights)
            outcome.codes.append(dict(memory.codes) if memory else {})
            outcome.psnr.append(line["measured"]["psnr"])
    return given, outcome


# -- the reference: the codec -----------------------------------------------------------------------------------------


@cache
def book(bits: int) -> tuple[Tensor, float]:
    """The levels of Lloyd and Max for a Laplace density of variance 1, by its quantiles, and the error they leave."""
    p = (np.arange(POINTS) + 0.5) / POINTS
    x = np.sign(p - 0.5) * -np.log(1 - 2 * np.abs(p - 0.5)) / math.sqrt(2)
    u = (2 * np.arange(2**bits) + 1) / 2**bits - 1
    level = np.sign(u) * -np.log(1 - np.abs(u)) * 3 / math.sqrt(2)
    totals = np.concatenate([[0.0], np.cumsum(x)])
    for _ in range(200):
        ends = np.concatenate([[0], np.searchsorted(x, (level[1:] + level[:-1]) / 2), [POINTS]])
        for i in np.flatnonzero(np.diff(ends)):
            level[i] = (totals[ends[i + 1]] - totals[ends[i]]) / (ends[i + 1] - ends[i])
    nearest = np.searchsorted((level[1:] + level[:-1]) / 2, x)
    return torch.from_numpy(level.astype(np.float32)).double(), float(((x - level[nearest]) ** 2).mean())


def cosines() -> Tensor:
    waves = [[math.cos(math.pi * (n + 0.5) * k / SIDE) for n in range(SIDE)] for k in range(SIDE)]
    return torch.tensor(waves) * torch.tensor([1.0] + [2.0] * (SIDE - 1)).div(SIDE).sqrt()[:, None]


def coefficients(images: Tensor) -> dict[str, Tensor]:
    """Cosine coefficients of even and of odd horizontal frequency, which mirroring keeps apart."""
    c = torch.einsum("un,bnm,vm->buv", cosines(), images[:, 0].double(), cosines())
    return {"even": c[:, :, 0::2].flatten(1), "odd": c[:, :, 1::2].flatten(1)}


def fit(images: Tensor, shrink: float = SHRINK) -> dict[str, Any]:
    """The Karhunen-Loeve transform of coefficients in whole numbers, and the bits that each number deserves."""
    spread, bases, means = [], {}, {}
    for half, c in coefficients(images).items():
        whole = c.sign() * (c.abs() + 0.5 + 1e-6).floor()
        means[half] = whole.mean(0) if half == "even" else torch.zeros(c.shape[1])
        covariance = whole.T @ whole / len(whole) - means[half][:, None] * means[half]
        covariance = covariance * (1 - shrink + shrink * torch.eye(len(covariance)))
        own, vectors = torch.linalg.eigh(covariance)
        spread.append(own.clamp_min(0))
        bases[half] = vectors.T
    variance, bits = torch.cat(spread), [0] * SIDE * SIDE
    errors = [1.0] + [book(count)[1] for count in range(1, 9)]
    for _ in range(8 * SIZE - 3):
        gains = [float(v) * (errors[b] - errors[b + 1]) if b < 8 else 0.0 for v, b in zip(variance, bits, strict=True)]
        bits[gains.index(max(gains))] += 1
    kept = torch.tensor(bits) > 0
    rows = dict(zip(bases, kept.split([len(basis) for basis in bases.values()]), strict=True))
    return {
        "mean": {half: mean.float().double() for half, mean in means.items()},
        "basis": {half: bases[half][rows[half]].half().double() for half in bases},
        "bits": [b for b in bits if b],
        "deviation": variance[kept].sqrt().float().double(),
    }


def numbers(codec: dict[str, Any], images: Tensor) -> Tensor:
    halves = [(c - codec["mean"][half]) @ codec["basis"][half].T for half, c in coefficients(images).items()]
    return torch.cat(halves, 1) / codec["deviation"]


class Margin:
    """How near rounding and choosing came to where they would have gone otherwise: levels, gains, pixels."""

    level = gain = pixel = math.inf

    @classmethod
    def begin(cls) -> None:
        cls.level = cls.gain = cls.pixel = math.inf


def levelled(codec: dict[str, Any], x: Tensor) -> Tensor:
    """The gain with which least is lost of each image, and the place of the nearest level of each number."""
    places, lost, near = [], [], []
    for gain in GAINS:
        columns = list(zip((x / gain).T, codec["bits"], strict=True))
        gaps = [(column[:, None] - book(bits)[0]).abs() for column, bits in columns]
        places.append(torch.stack([gap.argmin(1) for gap in gaps], 1))
        least = torch.stack([gap.min(1).values for gap in gaps], 1) * gain * codec["deviation"]
        lost.append((least**2).sum(1))
        near.append(torch.stack([gap.sort(1).values[:, 1] - gap.min(1).values for gap in gaps], 1).min(1).values)
    chosen, images = torch.stack(lost).argmin(0), torch.arange(len(x))
    first, second = torch.stack(lost).sort(0).values[:2]
    Margin.level = min(Margin.level, torch.stack(near)[chosen, images].min().item())
    Margin.gain = min(Margin.gain, (second / first - 1).min().item())
    return torch.cat([chosen[:, None], torch.stack(places)[chosen, images]], 1)


def pictures(codec: dict[str, Any], places: Tensor) -> Tensor:
    """The images of such gains and places, in whole numbers from 0 to 255."""
    columns = zip(places[:, 1:].T, codec["bits"], strict=True)
    x = torch.stack([book(bits)[0][place] for place, bits in columns], 1) * codec["deviation"]
    x = x * torch.tensor(GAINS)[places[:, :1]]
    c, start = torch.zeros(len(x), SIDE, SIDE), 0
    for half, basis in codec["basis"].items():
        own = codec["mean"][half] + x[:, start : start + len(basis)] @ basis
        c[:, :, half == "odd" :: 2] = own.view(len(x), SIDE, -1)
        start += len(basis)
    images = torch.einsum("un,buv,vm->bnm", cosines(), c, cosines())[:, None]
    inside = images[(images > 0) & (images < 255)]
    Margin.pixel = min(Margin.pixel, (inside - inside.floor() - 0.5).abs().min().item())
    return images.round().clamp(0, 255)


def packed(codec: dict[str, Any], places: Tensor) -> Tensor:
    """Codes of bytes: the gain, then numbers of most bits first, of each the lowest bit first."""
    codes = []
    for gain, *row in places.tolist():
        each = list(zip(row, codec["bits"], strict=True))
        bits = [gain >> k & 1 for k in range(3)]
        bits += [place >> k & 1 for most in range(8, 0, -1) for place, b in each if b == most for k in range(b)]
        codes.append([sum(bits[8 * i + k] << k for k in range(8)) for i in range(SIZE)])
    return torch.tensor(codes, dtype=torch.uint8)


# -- the reference: the encoder, what it learns, and how --------------------------------------------------------------


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


def encode(w: Numbers, images: Tensor, training: bool = False) -> Tensor:
    """Three times convolution, batch norm, ReLU; mean over the places; a linear head."""
    x = (images - 0.5) / 0.5
    for layer, stride in enumerate((1, 2, 2)):
        x = F.conv2d(x, w[f"body.layers.{layer}.0.weight"], stride=stride, padding=1)
        x = normed(w, f"body.layers.{layer}.1", x, training).relu()
    return x.mean((2, 3)) @ w["mean.weight"].T + w["mean.bias"]


def length(difference: Tensor) -> Tensor:
    return (difference**2).flatten(1).sum(1)


@dataclass
class Pool:
    """What a task is learned from."""

    images: Tensor
    labels: Tensor
    made: Tensor
    old: int  # classes below are old

    def weights(self, terms: dict[str, float]) -> Tensor:
        """A weight for each image: by its class, one on average, and less if it was made up."""
        counts = torch.stack([(self.labels == j).sum() for j in self.labels]).double()
        by_class = counts ** -terms["balance"]
        return by_class / by_class.mean() * torch.where(self.made, terms.get("made_weight", 1.0), 1.0)


def objective(
    w: Numbers, w_old: Numbers | None, pool: Pool, index: Tensor, p: Tensor, terms: dict[str, float]
) -> Tensor:
    """What draws images to their centroids, and line 20, of old classes."""
    x, labels = pool.images[index] / 255.0, pool.labels[index]
    z = encode(w, x, True)
    seen = sorted(set(pool.labels.tolist()))
    often = torch.stack([(pool.labels == j).sum() for j in seen]) / len(pool.labels)
    prior = terms["calibrate"] * (often * often ** -terms["balance"]).log()  # what comes often weighs less
    scores = prior - torch.stack([length(z - p[j]) for j in seen], 1) / terms["temperature"]
    unlike = scores.exp().sum(1).log() - scores[torch.arange(len(labels)), [seen.index(int(j)) for j in labels]]
    each = terms["pull"] * length(z - p[labels]) + terms["contrast"] * unlike
    if w_old is not None:
        with torch.no_grad():
            taught = encode(w_old, x)
        each = each + terms["distill"] * terms["pull"] * torch.where(labels < pool.old, length(z - taught), 0.0)
    return (pool.weights(terms)[index] * each).mean()


def sgd(
    w: Numbers, w_old: Numbers | None, pool: Pool, p: Tensor, terms: dict[str, float], round: int, step: int
) -> Numbers:
    """One round of local training; batches are drawn as fcil draws them at this step of the run."""
    w = {name: value.detach().clone() for name, value in w.items()}
    fixed = ("running_mean", "running_var", "num_batches_tracked")
    learned = {name: value.requires_grad_() for name, value in w.items() if not name.endswith(fixed)}
    stream = torch.Generator().manual_seed(seed_of(0, 0, step))
    speed: Numbers = {}
    for s, index in enumerate(order(len(pool.labels), STEPS * BATCH, stream).view(STEPS, BATCH)):
        loss = objective(w, w_old, pool, index, p, terms)
        gradients = torch.autograd.grad(loss, list(learned.values()))
        clip = terms.get("clip", CLIP)
        shrink = min(1.0, clip / (float(sum(length(g[None]) for g in gradients)) ** 0.5 + 1e-6))
        lr = LR * 0.5 * (1 + math.cos(math.pi * (round + s / STEPS) / ROUNDS))
        for (name, value), g in zip(learned.items(), gradients, strict=True):
            push = shrink * g + DECAY * value.detach()
            speed[name] = MOMENTUM * speed[name] + push if name in speed else push
            with torch.no_grad():
                value -= lr * speed[name]
    return {name: value.detach() for name, value in w.items()}


def drawn_once(task: int, what: str) -> torch.Generator:
    """The stream of what a client draws once in a task."""
    return torch.Generator().manual_seed(seed_of(seed_of(0, 0, "cache", task), what))


def made_up(codec: dict[str, Any], moments: tuple[Tensor, Tensor], draws: torch.Generator) -> Tensor:
    """As many codes of a class as it had images, drawn number by number."""
    mean, deviation = moments
    return levelled(codec, mean + deviation * torch.randn(IMAGES, len(mean), generator=draws))


def hybrid_replay(
    given: Given, terms: dict[str, float], keeps: bool = True, one_domain: bool = True, shrink: float = SHRINK
) -> Outcome:
    Margin.begin()
    step, codec = 1, fit(given.tasks[0][0], shrink)  # the client is asked for its statistics
    w, kept, moments, outcome = given.weights, dict[int, Tensor](), dict[int, tuple[Tensor, Tensor]](), Outcome(codec)
    for task, ((images, labels), p) in enumerate(zip(given.tasks, given.centroids, strict=True)):
        step += 1  # the client is asked for centroids and moments
        for j in (2 * task, 2 * task + 1):
            x = numbers(codec, images[labels == j])
            moments[j] = x.mean(0), x.std(0, correction=0)
        w_old = w if task and terms["distill"] else None
        passed = pictures(codec, levelled(codec, numbers(codec, images)))
        outcome.psnr.append(10 * math.log10(255**2 / (passed - images).square().mean().item()))
        draws = drawn_once(task, "interleaved")
        if task and not keeps:  # nothing but made-up images: the new ones are made up, too
            for j in (2 * task, 2 * task + 1):
                passed[labels == j] = pictures(codec, made_up(codec, moments[j], draws))
        replayed = [(passed if one_domain else images, labels)]
        for j in range(2 * task):
            places = kept[j] if keeps else made_up(codec, moments[j], draws)
            replayed.append((pictures(codec, places), torch.full((len(places),), j)))
        all_images, all_labels = (torch.cat(both) for both in zip(*replayed, strict=True))
        made = (all_labels < 2 * task) & (not keeps)
        pool = Pool(all_images, all_labels, made, 2 * task)
        for round in range(ROUNDS):
            step += 1
            w = sgd(w, w_old, pool, p, terms, round, step)
        step += 1  # the client is asked to remember
        if keeps:
            shuffle = drawn_once(task, "shuffled")
            for j in (2 * task, 2 * task + 1):
                own = images[labels == j][torch.randperm(int((labels == j).sum()), generator=shuffle)]
                kept[j] = levelled(codec, numbers(codec, own))
            kept = {j: places[: KEPT[task]] for j, places in kept.items()}
        outcome.weights.append(w)
        outcome.codes.append({j: packed(codec, places) for j, places in kept.items()})
    outcome.margins = Margin.level, Margin.gain, Margin.pixel
    return outcome


def energy(points: Tensor) -> Tensor:
    """Eq. 8 over all pairs of points, each counted once."""
    i, j = torch.triu_indices(len(points), len(points), 1)
    r = ((points[i] - points[j]) ** 2).sum(1).sqrt()
    return (4 * ((SPACING / r) ** 12 - (SPACING / r) ** 6)).sum()


# -- both, side by side -----------------------------------------------------------------------------------------------


@cache
def reference(**changes: Any) -> Outcome:
    terms = {**TERMS, **{k: v for k, v in changes.items() if k in (*TERMS, "clip")}}
    how = {k: v for k, v in changes.items() if k not in terms}
    return hybrid_replay(by_fcil()[0], terms, **how)


def gap(one: Numbers, other: Numbers) -> float:
    assert one.keys() == other.keys() and len(one) > 0
    assert all(one[n].dtype == other[n].dtype and one[n].shape == other[n].shape for n in one)
    return max((one[n] - other[n]).abs().max().item() for n in one)


def same(one: ByClass, other: ByClass) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[j], other[j]) for j in one)


def test_one_client_is_the_centralised_algorithm() -> None:
    given, ours = by_fcil()
    theirs = reference()
    assert len(given.tasks) == len(ours.weights) == TASKS
    for task in range(TASKS):
        assert ours.weights[task]["mean.weight"].dtype == torch.float64
        assert gap(ours.weights[task], theirs.weights[task]) < 1e-9
        assert same(ours.codes[task], theirs.codes[task])
        assert [codes.shape for codes in ours.codes[task].values()] == [(KEPT[task], SIZE)] * (2 * task + 2)
        assert ours.psnr[task] == pytest.approx(theirs.psnr[task], abs=1e-4)
    assert gap(ours.weights[-1], given.weights) > 1e-2, "nothing was learned, so nothing was compared"


def test_the_codec_is_the_transform_of_the_first_tasks_images() -> None:
    ours, theirs = by_fcil()[1].codec, reference().codec
    assert ours["bits"].tolist() == theirs["bits"] and sum(theirs["bits"]) == 8 * SIZE - 3 and len(ours["alone"]) == 0
    assert torch.equal(ours["mean"].double(), torch.cat(list(theirs["mean"].values())))
    assert torch.allclose(ours["deviation"].double(), theirs["deviation"], rtol=1e-6)
    for half, basis in theirs["basis"].items():
        assert ours[half].dtype == torch.float16 and (ours[half].double() - basis).abs().max() < 1e-3


@pytest.mark.parametrize("keeps", [True, False])
def test_nothing_is_rounded_on_a_knifes_edge(keeps: bool) -> None:
    """Else float32 and float64, or two machines, might round apart, and a comparison would mean nothing."""
    assert 1e-4 < min(reference(keeps=keeps).margins) <= max(reference(keeps=keeps).margins) < math.inf


@pytest.mark.parametrize(
    ("settings", "terms", "how"),
    [
        ({"exemplars": "none", "made_weight": 0.4, "tied": 0}, {"made_weight": 0.4}, {"keeps": False}),
        ({"one_domain": False}, {}, {"one_domain": False}),
        ({"distill": 0.0}, {"distill": 0.0}, {}),
        ({"balance": 0.0}, {"balance": 0.0}, {}),
        ({"contrast": 0.0}, {"contrast": 0.0}, {}),
        ({"calibrate": 0.0}, {"calibrate": 0.0}, {}),
    ],
    ids=["made up", "two domains", "no teacher", "no balance", "no contrast", "not calibrated"],
)
def test_what_can_be_chosen_is_chosen_alike(
    settings: dict[str, Any], terms: dict[str, float], how: dict[str, Any]
) -> None:
    given, ours = by_fcil(**settings, align_steps=50)
    theirs = hybrid_replay(given, {**TERMS, **terms}, **how)
    assert max(map(gap, ours.weights, theirs.weights)) < 1e-9
    assert all(map(same, ours.codes, theirs.codes))
    assert gap(ours.weights[-1], hybrid_replay(given, TERMS).weights[-1]) > 1e-5, "the choice makes no difference"


@pytest.mark.parametrize(
    "change",
    [
        {"distill": 0.0},
        {"balance": 0.0},
        {"contrast": 0.0},
        {"calibrate": 0.0},
        {"one_domain": False},
        {"shrink": 0.0},
        {"clip": 10.0},
    ],
    ids=str,
)
def test_leaving_a_part_out_changes_the_result(change: dict[str, Any]) -> None:
    assert gap(by_fcil()[1].weights[-1], reference(**change).weights[-1]) > 1e-5


@pytest.mark.parametrize("term", TERMS)
def test_every_number_matters(term: str) -> None:
    assert gap(by_fcil()[1].weights[-1], reference(**{term: 1.01 * TERMS[term]}).weights[-1]) > 1e-7


def test_centroids_are_proposed_as_the_means_of_the_old_encoders_codes() -> None:
    given, ours = by_fcil()
    for task, (images, labels) in enumerate(given.tasks):
        w = ours.weights[task - 1] if task else given.weights
        for j in (2 * task, 2 * task + 1):
            mean = encode(w, images[labels == j] / 255.0).mean(0)
            assert torch.allclose(given.proposed[task][j], mean, rtol=0, atol=1e-9)
        assert len(given.proposed[task]) == 2


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
