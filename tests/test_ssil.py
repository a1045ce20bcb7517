"""SS-IL: its losses by hand and against known answers, its batches, its memory, and the centralised algorithm."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.federation.loop import learn
from fcil.method import Batch, Fit
from fcil.methods.ssil import Client, Config, Model, log_softmax_by_task, separated_cross_entropy, taskwise_distillation
from fcil.parts import Parts, assemble
from tests import test_reference as plain
from tests.conftest import TINY, tiny_plan
from tests.test_losses import LABELS, LOGITS, TEACHER
from tests.test_reference import BATCH, CLIP, DECAY, LR, MOMENTUM, ROUNDS, STEPS, Given, Numbers, gap, order, seed_of

CAME = torch.tensor([0, 0, 1, 1])  # sample 0 is of a new class, sample 1 of an old one
LATER = torch.tensor([0, 1, 1, 0, 2, -1])  # tasks need not be neighbours, and one class has not come


# -- the losses -------------------------------------------------------------------------------------------------------


def test_the_separated_cross_entropy_is_the_known_one() -> None:
    assert separated_cross_entropy(LOGITS, LABELS, CAME).item() == pytest.approx(0.771086, abs=1e-6)


def test_distillation_of_one_old_task_is_the_known_one() -> None:
    assert taskwise_distillation(LOGITS, TEACHER, CAME, 2.0).item() == pytest.approx(0.679935, abs=1e-6)


def six(seed: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax(values: list[float]) -> list[float]:
    return [math.exp(v) / sum(map(math.exp, values)) for v in values]


def test_each_earlier_task_is_distilled_apart_on_every_image() -> None:
    expected = 0.0
    for said, taught in zip(six(0).tolist(), six(1).tolist(), strict=True):
        for task in ([0, 3], [1, 2]):
            p, q = softmax([taught[j] / 3 for j in task]), softmax([said[j] / 3 for j in task])
            expected += 9 / 5 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert taskwise_distillation(six(0), six(1), LATER, 3.0).item() == pytest.approx(expected)
    together = torch.tensor([0, 0, 0, 0, 2, -1])
    assert taskwise_distillation(six(0), six(1), together, 3.0).item() != pytest.approx(expected, rel=1e-2)


def test_a_new_class_competes_with_new_ones_and_an_old_one_with_all_old_ones() -> None:
    said, labels = six(0).requires_grad_(), torch.tensor([4, 0, 1, 2, 3])
    total = separated_cross_entropy(said, labels, LATER)
    among = [[4], *[[0, 1, 2, 3]] * 4]
    rows = zip(said.tolist(), labels.tolist(), among, strict=True)
    expected = [-math.log(softmax([row[j] for j in own])[own.index(label)]) for row, label, own in rows]
    assert total.item() == pytest.approx(sum(expected) / 5)
    total.backward()
    assert (said.grad[1:, 4:] == 0).all() and (said.grad[:1] == 0).all(), "a class alone has nothing to learn"


def test_what_the_other_slice_says_is_no_matter() -> None:
    other = LOGITS.clone()
    other[0, :2] += 50
    other[1, 2:] -= 50
    assert torch.allclose(separated_cross_entropy(other, LABELS, CAME), separated_cross_entropy(LOGITS, LABELS, CAME))
    assert taskwise_distillation(six(0), six(0) + LATER, LATER, 2.0).item() == pytest.approx(0.0, abs=1e-12)


def test_extreme_outputs_give_finite_losses_and_gradients() -> None:
    said = (1e3 * six(0)).requires_grad_()
    total = taskwise_distillation(said, -1e3 * six(1), LATER, 2.0)
    total = total + separated_cross_entropy(said, torch.tensor([4, 0, 1, 2, 3]), LATER)
    total.backward()
    assert total.isfinite() and said.grad.isfinite().all() and (said.grad[:, 5] == 0).all()


def test_probabilities_of_each_task_sum_to_one() -> None:
    p = log_softmax_by_task(six(0), LATER).exp()
    for task in ([0, 3], [1, 2], [4], [5]):
        assert torch.allclose(p[:, task].sum(1), torch.ones(5, dtype=torch.float64))


def test_the_first_task_is_plain_cross_entropy() -> None:
    first = torch.tensor([0, 0, 0, -1])
    expected = F.cross_entropy(LOGITS[:, :3], LABELS)
    assert torch.allclose(separated_cross_entropy(LOGITS, LABELS, first), expected)
    assert taskwise_distillation(LOGITS, TEACHER, first, 2.0).item() == 0


class Says(torch.nn.Module):
    """A network that knows what to say of each image, by its first pixel."""

    def __init__(self, rows: Tensor):
        super().__init__()
        self.rows = rows

    def forward(self, images: Tensor) -> Tensor:
        return self.rows[images[:, 0].long()]


def test_the_whole_loss_is_the_sum_over_new_images_and_exemplars() -> None:
    parts = assemble(tiny_plan("ssil"), "cpu")
    client, generator = Client(Config(), parts.setting), torch.Generator()
    replay = Batch(torch.tensor([[1.0]]), LABELS[1:], generator)
    batch = Batch(torch.tensor([[0.0]]), LABELS[:1], generator, beside={"replay": replay})
    nets = {"net": Says(LOGITS), "old": Says(TEACHER)}
    assert client.loss(nets, batch, CAME).item() == pytest.approx(0.771086 + 0.679935, abs=1e-6)
    assert client.loss({"net": nets["net"]}, batch, CAME).item() == pytest.approx(0.771086, abs=1e-6)
    alone = client.loss(nets, replace(batch, beside={}), CAME)
    first = taskwise_distillation(LOGITS[:1], TEACHER[:1], CAME, 2.0)
    assert alone.item() == pytest.approx(0.078890 + first.item(), abs=1e-6)


# -- what is trained on, and what is kept -----------------------------------------------------------------------------


def fits_of(**settings: Any) -> tuple[Parts, list[tuple[int, Fit, Any]]]:
    """Run the method; return each Fit with its task, and what the client then had in its memory."""
    benchmark = settings.pop("benchmark", TINY)
    parts, caught = assemble(tiny_plan("ssil", benchmark, rounds=2, steps=2, **settings), "cpu", workers=1), []
    answer, do = parts.engine.answer, parts.engine.fit
    memory: list[Any] = []

    def answering(who: int, handler: Any, kept: Any, *rest: Any) -> Any:
        memory[:] = [{j: len(own) for j, own in kept.exemplars.items()}]
        return answer(who, handler, kept, *rest)

    def fit(wanted: Fit, *rest: Any) -> Any:
        caught.append((parts.door.cursor.task, wanted, memory[0]))
        return do(wanted, *rest)

    parts.engine.answer, parts.engine.fit = answering, fit  # type: ignore[method-assign, assignment]
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        pass
    return parts, caught


@pytest.mark.parametrize(("ratio", "size"), [(4.0, 4), (2.0, 8), (100.0, 1)])
def test_a_batch_has_a_fixed_share_of_exemplars_however_few_there_are(ratio: float, size: int) -> None:
    _, fits = fits_of(ratio=ratio, benchmark=replace(TINY, tasks=2, memory=2))  # two exemplars a client
    later = [(fit, kept) for task, fit, kept in fits if task]
    assert later and all(len(fit.beside["replay"]) == 0 for task, fit, _ in fits if task == 0)
    for fit, kept in later:
        replay = fit.beside["replay"]
        assert replay.batch_size == size and fit.pool.batch_size == 0, "new images fill the protocol's batch"
        assert len(replay) == sum(kept.values()) == 2 and set(replay.labels.tolist()) == set(kept)
        assert fit.load.keys() == {"net", "old"} and fit.trains == ("net",)


def test_the_teacher_is_the_model_of_the_last_task() -> None:
    _, fits = fits_of()
    first = {task: next(fit for t, fit, _ in fits if t == task) for task in (1, 2)}
    for fit in first.values():
        assert gap(fit.load["old"], fit.load["net"]) == 0, "as a task begins, both are the same"
    assert gap(first[1].load["old"], first[2].load["old"]) > 0
    last = [fit for task, fit, _ in fits if task == 1][-1]
    assert gap(last.load["old"], first[1].load["old"]) == 0 < gap(last.load["net"], last.load["old"])


def test_exemplars_are_images_of_the_client_drawn_at_random() -> None:
    benchmark = replace(TINY, clients=1, active=1, tasks=2, train_limit=40, memory=5)
    parts, _ = fits_of(benchmark=benchmark)
    kept = parts.transport.memories[0].exemplars
    assert {j: len(own) for j, own in kept.items()} == {0: 5, 1: 5, 2: 5, 3: 5}
    parts.scenario.begin(parts.scenario.tasks[1])
    data = parts.scenario.local(0, parts.scenario.tasks[1])
    for j in (2, 3):
        found = [(data.of(j) == image).flatten(1).all(1).nonzero()[0, 0].item() for image in kept[j]]
        assert len(set(found)) == 5 and found != sorted(found) and max(found) >= 10, "not the first ones"


def test_a_client_that_stayed_behind_learns_old_labels_among_old_classes_and_replays_none_of_them() -> None:
    _, fits = fits_of(benchmark=replace(TINY, clients=12, active=6, staying=0.4))
    behind = [(fit, kept) for task, fit, kept in fits if task and set(fit.pool.labels.tolist()) <= {*range(2 * task)}]
    assert behind
    for fit, _ in behind:
        assert not set(fit.pool.labels.tolist()) & set(fit.beside["replay"].labels.tolist())


@pytest.mark.parametrize("codec", ["klt:8", "dct:8"])
def test_exemplars_may_be_codes_and_then_new_images_pass_the_codec(codec: str) -> None:
    parts, fits = fits_of(exemplar_codec=codec, benchmark=replace(TINY, tasks=2))
    size = int(codec.partition(":")[2])
    for memory in parts.transport.memories.values():
        assert all(own.shape[1:] == (size,) and own.dtype == torch.uint8 for own in memory.exemplars.values())
    raw = parts.scenario.dataset.train_images.flatten(1).float()
    for task, fit, _ in fits:
        pools = [fit.pool, fit.beside["replay"]] if task else [fit.pool]
        assert all(torch.cdist(p.images.flatten(1).float(), raw).min(1).values.mean() > 0.5 for p in pools)


def test_the_head_classifies_as_it_is_among_the_classes_seen() -> None:
    parts, _ = fits_of(benchmark=replace(TINY, tasks=1))
    client = Client(Config(), parts.setting)
    images, weights = torch.rand(3, 1, 8, 8), parts.server.state.weights
    message = Model(weights, {}, torch.tensor([0, 0, 1, 1, -1, -1])[: parts.setting.capacity], {})
    client.net.load_state_dict(weights)
    direct = client.net.eval()(images)
    said = client.predict(message, images)
    seen = message.came >= 0
    assert torch.allclose(said[:, seen], direct[:, seen]) and (said[:, ~seen] == -math.inf).all()


# -- with one client it is the centralised algorithm, written here with nothing of fcil -------------------------------

TERMS = {"temperature": 2.0, "ratio": 4.0}


def objective(v: Numbers, w_old: Numbers | None, x: Tensor, y: Tensor, task: int, temperature: float) -> Tensor:
    said, new = plain.scores(v, x, True), plain.classes_until(task)[-2:]
    fresh = y >= 2 * task
    total = plain.likelihood(said[fresh], y[fresh], new) * fresh.sum()
    if w_old is None:
        return total / len(y)
    if not fresh.all():
        total = total + plain.likelihood(said[~fresh], y[~fresh], plain.classes_until(task - 1)) * (~fresh).sum()
    total = total / len(y)
    with torch.no_grad():
        taught = plain.scores(w_old, x, False)
    for earlier in range(task):
        own = [2 * earlier, 2 * earlier + 1]
        p, q = (taught[:, own] / temperature).softmax(1), (said[:, own] / temperature).softmax(1)
        total = total + temperature**2 * (p * (p / q).log()).sum(1).mean()
    return total


def sgd(
    w: Numbers, w_old: Numbers | None, pools: list[tuple[Tensor, Tensor]], task: int, terms: dict[str, float],
    round: int, step: int,
) -> Numbers:  # fmt: skip
    w = {name: value.detach().clone() for name, value in w.items()}
    learned = {name: value.requires_grad_() for name, value in w.items() if plain.is_parameter(name)}
    stream, speed = torch.Generator().manual_seed(seed_of(0, 0, step)), dict[str, Tensor]()
    sizes = [BATCH, int(BATCH / terms["ratio"])]
    drawn = [
        order(len(labels), STEPS * size, stream).view(STEPS, size)
        for (_, labels), size in zip(pools, sizes, strict=False)
    ]
    for s in range(STEPS):
        x = torch.cat([images[rows[s]] for (images, _), rows in zip(pools, drawn, strict=True)])
        y = torch.cat([labels[rows[s]] for (_, labels), rows in zip(pools, drawn, strict=True)])
        loss = objective(w, w_old, x, y, task, terms["temperature"])
        gradients = torch.autograd.grad(loss, list(learned.values()))
        shrink = min(1.0, CLIP / (float(sum((g**2).sum() for g in gradients) ** 0.5) + 1e-6))
        lr = LR * 0.5 * (1 + math.cos(math.pi * (round + s / STEPS) / ROUNDS))
        for (name, value), g in zip(learned.items(), gradients, strict=True):
            push = shrink * g + DECAY * value.detach()
            speed[name] = push if name not in speed else MOMENTUM * speed[name] + push
            with torch.no_grad():
                value -= lr * speed[name]
    return {name: value.detach() for name, value in w.items()}


def separated(given: Given, terms: dict[str, float]) -> Numbers:
    w, step, kept = given.weights, 0, dict[int, Tensor]()
    for task, (images, labels) in enumerate(given.tasks):
        w_old, pools = (w if task else None), [(images, labels)]
        if task:
            pools.append((torch.cat(list(kept.values())), torch.cat([torch.full((len(kept[j]),), j) for j in kept])))
        for round in range(ROUNDS):
            step += 1
            w = sgd(w, w_old, pools, task, terms, round, step)
        step += 1  # the client is asked to remember: 60 images in all
        draws = torch.Generator().manual_seed(seed_of(seed_of(0, 0, "cache", task), "shuffled"))
        for j in (2 * task, 2 * task + 1):
            own = images[labels == j]
            kept[j] = own[torch.randperm(len(own), generator=draws)]
        kept = {j: own[: 60 // len(kept)] for j, own in kept.items()}
    return w


@cache
def both() -> tuple[Given, Numbers, Numbers]:
    given, ours = plain.by_fcil("ssil", **TERMS)
    return given, ours, separated(given, TERMS)


@pytest.mark.usefixtures("in_double")
def test_one_client_is_the_centralised_algorithm() -> None:
    given, ours, reference = both()
    assert len(given.tasks) == plain.TASKS and ours["head.weight"].dtype == torch.float64
    assert gap(ours, reference) < 1e-9 < 1e-2 < gap(ours, given.weights)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("term", [{"temperature": 1.0}, {"ratio": 2.0}])
def test_every_number_matters(term: dict[str, float]) -> None:
    given, ours, _ = both()
    without = separated(given, {**TERMS, **term})
    assert gap(ours, without) > 1e-5
    assert gap(plain.by_fcil("ssil", **{**TERMS, **term})[1], without) < 1e-9
