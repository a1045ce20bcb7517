"""BiC: its loss against known answers, its correction by hand, what is held out, and the centralised algorithm."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks.correction import corrected, newton_step, slopes
from fcil.blocks.held_out import divided, rows_in_order, to_hold_out, whole
from fcil.federation.loop import learn
from fcil.method import Batch
from fcil.methods.bic import Client, Config, Given, Memory
from fcil.parts import Parts, assemble
from fcil.plan import plan
from fcil.scenario.tasks import LocalData, Task
from tests import test_reference as plain
from tests.conftest import TINY, tiny_plan
from tests.test_losses import LABELS, LOGITS, NEW, OLD, TEACHER
from tests.test_reference import ROUNDS, Numbers, gap

ONES, ZEROS = torch.ones(4), torch.zeros(4)
GIVEN = Given(NEW, OLD, ONES, ZEROS)


class Says(torch.nn.Module):
    """A network that says the same of any images."""

    def __init__(self, rows: Tensor):
        super().__init__()
        self.rows = rows

    def forward(self, images: Tensor) -> Tensor:
        return self.rows


@cache
def setting() -> Any:
    return assemble(tiny_plan("bic"), "cpu").setting


def loss(given: Given, teacher: Tensor | None = TEACHER, logits: Tensor = LOGITS, **knobs: float) -> Tensor:
    nets = {"net": Says(logits)} | ({} if teacher is None else {"old": Says(teacher)})
    batch = Batch(torch.zeros(2, 1), LABELS, torch.Generator())
    return Client(Config(**knobs), setting()).loss(nets, batch, given)


def loss_of(*how: Any, **more: Any) -> float:
    return loss(*how, **more).item()


# -- stage 1 ----------------------------------------------------------------------------------------------------------


def test_stage_one_is_the_known_answer() -> None:
    assert loss_of(GIVEN) == pytest.approx(1.033905, abs=1e-6)
    assert loss_of(GIVEN, teacher=None) == pytest.approx(1.897826, abs=1e-6), "the first task is cross-entropy alone"


def test_with_the_teachers_entropy_stage_one_is_the_papers_soft_cross_entropy() -> None:
    said, taught = LOGITS.clone().requires_grad_(), (TEACHER[:, :2] / 2).softmax(1)
    entropy = -(taught * taught.log()).sum(1).mean()
    soft = -(taught * (said[:, :2] / 2).log_softmax(1)).sum(1).mean()
    paper, ours = (soft + F.cross_entropy(said, LABELS)) / 2, loss(GIVEN, logits=said)
    assert [paper.item(), (ours + entropy / 2).item()] == pytest.approx([1.356488] * 2, abs=1e-6)
    one, other = (torch.autograd.grad(value, said)[0] for value in (paper, ours))
    assert torch.allclose(one, other, atol=1e-6) and one.abs().min() > 1e-3


def test_distillation_has_as_much_weight_as_there_are_old_classes() -> None:
    three = Given(torch.tensor([0, 0, 0, 1]).bool(), torch.tensor([1, 1, 1, 0]).bool(), ONES, ZEROS)
    p, q = (F.log_softmax(said[:, :3] / 2, 1) for said in (TEACHER, LOGITS))
    expected = 0.75 * (p.exp() * (p - q)).sum(1).mean() + 0.25 * F.cross_entropy(LOGITS, LABELS)
    assert loss_of(three) == pytest.approx(expected.item(), abs=1e-6)
    assert loss_of(three, temperature=1.0) != pytest.approx(expected.item(), abs=1e-3)


def test_teacher_and_student_are_corrected() -> None:
    alpha, beta = torch.tensor([1.0, 0.5, 1.0, 1.0]), torch.tensor([0.0, -0.7, 0.0, 0.0])
    ours = loss_of(replace(GIVEN, alpha=alpha, beta=beta))
    by_hand = loss_of(GIVEN, corrected(TEACHER, alpha, beta), corrected(LOGITS, alpha, beta))
    assert ours == pytest.approx(by_hand, abs=1e-6)
    assert ours != pytest.approx(loss_of(GIVEN, TEACHER, corrected(LOGITS, alpha, beta)), abs=1e-3)
    assert ours != pytest.approx(loss_of(GIVEN, corrected(TEACHER, alpha, beta)), abs=1e-3)


# -- stage 2 ----------------------------------------------------------------------------------------------------------


def doubles(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SAID, ASKED = 3 * doubles(40, 6, seed=0), torch.arange(40) % 5
WEIGHT = doubles(40, seed=1).abs()
FRESH, KNOWN = torch.tensor([0, 0, 1, 1, 1, 0]).bool(), torch.tensor([1, 1, 0, 0, 0, 0]).bool()  # class 5 is to come
START = torch.tensor([1.3, -0.4], dtype=torch.float64)
HOLD = torch.tensor([0.01, 0.1], dtype=torch.float64)
BEFORE = torch.tensor([0.8, 1.2, 1, 1, 1, 1], dtype=torch.float64), torch.tensor([0.1, -0.2, 0, 0, 0, 0]).double()


def judged(pair: Tensor) -> Tensor:
    """Cross-entropy of all held-out images, old classes with a correction of their own."""
    old, new = BEFORE[0][:2] * SAID[:, :2] + BEFORE[1][:2], pair[0] * SAID[:, 2:5] + pair[1]
    every = torch.cat([old, new], 1)
    return (WEIGHT * F.cross_entropy(every, ASKED, reduction="none")).sum()


def slopes_at(pair: Tensor, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
    alpha, beta = torch.where(FRESH, pair[0], BEFORE[0]), torch.where(FRESH, pair[1], BEFORE[1])
    return slopes(SAID[rows], ASKED[rows], WEIGHT[rows], FRESH, KNOWN, alpha, beta)


def test_slopes_are_the_derivatives_of_the_loss() -> None:
    gradient, curvature = slopes_at(START)
    assert torch.allclose(gradient, torch.autograd.functional.jacobian(judged, START))
    assert torch.allclose(curvature, torch.autograd.functional.hessian(judged, START))


def test_sums_over_clients_are_the_slopes_of_all_images_together() -> None:
    parts = [slopes_at(START, rows) for rows in (slice(7), slice(7, 8), slice(8, 8), slice(8, None))]
    for one, every in zip(zip(*parts, strict=True), slopes_at(START), strict=True):
        assert torch.allclose(sum(one), every)


@pytest.mark.parametrize("start", [[1.0, 0.0], [3.0, 4.0], [-2.0, -3.0]])
def test_descent_ends_where_the_loss_is_least(start: list[float]) -> None:
    pair = torch.tensor(start, dtype=torch.float64)
    for _ in range(25):
        before, pair = pair, newton_step(pair, *(s / WEIGHT.sum() for s in slopes_at(pair)), HOLD)
        assert torch.dist(before, pair) <= 1 + 1e-12
    least = pair.clone().requires_grad_()
    held = judged(least) / WEIGHT.sum() + (HOLD * (least - torch.tensor([1.0, 0.0])) ** 2).sum() / 2
    assert torch.autograd.grad(held, least)[0].abs().max() < 1e-12


def test_images_that_are_easy_do_not_drive_the_pair_to_infinity() -> None:
    said, labels, new = torch.tensor([[5.0, -5.0], [-5.0, 5.0]]).double(), torch.tensor([0, 1]), ~OLD[1:3]
    pair = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for _ in range(50):
        alpha, beta = torch.where(new, pair[0], 1.0), torch.where(new, pair[1], 0.0)
        pair = newton_step(pair, *slopes(said, labels, torch.ones(2).double(), new, ~new, alpha, beta), HOLD)
    assert pair.isfinite().all() and 1 < pair[0] < 3


# -- what is held out -------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """A run, with the pools of every training and the messages and answers of every judgement."""

    parts: Parts
    stages: list[tuple[int, str]] = field(default_factory=list)
    asked: list[tuple[int, str, int, Any, Any]] = field(default_factory=list)  # task, question, client, message, reply
    trained: list[tuple[int, int, Tensor, Tensor]] = field(default_factory=list)  # task, client, images, labels
    held: list[tuple[int, int, Tensor, Tensor]] = field(default_factory=list)
    pairs: list[tuple[float, float]] = field(default_factory=list)


BENCHMARK = ("lost", "memory", "alpha", "tasks", "active", "clients", "staying")


@cache
def run(**settings: Any) -> Watched:
    benchmark = replace(TINY, **{k: settings.pop(k) for k in BENCHMARK if k in settings})
    how = {"rounds": 2, "steps": 2, "correction_rounds": 4, **settings}
    seen = Watched(assemble(tiny_plan("bic", benchmark, **how), "cpu", workers=1))
    engine = seen.parts.engine
    answer, client = engine.answer, engine.client
    pool: Callable[..., Any] = client.pool  # type: ignore[attr-defined]
    now = [0]

    def answering(who: int, handler: Any, memory: Any, data: Any, message: Any, *rest: Any) -> Any:
        now[0] = who
        answered = answer(who, handler, memory, data, message, *rest)
        seen.asked.append((data.task.index, handler.__name__, who, message, answered.reply))
        return answered

    def pooled(memory: Memory, data: LocalData, codec: Any, held_out: bool) -> Any:
        found = pool(memory, data, codec, held_out=held_out)
        kept = seen.held if held_out else seen.trained
        kept.append((data.task.index, now[0], found.images, found.labels))
        return found

    engine.answer, client.pool = answering, pooled  # type: ignore[method-assign, attr-defined]
    for line in learn(seen.parts.scenario, seen.parts.server, seen.parts.door, engine):
        if line["kind"] == "round":
            seen.stages.append((line["task"], line["stage"]))
        else:
            seen.pairs.append((line["measured"]["alpha"], line["measured"]["beta"]))
    return seen


def rows(images: Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_stage_two_is_rounds_of_its_own_after_the_first_task() -> None:
    stages = run().stages
    assert [stages.count((task, "train")) for task in range(3)] == [2, 2, 2]
    assert [stages.count((task, "correct")) for task in range(3)] == [0, 4, 4]
    assert stages == sorted(stages, key=lambda s: (s[0], s[1] == "correct"))


def test_every_task_gets_a_pair_and_earlier_pairs_stay() -> None:
    seen, state = run(), run().parts.server.state
    assert seen.pairs[0] == (1.0, 0.0) and seen.pairs[1] != (1.0, 0.0) != seen.pairs[2]
    expected = [[pair[i] for pair in seen.pairs for _ in range(2)] for i in range(2)]
    assert state.alpha[:6].tolist() == expected[0] and state.beta[:6].tolist() == expected[1]


def test_the_network_is_frozen_and_the_old_one_not_sent_while_it_is_corrected() -> None:
    for task in (1, 2):
        judged = [(message, reply) for t, name, _, message, reply in run().asked if t == task and name == "judge"]
        first = judged[0][0].weights
        assert all(gap(first, message.weights) == 0 and message.old_weights == {} for message, _ in judged)
        assert all(reply.gradient.shape == (2,) and reply.curvature.shape == (2, 2) for _, reply in judged)
    assert gap(run().parts.server.state.weights, first) == 0


def test_a_test_image_is_scored_with_the_pairs_of_all_tasks() -> None:
    parts = run().parts
    client, message, images = Client(Config(), parts.setting), parts.server.state, torch.rand(3, 1, 8, 8)
    client.old.load_state_dict(message.weights)
    expected = message.alpha * client.old.eval()(images) + message.beta
    said = client.predict(message, images)
    seen = message.new | message.old
    assert torch.allclose(said[:, seen], expected[:, seen]) and (said[:, ~seen] == -math.inf).all()


@pytest.mark.parametrize("memory", [10, 40])
def test_what_is_held_out_is_not_trained_on_and_is_of_old_and_new_classes(memory: int) -> None:
    seen = run(memory=memory)
    assert seen.held and len({(task, who) for task, who, _, _ in seen.held}) == len(seen.held), "computed once a task"
    trained = {(task, who): (images, labels) for task, who, images, labels in seen.trained}
    for task, who, images, labels in seen.held:
        assert {int(j) // 2 for j in labels} >= {task} and min(labels) < 2 * task, "of both sides"
        if (task, who) in trained:
            assert not rows(images) & rows(trained[task, who][0])


@pytest.mark.parametrize(("memory", "old", "each"), [(80, 8, 4), (40, 4, 2), (4, 1, 1)])
def test_a_tenth_of_the_exemplars_is_held_out_and_as_many_of_each_new_class(memory: int, old: int, each: int) -> None:
    seen = run(memory=memory, tasks=2, alpha=0.0)  # images a client may keep, of 4 classes
    assert len(seen.held) == 4
    for _, _, _, labels in seen.held:
        counts = torch.bincount(labels, minlength=4).tolist()
        assert sum(counts[:2]) == old and counts[2:] == [each, each]
    judged = [reply for _, name, _, _, reply in seen.asked if name == "judge"]
    for reply in judged:  # one image of a new class weighs half where there is one image of two old classes
        assert reply.count == old + 2 * each and reply.weight.tolist() == [2 * old, old]


def ever_both(seen: Watched) -> tuple[int, int]:
    """Count images of a client that are held out in any task, and those that were trained on in any task before."""
    held, both = 0, 0
    for task, who, images, labels in seen.held:
        before = [own for t, w, own, _ in seen.trained if w == who and t <= task]
        held += len(images)
        both += len(rows(images) & set().union(*map(rows, before)))
        assert len(rows(images)) == len(labels), "no two images are the same"
    return held, both


@pytest.mark.parametrize("memory", [4, 10, 40])
@pytest.mark.parametrize("more", [{}, {"alpha": 0.3}, {"lost": 0.3}, {"clients": 8, "staying": 0.5}], ids=str)
def test_what_was_trained_on_is_never_held_out_later(memory: int, more: dict[str, float]) -> None:
    held, both = ever_both(run(memory=memory, tasks=5, active=4, **more))
    assert held > 30 and both == 0


def test_of_old_classes_those_are_held_out_that_were_held_out_before() -> None:
    seen = run(memory=40, tasks=5, active=4)
    for task, who, images, labels in seen.held:
        if task > 1:
            (before,) = (own for t, w, own, _ in seen.held if (t, w) == (task - 1, who))
            assert rows(images[labels < 2 * task - 2]) < rows(before) and (labels < 2 * task).any()


def test_a_memory_of_few_places_gives_them_to_all_old_classes_alike() -> None:
    """A place for two to eight old classes: as tasks come, each has it as often, at one client or another."""
    seen = run(memory=4, tasks=5, active=4, clients=20, alpha=0.0)
    last = torch.cat([labels[labels < 8] for task, _, _, labels in seen.held if task == 4])
    assert len(last) == 20 and len(set(last.tolist())) >= 6


def test_an_image_may_pass_to_what_is_trained_on_and_classes_give_as_many_as_they_can() -> None:
    lists = {j: torch.arange(6 * j, 6 * j + 6)[:, None] for j in range(4)}
    held, kept = divided(lists, {0: 3, 1: 1, 2: 0, 3: 6}, 0.25)
    assert {j: len(own) for j, own in held.items()} in ({0: 3, 1: 1, 3: 2}, {0: 2, 1: 1, 3: 3})
    assert all(torch.equal(whole(held, kept)[j], own) for j, own in lists.items())
    assert divided(lists, {0: 1, 1: 1, 2: 1, 3: 0}, 1 / 24)[0].keys() < {0, 1, 2}
    every, none = divided(lists, dict.fromkeys(lists, 6), 1.0)
    assert none == {} and every.keys() == lists.keys() and divided({}, {}, 0.5) == ({}, {})


def test_images_at_hand_are_held_out_as_those_kept() -> None:
    labels = torch.tensor([2] * 5 + [3] * 9 + [1] * 4 + [0])
    data = LocalData(Task(1, ((0, 1), (2, 3))), torch.zeros(19, 1), labels)
    assert to_hold_out({}, data, {2: 30, 3: 10}, 0.1) == {2: 2, 3: 2, 1: 1, 0: 0}, "a tenth, and one of older classes"
    assert to_hold_out({0: 1, 1: 3, 7: 4}, data, {}, 0.1) == {2: 3, 3: 3, 1: 3, 0: 0}, "as many as of a kept one"
    assert to_hold_out({1: 0, 7: 0}, data, {}, 0.1) == {2: 1, 3: 1, 1: 0, 0: 0}
    assert to_hold_out({}, data, {}, 0.1) == {2: 1, 3: 1, 1: 1, 0: 0}


def test_images_have_the_same_order_in_every_task() -> None:
    images, labels = torch.arange(12)[:, None], torch.arange(12) % 2
    one, other = (rows_in_order(LocalData(Task(t, ((0, 1),)), images, labels, cache_seed=t)) for t in (0, 1))
    assert all(torch.equal(own, other[j]) and (labels[own] == j).all() for j, own in one.items())
    assert one[0].sort().values.tolist() == [0, 2, 4, 6, 8, 10] != one[0].tolist()
    others = rows_in_order(LocalData(Task(0, ((0, 1),)), images, labels, own_seed=1))
    assert not torch.equal(one[0], others[0]), "another client, or another run"


def test_a_client_whose_class_has_one_image_trains_on_it() -> None:
    images, labels = torch.randint(0, 255, (4, 1, 8, 8), dtype=torch.uint8), torch.tensor([0, 1, 1, 1])
    client, data = Client(Config(), setting()), LocalData(run().parts.scenario.tasks[0], images, labels)
    pools = {held: client.pool(Memory(), data, {}, held_out=held) for held in (False, True)}
    assert sorted(pools[False].labels.tolist()) == [0, 1, 1] and pools[True].labels.tolist() == [1]


def test_without_held_out_images_of_both_sides_nothing_is_corrected() -> None:
    assert run(memory=0, tasks=2).pairs == [(1.0, 0.0), (1.0, 0.0)]
    assert run(lost=1.0, tasks=2).pairs == [(1.0, 0.0), (1.0, 0.0)]


def test_exemplars_may_be_codes() -> None:
    seen = run(exemplar_codec="klt:8", tasks=2)
    raw = seen.parts.scenario.dataset.train_images.flatten(1).float()
    for _, _, images, _ in seen.held + seen.trained:
        assert torch.cdist(images.flatten(1).float(), raw).min(1).values.mean() > 0.5


# -- with one client it is the centralised algorithm, written here with nothing of fcil -------------------------------

TERMS = {"temperature": 2.0, "validation": 0.2, "hold_alpha": 0.01, "hold_beta": 0.1}
NEWTON = 25


def by_fcil(**terms: float) -> tuple[plain.Given, Any]:
    settings = {**plain.PROTOCOL, **terms, "correction_rounds": NEWTON}
    parts = assemble(plan("bic", plain.ALONE, settings=settings), "cpu")
    first, data = {n: t.clone() for n, t in parts.server.state.weights.items()}, []
    for task in parts.scenario.tasks:
        parts.scenario.begin(task)
        data.append(parts.scenario.local(0, task))
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        pass
    return plain.Given(first, [(d.images, d.labels) for d in data]), parts.server.state


def stage_one(w_old: Numbers | None, pairs: list[tuple[float, float]], task: int, terms: dict[str, float]) -> Any:
    alpha, beta = (torch.tensor([pair[i] for pair in pairs for _ in range(2)] + [1.0 - i] * 2) for i in range(2))
    seen, old = 2 * task + 2, 2 * task

    def loss(v: Numbers, x: Tensor, y: Tensor) -> Tensor:
        said = plain.scores(v, x, True)[:, :seen] * alpha + beta
        learned = plain.likelihood(said, y, list(range(seen)))
        if w_old is None:
            return learned
        with torch.no_grad():
            taught = (plain.scores(w_old, x, False)[:, :seen] * alpha + beta)[:, :old]
        target = (taught / terms["temperature"]).softmax(1)
        kept = -(target * (said[:, :old] / terms["temperature"]).log_softmax(1)).sum(1).mean()
        return old / seen * kept + (1 - old / seen) * learned

    return loss


def stage_two(
    w: Numbers, pairs: list[tuple[float, float]], x: Tensor, y: Tensor, terms: dict[str, float]
) -> tuple[float, float]:
    alpha, beta = (torch.tensor([pair[i] for pair in pairs for _ in range(2)]) for i in range(2))
    said, old = plain.scores(w, x, False), 2 * len(pairs)

    def loss(pair: Tensor) -> Tensor:
        every = torch.cat([said[:, :old] * alpha + beta, pair[0] * said[:, old : old + 2] + pair[1]], 1)
        held = terms["hold_alpha"] * (pair[0] - 1) ** 2 / 2 + terms["hold_beta"] * pair[1] ** 2 / 2
        return plain.likelihood(every, y, list(range(old + 2))) + held

    pair = torch.tensor([1.0, 0.0])
    for _ in range(200):
        slope, curve = torch.autograd.functional.jacobian(loss, pair), torch.autograd.functional.hessian(loss, pair)
        step, size = torch.linalg.solve(curve, slope), 1.0
        while loss(pair - size * step) > loss(pair) and size > 1e-6:
            size /= 2
        pair = pair - size * step
        if step.norm() < 1e-13:
            break
    return pair[0].item(), pair[1].item()


def reference(given: plain.Given, terms: dict[str, float]) -> tuple[Numbers, list[tuple[float, float]]]:
    w, step, kept, pairs = given.weights, 0, dict[int, Tensor](), list[tuple[float, float]]()
    for task, (images, labels) in enumerate(given.tasks):
        new = {}
        for j in (2 * task, 2 * task + 1):
            own, its = images[labels == j], plain.seed_of(plain.seed_of(0, 0, "own"), "held out", j)
            new[j] = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(its))]
        quota = 60 // (2 * task + 2)
        every, first = {**new, **kept}, round(terms["validation"] * 60 / max(2, 2 * task))  # of an old class
        train = torch.cat([own[first:] for own in every.values()])
        their = torch.cat([torch.full((len(own) - first,), j) for j, own in every.items()])
        w_old = dict(w) if task else None
        for round_ in range(ROUNDS):
            step += 1
            w = plain.sgd(w, stage_one(w_old, pairs, task, terms), train, their, round_, step)
        held = torch.cat([own[:first] for own in every.values()])
        labels_held = torch.cat([torch.full((first,), j) for j in every])
        pairs.append(stage_two(w, pairs, held, labels_held, terms) if task else (1.0, 0.0))
        step += (NEWTON if task else 0) + 1  # the client is asked to judge, and to remember
        kept = {j: own[:quota] for j, own in sorted(every.items())}
    return w, pairs


@cache
def both() -> tuple[plain.Given, Any, Numbers, list[tuple[float, float]]]:
    given, ours = by_fcil(**TERMS)
    return given, ours, *reference(given, TERMS)


def pairs_of(state: Any) -> Tensor:
    return torch.stack([state.alpha, state.beta], 1)[:6:2]


@pytest.mark.usefixtures("in_double")
def test_one_client_is_the_centralised_algorithm() -> None:
    given, ours, weights, pairs = both()
    assert torch.allclose(pairs_of(ours), torch.tensor(pairs), rtol=0, atol=1e-9)
    assert (torch.tensor(pairs[1:]) - torch.tensor([1.0, 0.0])).abs().min() > 1e-3, "there was something to correct"
    assert gap(ours.weights, weights) < 1e-9 < 1e-2 < gap(ours.weights, given.weights)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("term", ["temperature", "hold_alpha", "hold_beta"])
def test_every_number_matters(term: str) -> None:
    given, ours, _, _ = both()
    terms = {**TERMS, term: 0.5 * TERMS[term]}
    weights, pairs = reference(given, terms)
    assert gap(ours.weights, weights) > 1e-7
    assert torch.dist(pairs_of(by_fcil(**terms)[1]), torch.tensor(pairs)) < 1e-8
