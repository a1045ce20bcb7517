"""GLFC: its loss, how clients notice a task, what they send, and which old model the proxy server keeps."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks import prototype_gradients
from fcil.blocks.class_pace import compensation
from fcil.blocks.inversion import LeNet, gradients, labels_in
from fcil.blocks.prototype_gradients import Search
from fcil.blocks.training import loaded
from fcil.experiment import run
from fcil.federation.engine import threads
from fcil.federation.loop import Line, learn
from fcil.method import Batch
from fcil.methods.glfc import Client, Config, Given, Memory, Model, Server, State
from fcil.parts import Parts, assemble
from fcil.records import flatten, read_tensors, size_in_bytes
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import LocalData, Task, mask
from tests.conftest import TINY, tiny_plan

LOGITS = torch.tensor([[1.0, 2.0, 3.0, 0.5], [0.2, -1.0, 0.3, 2.0], [0.0, 0.0, 1.0, -1.0]])
LABELS = torch.tensor([2, 1, 3])
TEACHER = torch.tensor([[2.0, 1.0, 7.0, 7.0], [-1.0, 0.5, -7.0, 0.0]])
OLD, ALL, NONE = mask((0, 1), 4), mask((0, 1, 2, 3), 4), mask((), 4)
GENERATOR, PAPER = torch.Generator(), Config()
FAST = Search(steps=3, inner=2, lr=0.1, iterates=2)
QUICK = {"inversion_steps": 30, "inversion_inner": 10}  # enough for images of 8x8


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with threads(1):
        yield


# -- the loss ---------------------------------------------------------------------------------------------------------


def loss(
    count: int, given: Given, teacher: Tensor | None = TEACHER, config: Config = PAPER, logits: Tensor = LOGITS
) -> Tensor:
    nets: dict[str, Callable[[Tensor], Tensor]] = {"net": lambda images: logits[: len(images)]}
    if teacher is not None:
        nets["old"] = lambda images: teacher[: len(images)]
    client = Client(config, tiny_setting())
    return client.loss(nets, Batch(torch.zeros(count, 1, 8, 8), LABELS[:count], GENERATOR), given)


@cache
def tiny_setting() -> Any:
    return assemble(tiny_plan("glfc"), "cpu", tiny_scenario(), workers=1).setting


@cache
def tiny_scenario() -> Scenario:
    return Scenario(TINY, 0)


def test_images_weigh_as_they_are_from_learned_over_their_kind() -> None:
    assert compensation(LOGITS, LABELS, OLD).tolist() == pytest.approx([0.121842, 1.0, 1.878158], abs=1e-6)
    assert compensation(LOGITS[:2], LABELS[:2], OLD).tolist() == pytest.approx([1.0, 1.0])
    assert compensation(LOGITS, LABELS, NONE).tolist() == [1.0, 1.0, 1.0]


def test_a_batch_of_one_kind_or_of_learned_images_has_finite_weights() -> None:
    for learned in (OLD, mask((2, 3), 4), ALL):
        for rows in ([0], [1], [0, 2], [1, 1]):
            weights = compensation(LOGITS[rows], LABELS[rows], learned)
            assert weights.isfinite().all() and float(weights.mean()) == pytest.approx(1.0)
    sure = torch.full((2, 4), 1e4)
    assert compensation(sure, torch.tensor([0, 3]), OLD).isfinite().all()


def test_weights_have_no_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    assert not compensation(logits, LABELS, OLD).requires_grad


def test_the_first_loss_is_the_weighted_cross_entropy_of_every_output() -> None:
    assert loss(3, Given(ALL, NONE, OLD), None).item() == pytest.approx(1.097763, abs=1e-6)
    assert loss(2, Given(ALL, NONE, NONE), None).item() == pytest.approx(1.194442, abs=1e-6)


def test_the_later_loss_adds_what_the_old_model_says() -> None:
    assert loss(2, Given(ALL, OLD, OLD)).item() == pytest.approx(1.021052, abs=1e-6)
    halves = [loss(2, Given(ALL, OLD, OLD), config=Config(compensate=a, distill=b)).item() for a, b in ((1, 0), (0, 1))]
    assert halves == pytest.approx([1.194442, 0.847662], abs=1e-6)  # the second is iCaRL's


def test_every_part_of_the_loss_counts() -> None:
    teacher = torch.cat([TEACHER, torch.tensor([[0.4, -2.0, 1.0, 0.0]])])
    whole = loss(3, Given(ALL, OLD, OLD), teacher).item()
    others = [
        loss(3, Given(ALL, OLD, NONE), teacher),  # without compensation
        loss(3, Given(ALL, OLD, OLD), None),  # without the old model
        loss(3, Given(ALL, ALL, OLD), teacher),  # an old model that knows more
        loss(3, Given(ALL, OLD, OLD), teacher, Config(distill=0.0)),
        loss(3, Given(ALL, OLD, OLD), teacher, Config(compensate=0.0)),
    ]
    assert len({round(value, 5) for value in (whole, *(other.item() for other in others))}) == 6


def test_classes_not_seen_have_no_part_in_the_loss() -> None:
    seen = mask((0, 1, 2), 4)
    moved = LOGITS[:2] + torch.tensor([0.0, 0.0, 0.0, 5.0])
    for teacher in (TEACHER, None):
        one, other = (loss(2, Given(seen, OLD, OLD), teacher, logits=x) for x in (LOGITS, moved))
        assert torch.equal(one, other)


# -- a run, under observation ------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    task: int
    round: int
    client: int
    handler: str
    message: Any
    reply: Any
    before: Memory
    memory: Memory
    data: LocalData


class Watched(NamedTuple):
    parts: Parts
    lines: list[Line]
    asked: list[Asked]
    states: list[State]  # after each round
    memories: list[dict[int, Memory]]  # after each task


@cache
def watched(rounds: int = 3, **settings: Any) -> Watched:
    parts = assemble(tiny_plan("glfc", rounds=rounds, **{**QUICK, **settings}), "cpu", tiny_scenario(), workers=1)
    found = Watched(parts, [], [], [], [])
    answer = parts.engine.answer

    def answering(who: int, handler: Any, memory: Memory, data: LocalData, message: Any, call: Any) -> Any:
        before = Memory(dict(memory.exemplars), memory.entropy.clone())
        answered = answer(who, handler, memory, data, message, call)
        after = Memory(dict(memory.exemplars), memory.entropy.clone())
        found.asked.append(
            Asked(call.task, call.round, who, handler.__name__, message, answered.reply, before, after, data)
        )
        return answered

    parts.engine.answer = answering  # type: ignore[method-assign]
    for line in learn(parts.scenario, parts.server, parts.door, parts.engine):
        found.lines.append(line)
        if line["kind"] == "round":
            found.states.append(State(**vars(parts.server.state)))
        else:
            kept = parts.transport.memories.items()
            found.memories.append({c: Memory(dict(m.exemplars), m.entropy) for c, m in kept})
    return found


def every(of: Watched, handler: str) -> list[Asked]:
    return [asked for asked in of.asked if asked.handler == handler]


def test_in_each_round_every_client_gets_the_model_once() -> None:
    of = watched()
    for task in range(3):
        for round in range(3):
            asked = [a for a in of.asked if (a.task, a.round) == (task, round) and a.handler in ("notice", "train")]
            assert sorted(a.client for a in asked) == [0, 1, 2, 3]
            assert sum(a.handler == "train" for a in asked) == 2
            weights = [flatten(a.message)["weights/head.weight"] for a in asked]
            assert all(torch.equal(weights[0], w) for w in weights)
    small, large = (size_in_bytes(every(of, name)[-1].message) for name in ("notice", "train"))
    assert 2.9 * small < large < 3.1 * small, "only those that train get the two old models"


def test_all_clients_choose_exemplars_when_a_task_ends() -> None:
    of = watched()
    for task in range(3):
        assert [a.client for a in every(of, "remember") if a.task == task] == [0, 1, 2, 3]
    last = of.memories[-1]
    assert set(last) == {0, 1, 2, 3}
    assert all(size_in_bytes(memory) <= of.parts.scenario.budget.per_client for memory in last.values())


# -- noticing a task --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "klt:12"])
def test_the_entropy_is_that_of_a_softmax_over_the_classes_seen(codec: str) -> None:
    """Of what is trained on: with a codec, of images that passed it."""
    of = watched(exemplar_codec=codec)
    client: Any = of.parts.engine.client
    net, differ = of.parts.setting.classifier(), 0
    for asked in every(of, "notice") + every(of, "train"):
        seen, fitted, images = asked.message.seen, asked.message.codec, asked.data.images
        with torch.no_grad():
            shown = client.codec.decode(fitted, client.codec.encode(fitted, images))
            p, raw = (loaded(net, asked.message.weights)(x)[:, seen].softmax(1) for x in (shown, images))
        entropy, of_raw = (-(q * (q + 1e-5).log()).sum(1).mean() for q in (p, raw))
        differ += abs(entropy - of_raw) > 1e-3
        assert asked.memory.entropy.item() == pytest.approx(entropy.item(), rel=1e-4)
        rise = entropy - (asked.before.entropy.item() if len(asked.before.entropy) else 0.0)
        assert asked.reply.signals == int(rise > 1.2 * math.log10(2))
    assert (differ > 10) == (codec != "raw")


def test_clients_notice_tasks_as_they_begin_and_not_in_between() -> None:
    of = watched(rounds=12, steps=6)
    signals = {(a.task, a.round): 0 for a in of.asked}
    for a in every(of, "notice") + every(of, "train"):
        signals[a.task, a.round] += a.reply.signals
    assert signals[0, 0] == 4, "nobody knows anything yet"
    for task in (1, 2):
        assert signals[task, 0] > sum(n for (t, round), n in signals.items() if t == task and round)
    tasks = [line for line in of.lines if line["kind"] == "task"]
    for line in tasks:
        assert line["measured"]["signals"] == sum(n for (task, _), n in signals.items() if task == line["task"])


def test_a_task_of_ten_classes_is_told_by_the_papers_rise() -> None:
    client, message = Client(Config(), replace(tiny_setting(), capacity=12)), every(watched(), "notice")[0].message
    weights = {n: torch.zeros_like(t) for n, t in client.net.state_dict().items()}  # all outputs alike
    data = LocalData(Task(0, (tuple(range(10)),)), torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 2]))
    for last, signal in ((1.09, True), (1.12, False)):  # the entropy is log 10 = 2.30
        memory = Memory({}, torch.tensor([last]))
        assert client.signal(memory, data, replace(message, weights=weights, seen=mask(tuple(range(10)), 12))) is signal
        assert memory.entropy.item() == pytest.approx(math.log(10), abs=2e-4)


def test_without_memory_no_entropy_is_kept_and_without_images_there_is_no_signal() -> None:
    of = watched(memory=0.0)
    assert all(size_in_bytes(a.memory) == 0 for a in of.asked)
    client, asked = Client(Config(), tiny_setting()), every(of, "train")[0]
    data, message = asked.data, asked.message
    empty = replace(data, images=data.images[:0], labels=data.labels[:0], cache={})
    memory = Memory()
    assert not client.signal(memory, empty, message) and len(memory.entropy) == 0


def test_an_oracle_tells_until_prototypes_have_come_and_takes_no_memory() -> None:
    of = watched(task_detect="oracle")
    assert every(of, "notice") == [] and all(len(a.memory.entropy) == 0 for a in of.asked)
    for a in every(of, "train"):
        assert a.reply.signals == (a.round == 0) == bool(a.reply.gradients) == (not a.message.noticed)
    kept = sum(len(e) for m in of.memories[-1].values() for e in m.exemplars.values())
    watching = sum(len(e) for m in watched().memories[-1].values() for e in m.exemplars.values())
    assert kept > watching, "an entropy takes the place of an exemplar where memory is tight"


# -- prototypes -------------------------------------------------------------------------------------------------------


def test_only_clients_that_train_and_noticed_send_gradients_and_of_every_class_at_hand_one() -> None:
    for of in (watched(), watched(task_detect="oracle")):
        net = LeNet((1, 8, 8), of.parts.setting.capacity)
        assert any(a.reply.gradients for a in every(of, "train"))
        for a in every(of, "train"):
            assert bool(a.reply.gradients) == bool(a.reply.signals)
            if rows := list(a.reply.gradients.values()):
                assert sorted(labels_in(net, torch.stack(rows)).tolist()) == a.data.classes()
                assert all(row.numel() == sum(p.numel() for p in net.parameters()) for row in rows)


def test_a_prototype_is_the_image_nearest_to_the_mean_feature() -> None:
    of = watched(perturb_steps=0)
    net, lenet = of.parts.setting.classifier(), LeNet((1, 8, 8), of.parts.setting.capacity)
    for a in [a for a in every(of, "train") if a.reply.gradients]:
        loaded(net, a.reply.weights)
        labels = labels_in(lenet, sent := torch.stack(list(a.reply.gradients.values()))).tolist()
        for row, label in zip(sent, labels, strict=True):
            own = a.data.of(label)
            with torch.no_grad():
                features = F.normalize(net.features(own))
            nearest = min(range(len(own)), key=lambda i: float((features[i] - features.mean(0)).norm()))
            expected = gradients(lenet, (own[nearest : nearest + 1] / 255 - 0.5) / 0.5, torch.tensor([label]))
            assert torch.allclose(row, expected[0], atol=1e-6)


def test_a_prototype_is_perturbed_towards_what_the_local_model_knows() -> None:
    plain, moved = watched(perturb_steps=0), watched()
    first, second = (next(a for a in every(of, "train") if a.reply.gradients) for of in (plain, moved))
    assert all(torch.equal(first.reply.weights[n], w) for n, w in second.reply.weights.items())
    rows, others = ([*a.reply.gradients.values()] for a in (first, second))
    assert not any(torch.equal(row, other) for row, other in zip(rows, others, strict=True))

    images, labels, net = rebuilt_of(plain), rebuilt_of(moved), plain.parts.setting.classifier()
    loaded(net, first.reply.weights)

    def confusion(pictures: dict[int, Tensor]) -> float:
        with torch.no_grad():
            logits = net(torch.stack(list(pictures.values())))[:, :2]
        return float(F.binary_cross_entropy_with_logits(logits, F.one_hot(torch.tensor(list(pictures)), 2).float()))

    assert images.keys() == labels.keys() and confusion(labels) < confusion(images)


def test_a_prototype_takes_the_papers_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    of, taken = watched(), []
    asked, client = next(a for a in every(of, "train") if a.reply.gradients), Client(Config(), of.parts.setting)

    def perturbing(loss: Any, start: Tensor, *how: float) -> Tensor:
        taken.append(how)
        return start

    monkeypatch.setattr(prototype_gradients.inversion, "perturbed", perturbing)
    client.gradients(asked.data, asked.reply.weights, asked.message)
    assert taken == [(50, 0.2, 1e-5)]


def rebuilt_of(of: Watched) -> dict[int, Tensor]:
    """What the server rebuilt of the first client's gradients in the first round."""
    sent = next(a for a in every(of, "train") if a.reply.gradients).reply.gradients
    server: Any = of.parts.server
    c = server.config
    how = Search(c.inversion_steps, c.inversion_inner, c.inversion_lr, c.iterates)
    found, labels = server.proxy.rebuilt(torch.stack(list(sent.values())), c.prototypes, how, 0)
    return dict(zip(labels.tolist(), found, strict=True))


def test_the_server_rebuilds_what_clients_hold() -> None:
    of = watched(perturb_steps=0)
    for task in range(3):
        state = of.states[3 * task]
        held = torch.cat([a.data.images for a in of.asked if a.task == task and a.handler == "train"]).float()
        assert len(state.labels) and set(state.labels.tolist()) <= {2 * task, 2 * task + 1}
        for picture in state.proxies:
            assert (held - picture.float()).abs().amax((1, 2, 3)).min() <= 6, "of 255"


def test_the_proxy_set_has_the_last_iterates_of_each_prototype_and_no_more_prototypes_than_allowed() -> None:
    of = watched(iterates=7, prototypes=3, inversion_steps=40, inversion_inner=1, task_detect="oracle")
    for state in of.states:
        assert len(state.labels) == len(state.proxies) <= 21
        steps = state.proxies.view(7, -1, 1, 8, 8)
        assert not torch.equal(steps[0], steps[-1])
    sent = [row for a in every(of, "train")[:2] for row in a.reply.gradients.values()]
    counts = torch.bincount(of.states[0].labels).tolist()
    assert len(sent) == 4 and sorted(counts) == [7, 14], "of all classes alike"


# -- the choice of an old model ---------------------------------------------------------------------------------------


def chosen(accuracies: list[float], arrivals: set[int], **settings: Any) -> list[tuple[int, int, float]]:
    """Which rounds' models are best_1 and best_2 after each round (-1: none), and the best accuracy."""
    server, found = Server(Config(**settings), tiny_setting()), []
    state = server.state
    proxy: Any = server.proxy
    proxy.rebuilt = lambda sent, most, how, seed: (state.proxies, torch.zeros(1, dtype=torch.int64))
    for round, accuracy in enumerate(accuracies):
        state.weights, state.seen = {"round": torch.tensor(round)}, mask(tuple(range(round)), 10)
        proxy.accuracy = lambda *rest, a=accuracy: a
        sent = [torch.zeros(1)] if round in arrivals else []
        proxy.choose(state, sent, 50, FAST, server.config.reset_best, 0)
        one, two = (int(w["round"]) if w else -1 for w in (state.best_1, state.best_2))
        assert int(state.knows_1.sum()) == max(0, one) and int(state.knows_2.sum()) == max(0, two)
        found.append((one, two, state.accuracy))
    return found


def test_the_best_model_moves_up_when_prototypes_come_and_must_be_beaten_later() -> None:
    accuracies = [0.5, 0.8, 0.7, 0.8, 0.6, 0.7, 0.9]
    assert chosen(accuracies, {0, 4}) == [
        (-1, 0, 0.5), (-1, 1, 0.8), (-1, 1, 0.8), (-1, 3, 0.8), (3, 3, 0.8), (3, 3, 0.8), (3, 6, 0.9),
    ]  # fmt: skip
    assert chosen(accuracies, {0, 4}, reset_best=True)[4:] == [(3, 4, 0.6), (3, 5, 0.7), (3, 6, 0.9)]


def test_without_prototypes_there_is_no_old_model() -> None:
    assert chosen([0.5, 0.9], set()) == [(-1, -1, 0.0)] * 2
    of = watched(entropy_rise=99.0)
    assert all(not a.reply.signals for a in every(of, "train"))
    assert all(not state.best_1 and not state.best_2 for state in of.states)
    assert [line["measured"]["proxy_accuracy"] for line in of.lines if line["kind"] == "task"] == [None] * 3


def test_the_proxy_accuracy_is_that_of_the_averaged_model() -> None:
    of = watched()
    net = of.parts.setting.classifier()
    best, arrived = 0.0, set()
    for state in of.states:
        with torch.no_grad():
            said = loaded(net, state.weights)(state.proxies)[:, state.seen].argmax(1)
        accuracy = float((said == state.labels).float().mean())
        best = max(best, accuracy)
        assert state.accuracy == pytest.approx(best)
        if accuracy >= best:
            assert torch.equal(state.best_2["head.weight"], state.weights["head.weight"])
        arrived.add(state.proxies.data_ptr())
    assert len(arrived) >= 3, "each task brought a proxy set of its own"


def test_a_client_that_noticed_is_taught_by_the_newest_best_model_and_others_by_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of, client = watched(), None
    state = of.states[-1]
    for signal in (True, False):
        asked = next(a for a in every(of, "train") if a.task == 2)
        client = Client(Config(), tiny_setting())
        monkeypatch.setattr(client, "signal", lambda *_, s=signal: s)
        message = Model(
            state.weights, {"of": torch.tensor(1)}, {"of": torch.tensor(2)}, OLD, ALL, state.seen, True, {}
        )  # fmt: skip
        fit = next(client.train(asked.memory, asked.data, message))
        assert fit.load["old"]["of"] == (2 if signal else 1) and fit.given.knows is (ALL if signal else OLD)
        assert fit.given.learned.nonzero()[:, 0].tolist() == sorted(asked.memory.exemplars)
        assert (fit.lr, fit.momentum, fit.weight_decay, fit.trains) == (2.0, 0.0, 1e-5, ("net",))
        none = replace(message, best_1={}, best_2={})  # type: ignore[type-var]
        assert set(next(client.train(asked.memory, asked.data, none)).load) == {"net"}


def test_with_a_codec_new_images_pass_it_too() -> None:
    of = watched(exemplar_codec="klt:12", task_detect="oracle", rounds=1, tasks=2)
    client: Any = of.parts.engine.client
    for asked in (a for a in every(of, "train") if a.task == 1):
        data, fitted = asked.data, asked.message.codec
        pool = next(client.train(asked.before, replace(data, cache={}), asked.message)).pool
        decoded, own = client.codec.decode(fitted, client.codec.encode(fitted, data.images)), len(data.labels)
        assert torch.equal(pool.images[:own], decoded) and not torch.equal(decoded, data.images)
        assert own < len(pool) and torch.equal(pool.labels[:own], data.labels)


# -- what a person sees -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "klt:20"])
def test_rebuilt_prototypes_are_drawn_beside_what_clients_keep(codec: str, tmp_path: Any) -> None:
    settings = {
        **QUICK,
        "tasks": 2,
        "rounds": 2,
        "steps": 3,
        "exemplar_codec": codec,
        "train_limit": 40,
        "test_limit": 5,
    }
    run("glfc", settings=settings, out=tmp_path, device="cpu", workers=1)
    pictures, _ = read_tensors(tmp_path / "replay.safetensors")
    made = {name: picture for name, picture in pictures.items() if "/made/" in name}
    assert (tmp_path / "replay.png").stat().st_size > 500
    assert made.keys() >= {"0/made/0", "1/made/2"} and all(p.shape == (1, 8, 8) for p in made.values())
    assert all(p.dtype == torch.uint8 and p.float().std() > 20 for p in made.values())
    if codec == "raw":
        assert torch.equal(pictures["0/real/0"], pictures["0/kept/0"])
    else:
        assert not torch.equal(pictures["0/real/0"], pictures["0/kept/0"])
    ledger = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert {"signals", "proxy_accuracy"} <= ledger[-1]["measured"].keys()
