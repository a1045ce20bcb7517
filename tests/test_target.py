"""TARGET: its losses by hand and against known answers, how images are made, and the centralised algorithm."""

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks.losses import cross_entropy
from fcil.blocks.meta_generator import Synthesis, disagreement
from fcil.errors import UserError
from fcil.federation import engine
from fcil.federation.loop import learn
from fcil.method import Batch, Fit
from fcil.methods.target import Client, Config, Given, Model, Server, soft_cross_entropy
from fcil.parts import Parts, assemble
from tests import test_mfcl
from tests import test_reference as plain
from tests.conftest import QUICK, TINY, tiny_plan
from tests.test_every_method import accuracies
from tests.test_losses import ALL, LABELS, LOGITS, NEW, OLD, TEACHER
from tests.test_mfcl import batch_norm, features
from tests.test_reference import BATCH, CLIP, DECAY, LR, MOMENTUM, ROUNDS, STEPS, Numbers

SMALL: dict[str, Any] = {
    "latent": 6, "batches": 4, "batch_made": 8, "generator_steps": 3, "warm_up": 2, "student_steps": 3, "synthetic": 8,
}  # fmt: skip
TAUGHT: dict[str, Any] = {"tasks": 2, "rounds": 8, "steps": 6, "batch_size": 32}  # time enough to learn
FULL: dict[str, Any] = {name: getattr(Config(), name) for name in QUICK["target"]}


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine, "cores", lambda: 1)  # evaluation takes all cores; others are at work here
    with engine.threads(1):
        yield


# -- the client's losses ----------------------------------------------------------------------------------------------


def test_the_losses_are_the_known_ones() -> None:
    assert soft_cross_entropy(LOGITS, TEACHER, OLD, 2.0).item() == pytest.approx(0.815151, abs=1e-6)
    assert cross_entropy(LOGITS[:1], LABELS[:1], NEW).item() == pytest.approx(0.078890, abs=1e-6)


@pytest.mark.parametrize("classes", [OLD, ALL])
def test_the_soft_cross_entropy_is_finite_and_leaves_other_classes_alone(classes: Tensor) -> None:
    logits = (1e3 * LOGITS).requires_grad_()
    value = soft_cross_entropy(logits, 1e3 * TEACHER, classes, 2.0)
    value.backward()
    assert logits.grad is not None and value.isfinite() and logits.grad.isfinite().all()
    assert (logits.grad[:, ~classes] == 0).all() and logits.grad.any()


def test_disagreement_counts_only_where_both_choose_the_same_class() -> None:
    student = torch.tensor([[1.0, 0.0, 9.0], [0.0, 1.0, 9.0]])
    teacher = torch.tensor([[2.0, 0.0, -9.0], [2.0, 0.0, -9.0]])
    p, q = (math.exp(2) / (math.exp(2) + 1), math.e / (math.e + 1))
    by_hand = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    value = disagreement(student, teacher, torch.tensor([True, True, False]))
    assert value.item() == pytest.approx(by_hand / 2, rel=1e-5), "of two images one counts"


@cache
def alone(**settings: Any) -> Client:
    parts = assemble(tiny_plan("target", **{**SMALL, **settings}), "cpu", workers=1)
    torch.manual_seed(1)
    client: Client = parts.engine.client  # type: ignore[assignment]
    for net in client.networks().values():
        for value in net.parameters():
            value.data.add_(0.1 * torch.randn_like(value))
    client.old.eval().requires_grad_(False)
    return client


def loss_of(client: Client, first: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(5)
    real, made = torch.rand(2, 6, 1, 8, 8, generator=draws)
    beside = {"synthetic": Batch(made, torch.zeros(6, dtype=torch.int64), draws)}
    masks = (torch.tensor([j in own for j in range(6)]) for own in ((2, 3), (0, 1)))
    nets = {"net": client.net} if first else client.networks()
    client.net.train()
    return client.loss(nets, Batch(real, torch.tensor([2, 3] * 3), draws, {}, beside), Given(*masks)), real, made


def test_new_classes_learn_among_themselves_and_old_ones_are_distilled_on_made_images() -> None:
    client = alone()
    value, real, made = loss_of(client)
    net, old = client.net.train(), client.old
    new = F.cross_entropy(net(real)[:, 2:4], torch.tensor([0, 1] * 3))
    taught = (old(made)[:, :2] / 2).softmax(1)
    kept = -(taught * (net(made)[:, :2] / 2).log_softmax(1)).sum(1).mean()
    assert value.item() == pytest.approx((new + 25 * kept).item(), rel=1e-5)
    assert loss_of(client, first=True)[0].item() == pytest.approx(new.item(), rel=1e-5)
    assert loss_of(alone(distill=0.0))[0].item() == pytest.approx(new.item(), rel=1e-5)


# -- how images are made ----------------------------------------------------------------------------------------------


@cache
def learned(**settings: Any) -> tuple[Parts, list[Model], list[Fit], list[Any]]:
    """A run of three tasks, its state after each task, its trainings and its ledger."""
    parts = assemble(tiny_plan("target", **settings), "cpu", workers=1)
    states, fits, lines, do = [], [], [], parts.engine.fit

    def fit(wanted: Fit, *rest: Any) -> Any:
        fits.append(wanted)
        return do(wanted, *rest)

    parts.engine.fit = fit  # type: ignore[method-assign, assignment]
    for line in learn(parts.scenario, parts.server, parts.door, parts.engine):
        lines.append(line)
        if line["kind"] == "task":
            states.append(replace(parts.server.state))
    return parts, states, fits, lines


def server_after(task: int, **settings: Any) -> Server:
    """The server as it was when the rounds of a task were over."""
    parts, states, _, _ = learned(**TAUGHT, **FULL)
    server: Server = deepcopy(parts.server)  # type: ignore[assignment]
    server.state, server.config = states[task], replace(server.config, **settings)
    return server


def synthesis(**settings: Any) -> Synthesis:
    return server_after(0, **settings).synthesis(1)


def test_images_are_made_anew_after_each_task_and_sent_in_the_next() -> None:
    _, states, fits, _ = learned(**SMALL)
    assert [tuple(state.images.shape) for state in states] == [(32, 1, 8, 8)] * 3, "old ones are not kept"
    assert states[0].images.dtype == torch.uint8 and not torch.equal(states[0].images, states[1].images)
    third = len(fits) // 3
    assert all(fit.load.keys() == {"net"} and not fit.beside for fit in fits[:third])
    for task in (1, 2):
        for fit in fits[task * third : (task + 1) * third]:
            pool = fit.beside["synthetic"]
            assert torch.equal(pool.images, states[task - 1].images) and pool.batch_size == 8
            assert torch.equal(fit.load["old"]["head.weight"], states[task - 1].weights["head.weight"])


def test_made_images_are_four_to_each_real_one_unless_set() -> None:
    parts = assemble(tiny_plan("target", batch_size=24, synthetic=0), "cpu", workers=1)
    assert parts.engine.client.synthetic == 96  # type: ignore[attr-defined]


def test_the_number_of_batches_is_that_of_all_images_or_the_released_ten() -> None:
    assert (synthesis().recipe.batches, synthesis(released_config=True).recipe.batches) == (32, 10)
    small, own = synthesis().recipe, synthesis(batch_made=7, student_steps=3).recipe
    assert (small.batch_made, small.student_steps, own.batch_made, own.student_steps) == (32, 25, 7, 3)
    c = Config()
    assert c.batches * 256 >= 8000 and c.warm_up < c.batches
    assert (c.distill, c.temperature, c.statistics, c.one_hot, c.adversarial) == (25.0, 2.0, 10.0, 0.5, 1.0)


def test_the_generator_has_the_parameters_of_the_released_one() -> None:
    parts = assemble(tiny_plan("target", **SMALL), "cpu", workers=1)
    setting = replace(parts.setting, shape=(3, 32, 32), network="resnet18", capacity=100)
    assert sum(p.numel() for p in Server(Config(), setting).generator.parameters()) == 2_328_899


def test_in_the_released_configuration_the_student_never_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for released, expected in ((True, 0), (False, 12)):
        made, lessons = synthesis(released_config=released), []
        monkeypatch.setattr(made, "batch", lambda late: torch.zeros(1, 1, 8, 8))
        monkeypatch.setattr(made, "teach", lambda images, progress, lessons=lessons: lessons.append(len(images)))
        made.images()
        assert len(lessons) == expected and lessons == list(range(21, 21 + expected))


@pytest.mark.parametrize("part", ["statistics", "one_hot", "adversarial"])
def test_leaving_out_a_part_changes_what_images_are_scored_by(part: str) -> None:
    images, labels = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1] * 4)
    whole, without = (synthesis(**how).loss(images, labels, late=True)[0].item() for how in ({}, {part: 0.0}))
    assert abs(whole - without) > 1e-4
    early = [synthesis(**how).loss(images, labels, late=False)[0].item() for how in ({}, {part: 0.0})]
    assert (early[0] == early[1]) == (part == "adversarial"), "the student waits for the end of the warm-up"


@pytest.mark.parametrize("augment", ["none", "crop"])
def test_teacher_and_student_see_made_images_as_training_shows_images(augment: str) -> None:
    made, seen = synthesis(student_steps=1, batch_made=8), {"teacher": list[Tensor](), "student": list[Tensor]()}
    made.augment = augment
    for who, shown in seen.items():
        getattr(made, who).register_forward_pre_hook(lambda _, images, shown=shown: shown.append(images[0].detach()))
    images = torch.randint(0, 256, (8, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    made.loss(images / 255, torch.tensor([0, 1] * 4), late=True)
    made.teach(images, 0.0)
    for one, other in zip(seen["teacher"], seen["student"], strict=True):
        assert torch.equal(one, other), "the same views"
        assert all((view == images / 255).flatten(1).all(1).any() for view in one) == (augment == "none")
    assert len(seen["teacher"]) == 2


def test_the_best_batch_of_all_steps_is_kept_and_the_generator_learns_from_every_step() -> None:
    made = synthesis(generator_steps=6, batch_made=16)
    scores, shown, do = [], [], made.loss

    def loss(images: Tensor, labels: Tensor, late: bool) -> Any:
        found = do(images, labels, late)
        scores.append(found[0].item() if len(scores) != 2 else -1e9)
        shown.append(images.detach().clone())
        return (found[0] * 1.0 if len(scores) != 3 else found[0] * 0 - 1e9), found[1]

    made.loss = loss  # type: ignore[method-assign]
    before = [p.detach().clone() for p in made.generator.parameters()]
    best = made.batch(late=False)
    assert torch.equal(best, shown[2]) and len(shown) == 6, "the third was made to look best"
    assert all(
        not torch.equal(p, was) for p, was in zip(made.generator.parameters(), before, strict=True) if was.ndim > 1
    )
    assert len(made.past) == 3, "the statistics of the batch are remembered"


@pytest.mark.parametrize("meta", ["fomaml", "reptile"])
def test_a_generator_that_learned_from_batches_begins_better(meta: str) -> None:
    made, first = synthesis(meta=meta, statistics_momentum=0.0), []
    labels, noise = torch.arange(64) % 2, torch.randn(64, 256, generator=torch.Generator().manual_seed(9))
    for _ in range(2):
        with torch.no_grad():
            first.append(made.loss(deepcopy(made.generator)(noise), labels, late=False)[0].item())
        for _ in range(12):
            made.batch(late=False)
    assert first[1] < 0.7 * first[0]


def test_the_student_learns_what_the_teacher_says_of_the_images() -> None:
    made = synthesis(student_steps=30)
    images = torch.cat([(255 * made.batch(late=False)).to(torch.uint8) for _ in range(6)])

    def agreement() -> float:
        both = [net.eval()(images)[:, :2].argmax(1) for net in (made.student, made.teacher)]
        return float((both[0] == both[1]).double().mean())

    before, teacher = [p.detach().clone() for p in made.student.parameters()], deepcopy(made.teacher.state_dict())
    for i in range(3):
        made.teach(images, i / 3)
    assert agreement() > 0.9 and not torch.equal(before[0], next(made.student.parameters()))
    assert all(torch.equal(value, teacher[name]) for name, value in made.teacher.state_dict().items())


def test_the_teacher_takes_what_is_made_for_all_its_classes() -> None:
    server = server_after(1)
    images = server.state.images
    said = server.synthesis(0).teacher.eval()(images)[:, :4].argmax(1)
    assert len(images) == 1024 and (said.bincount(minlength=4) > 50).all()
    shown = server.look()
    assert set(shown) == {0, 1, 2, 3} and all(p.shape == (1, 8, 8) for p in shown.values())


def test_old_classes_are_kept_that_fine_tuning_forgets() -> None:
    parts = assemble(tiny_plan("finetune", **TAUGHT), "cpu", workers=1)
    without = accuracies(list(learn(parts.scenario, parts.server, parts.door, parts.engine)))[-1]
    with_it = accuracies(learned(**TAUGHT, **FULL)[3])[-1]
    assert with_it[0] > without[0] + 30 and with_it[1] > 60


def test_networks_without_statistics_are_refused_unless_one_does_without() -> None:
    with pytest.raises(UserError, match="target makes images from the statistics .* norm=group .* statistics=0"):
        assemble(tiny_plan("target", norm="group"), "cpu")
    parts = assemble(tiny_plan("target", norm="group", statistics=0.0, tasks=2, rounds=1, **SMALL), "cpu", workers=1)
    assert len(accuracies(list(learn(parts.scenario, parts.server, parts.door, parts.engine)))) == 2


# -- with one client it is a centralised algorithm, written here with nothing of fcil ----------------------------------


@cache
def by_fcil(**settings: Any) -> tuple[plain.Given, Numbers, Numbers, Numbers, list[Tensor]]:
    parts = assemble(
        plain.plan("target", plain.ALONE, settings={**plain.PROTOCOL, **SMALL, **settings}), "cpu", workers=1
    )
    server: Server = parts.server  # type: ignore[assignment]
    first, student, made = (
        {n: t.clone() for n, t in net.state_dict().items()} for net in (server.net, server.student, server.generator)
    )
    data, images = [], []
    for task in parts.scenario.tasks:
        parts.scenario.begin(task)
        data.append(parts.scenario.local(0, task))
    for line in learn(parts.scenario, parts.server, parts.door, parts.engine):
        if line["kind"] == "task":
            images.append(server.state.images)
    given = plain.Given(first, [(d.images, d.labels) for d in data])
    return given, student, made, server.state.weights, images


def dreamed(w: Numbers, noise: Tensor) -> Tensor:
    """Noise to 32 maps of 2x2, twice doubled, convolved, normalised; then squeezed into 0..1."""
    w = dict(w)
    x = batch_norm(w, "first", (noise @ w["linear.weight"].T + w["linear.bias"]).view(-1, 32, 2, 2), True)
    for i in range(2):
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        x = F.conv2d(x, w[f"convolutions.{i}.weight"], padding=1)
        x = F.leaky_relu(batch_norm(w, f"norms.{i}", x, True), 0.2)
    return F.conv2d(x, w["last.weight"], w["last.bias"], padding=1).sigmoid()


def logits_of(w: Numbers, x: Tensor, training: bool, met: list[Any] | None = None) -> Tensor:
    return features(w, 2 * x - 1, training, met) @ w["head.weight"].T + w["head.bias"]


def leaves(w: Numbers) -> Numbers:
    return {n: v.detach().clone().requires_grad_(plain.is_parameter(n)) for n, v in w.items()}


def own(w: Numbers) -> list[Tensor]:
    return [v for n, v in w.items() if plain.is_parameter(n)]


def images_of(w: Numbers, student: Numbers, made: Numbers, task: int, reptile: bool) -> Tensor:
    draws, n = torch.Generator().manual_seed(plain.seed_of(0, "synthesis", task)), 2 * task + 2
    student, made, size = leaves(student), leaves(made), SMALL["batch_made"]
    meta = torch.optim.Adam(own(made), SMALL["generator_steps"] * 0.002, betas=(0.5, 0.999))
    sgd = torch.optim.SGD(own(student), 0.2, momentum=0.9, weight_decay=1e-4)
    past: list[Any] = []
    batches: list[Tensor] = []
    for i in range(SMALL["batches"]):
        labels = torch.randint(n, (size,), generator=draws)
        noise = torch.randn(size, SMALL["latent"], generator=draws, requires_grad=True)
        copy = leaves(made)
        adam = torch.optim.Adam([{"params": own(copy)}, {"params": [noise], "lr": 0.01}], 0.002, betas=(0.5, 0.999))
        meta.zero_grad()
        found = []
        for _ in range(SMALL["generator_steps"]):
            met: list[Any] = []
            x = dreamed(copy, noise)
            said = logits_of(w, x, False, met)[:, :n]
            total = 0.5 * F.cross_entropy(said, labels)
            for layer, (mean, var, usual_mean, usual_var) in enumerate(met):
                if past:
                    mean, var = 0.1 * mean + 0.9 * past[layer][0], 0.1 * var + 0.9 * past[layer][1]
                total = total + 10 * ((usual_mean - mean).norm() + (usual_var - var).norm())
            if i >= SMALL["warm_up"]:
                other = logits_of(student, x, False)[:, :n]
                kl = (said.softmax(1) * (said.log_softmax(1) - other.log_softmax(1))).sum(1)
                total = total - (kl * (said.argmax(1) == other.argmax(1))).mean()
            found.append((total.item(), x.detach()))
            adam.zero_grad()
            for p, g in zip(own(copy) + [noise], torch.autograd.grad(total, own(copy) + [noise]), strict=True):
                p.grad = g
            for slow, fast in zip(own(made), own(copy), strict=True):
                slow.grad = fast.grad.clone() if slow.grad is None else slow.grad + fast.grad
            adam.step()
        if reptile:
            for slow, fast in zip(own(made), own(copy), strict=True):
                slow.grad = slow.detach() - fast.detach()
        meta.step()
        now = [(mean.detach(), var.detach()) for mean, var, _, _ in met]
        past = [[0.9 * p + 0.1 * q for p, q in zip(*pair, strict=True)] for pair in zip(past or now, now, strict=True)]
        batches.append((255 * min(found, key=lambda pair: pair[0])[1]).round())
        late = i - SMALL["warm_up"]
        for _ in range(SMALL["student_steps"] if late >= 0 else 0):
            seen = torch.cat(batches)
            x = seen[torch.randint(len(seen), (size,), generator=draws)] / 255
            with torch.no_grad():
                target = (logits_of(w, x, False)[:, :n] / 20).softmax(1)
            says = (logits_of(student, x, True)[:, :n] / 20).log_softmax(1)
            total = 400 * (target * (target.log() - says)).sum(1).mean()
            sgd.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * late / (SMALL["batches"] - SMALL["warm_up"])))
            sgd.zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_(own(student), 10.0)
            sgd.step()
    return torch.cat(batches).to(torch.uint8)


def trained(
    w: Numbers, old: Numbers, data: tuple[Tensor, Tensor], made: Tensor, n: int, at: tuple[int, int]
) -> Numbers:
    w, (images, labels), (round, step) = leaves(w), data, at
    draws = torch.Generator().manual_seed(plain.seed_of(0, 0, step))
    rows = plain.order(len(labels), STEPS * BATCH, draws).view(STEPS, -1)
    beside = plain.order(len(made), STEPS * SMALL["synthetic"], draws).view(STEPS, -1) if n else None
    speed = [torch.zeros_like(p) for p in own(w)]
    for s in range(STEPS):
        x, y = images[rows[s]] / 255, labels[rows[s]]
        total = F.cross_entropy(logits_of(w, x, True)[:, n : n + 2], y - n)
        if beside is not None:
            x = made[beside[s]] / 255
            with torch.no_grad():
                target = (logits_of(old, x, False)[:, :n] / 2).softmax(1)
            total = total - 25 * (target * (logits_of(w, x, True)[:, :n] / 2).log_softmax(1)).sum(1).mean()
        found = torch.autograd.grad(total, own(w))
        shrink = min(1.0, CLIP / (float(sum((g**2).sum() for g in found) ** 0.5) + 1e-6))
        lr = LR * 0.5 * (1 + math.cos(math.pi * (round + s / STEPS) / ROUNDS))
        for i, (p, g) in enumerate(zip(own(w), found, strict=True)):
            speed[i] = MOMENTUM * speed[i] + shrink * g + DECAY * p.detach()
            p.data -= lr * speed[i]
    return {n: v.detach() for n, v in w.items()}


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("meta", ["fomaml", "reptile"])
def test_with_one_client_target_is_the_centralised_algorithm(meta: str) -> None:
    given, student, generator, ours, ours_made = by_fcil(meta=meta)
    w, step, made = given.weights, 0, torch.zeros(0)
    for task, data in enumerate(given.tasks):
        old = dict(w)
        for round in range(ROUNDS):
            step += 1
            w = trained(w, old, data, made, 2 * task, (round, step))
        made = images_of(w, student, generator, task, meta == "reptile")
        assert torch.equal(made, ours_made[task])
    assert plain.gap(ours, w) < 1e-9
    assert plain.gap(ours, given.weights) > 1e-2, "nothing was learned, so nothing was compared"
    assert not torch.equal(ours_made[0], ours_made[1]) and made.double().std() > 10


@pytest.mark.parametrize(("method", "small"), [("mfcl", test_mfcl.SMALL), ("target", SMALL)])
def test_a_client_that_is_behind_learns_the_classes_of_its_own_task_among_themselves(
    method: str, small: dict[str, Any]
) -> None:
    benchmark, caught = replace(TINY, lag=1, active=4), []
    parts = assemble(tiny_plan(method, benchmark, **{**small, "rounds": 1, "steps": 1}), "cpu", workers=1)
    do = parts.engine.fit

    def fit(wanted: Fit, *rest: Any) -> Any:
        caught.append((parts.door.task.index, wanted))
        return do(wanted, *rest)

    parts.engine.fit = fit  # type: ignore[method-assign]
    list(learn(parts.scenario, parts.server, parts.door, parts.engine))
    behind = 0
    for task, wanted in caught:
        if len(wanted.pool):
            own = int(wanted.pool.labels.max()) // 2
            assert wanted.given.new.nonzero()[:, 0].tolist() == [2 * own, 2 * own + 1]
            assert wanted.given.old.nonzero()[:, 0].tolist() == list(range(2 * task))
            behind += own < task
    assert behind
