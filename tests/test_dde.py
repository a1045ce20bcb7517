"""DDE: neighbours, joint probabilities, direction and total direct effect, each by hand; one client by a reference."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks.causal_effects import joint_cross_entropy, nearest, total_direct_effect
from fcil.federation.calls import Call
from fcil.federation.loop import learn
from fcil.method import Batch, Fit
from fcil.methods.dde import Client, Given, Memory, Model
from fcil.parts import Parts, assemble
from fcil.plan import plan
from fcil.scenario.tasks import LocalData, mask
from tests import test_reference as reference
from tests.conftest import TINY, tiny_plan
from tests.test_every_method import Watching, finished
from tests.test_icarl import LABELS, LOGITS, OLD_LOGITS, means_of, naive

ALL, OLD = mask((0, 1, 2, 3), 4), mask((0, 1), 4)


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- neighbours -------------------------------------------------------------------------------------------------------


def naive_neighbours(features: Tensor, new: list[bool], number: int) -> list[list[int]]:
    unit = features / features.norm(dim=1, keepdim=True)
    found = []
    for i, own in enumerate(unit):
        others = [j for j in range(len(unit)) if new[j] and j != i]
        found.append(sorted(others, key=lambda j, own=own: float((own - unit[j]).norm()))[:number])
    return found


@pytest.mark.parametrize("number", [1, 3, 10])
@pytest.mark.parametrize("news", [2, 5, 12])
def test_neighbours_are_the_nearest_new_images_but_oneself(number: int, news: int) -> None:
    features, new = normals(16, 6), torch.arange(16) % 16 < news
    rows, real = nearest(features, new, number)
    assert rows.shape == real.shape == (16, number)
    found = [row[there].tolist() for row, there in zip(rows, real, strict=True)]
    assert found == naive_neighbours(features, new.tolist(), number)


def test_without_two_new_images_there_are_no_neighbours() -> None:
    for new in (torch.zeros(5, dtype=torch.bool), torch.arange(5) == 2):
        assert not nearest(normals(5, 3), new, 2)[1].any()
    assert nearest(normals(0, 3), torch.zeros(0, dtype=torch.bool), 2)[0].shape == (0, 2)
    rows, real = nearest(normals(2, 3), torch.ones(2, dtype=torch.bool), 4)
    assert rows[:, 0].tolist() == [1, 0] and real.tolist() == [[True, False, False, False]] * 2


# -- the loss ---------------------------------------------------------------------------------------------------------


def test_the_joint_probability_by_hand() -> None:
    near, real = normals(2, 3, 4).softmax(2).float(), torch.tensor([[True, True, False], [True, False, False]])
    own = LOGITS.softmax(1)
    joint = [(own[0, 2] + (near[0, 0, 2] + near[0, 1, 2]) / 2) / 2, (own[1, 1] + near[1, 0, 1]) / 2]
    expected = -sum(p.log() for p in joint) / 2
    assert joint_cross_entropy(LOGITS, LABELS, ALL, near, real).item() == pytest.approx(float(expected), rel=1e-6)


def test_without_neighbours_it_is_cross_entropy() -> None:
    near, none = normals(2, 3, 4).softmax(2).float(), torch.zeros(2, 3, dtype=torch.bool)
    for value in (joint_cross_entropy(LOGITS, LABELS, ALL),
                  joint_cross_entropy(LOGITS, LABELS, ALL, near, none)):  # fmt: skip
        assert value.item() == pytest.approx(1.897826, abs=1e-6)


def test_a_label_that_neither_believes_still_has_a_gradient() -> None:
    logits = torch.tensor([[0.0, 60.0], [0.0, 0.0]]).requires_grad_()
    near, real = torch.tensor([[[0.0, 1.0]], [[0.0, 1.0]]]), torch.tensor([[True], [False]])
    joint_cross_entropy(logits, torch.tensor([0, 0]), mask((0, 1), 2), near, real).backward()
    assert logits.grad is not None and logits.grad.isfinite().all() and logits.grad[0, 0] < -0.1


class Says(nn.Module):
    """A network that says what it is told to, of its neighbours other than of the batch."""

    def __init__(self, logits: Tensor):
        super().__init__()
        self.logits, self.direction = logits, torch.zeros(4)
        self.head = nn.Identity()

    def features(self, images: Tensor) -> Tensor:
        return self.logits

    def forward(self, images: Tensor) -> Tensor:
        return self.logits if len(images) == 2 else self.logits.flip(0).repeat(len(images) // 2, 1)


def total(**knobs: Any) -> float:
    client = assemble(tiny_plan("dde", **knobs), "cpu", workers=1).engine.client
    rows = torch.zeros(2, 3, dtype=torch.int64)
    extra = {"neighbours": rows, "real": torch.ones(2, 3, dtype=torch.bool)}
    batch = Batch(torch.zeros(2, 1, 8, 8), LABELS, torch.Generator(), extra if client.config.neighbours else {})  # type: ignore[attr-defined]
    given = Given(ALL, OLD, torch.zeros(16, 1, 8, 8, dtype=torch.uint8))
    value: Tensor = client.loss({"net": Says(LOGITS), "old": Says(OLD_LOGITS)}, batch, given)  # type: ignore[attr-defined]
    return value.item()


def test_the_whole_loss_by_hand() -> None:
    assert total(neighbours=0, distill=0.0) == pytest.approx(1.897826, abs=1e-6)
    assert total(neighbours=0) == pytest.approx(1.897826 + 0.25 * 0.679935, abs=1e-6)
    old, new = OLD_LOGITS[:, :2], LOGITS[:, :2]
    lucir = (
        F.kl_div((new / 2).log_softmax(1), (old / 2).softmax(1), reduction="none").mean() * 2**2 * 0.25 * 2
    )  # two classes
    assert pytest.approx(lucir.item(), abs=1e-6) == 0.25 * 0.679935
    own, other = LOGITS.softmax(1), LOGITS.flip(0).repeat(3, 1).softmax(1).view(2, 3, 4).mean(1)
    joint = ((own + other) / 2).gather(1, LABELS[:, None]).log().neg().mean().item()
    assert total(distill=0.0) == pytest.approx(joint, rel=1e-6)
    assert total() == pytest.approx(joint + 0.25 * 0.679935, abs=1e-6)


def test_in_half_precision_every_weight_has_a_gradient_too() -> None:
    """The neighbours' pass comes first and without gradient; what is cast for it must not serve the batch's."""
    parts, _, _, fit, _ = at_work()
    parts.engine.slots[0].networks.thaw(fit)
    nets = {name: parts.engine.nets[name] for name in fit.load}
    extra = {name: values[:8] for name, values in fit.pool.extra.items()}
    batch = Batch(fit.pool.images[:8] / 255, fit.pool.labels[:8], torch.Generator(), extra)
    with torch.autocast("cpu", torch.bfloat16):
        value = fit.loss(nets, batch, fit.given)
    value.backward()
    gradients = {name: p.grad for name, p in nets["net"].named_parameters()}
    nets["net"].zero_grad()
    assert all(g is not None and g.abs().sum() > 0 for g in gradients.values())


# -- the total direct effect ------------------------------------------------------------------------------------------


def test_the_total_direct_effect_by_hand() -> None:
    head = nn.Linear(2, 3)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0], [0, 2], [1, 1]]))
        head.bias.copy_(torch.tensor([0.0, 0.5, 0]))
        # (3, 1) has 3 along the direction (1, 0), on which the weights have 1, 0 and 1
        found = total_direct_effect(torch.tensor([[3.0, 1]]), head, torch.tensor([7.0, 0]), torch.tensor(0.5))
        assert found.tolist() == [[3 - 1.5, 2.5, 4 - 1.5]]
        assert total_direct_effect(torch.tensor([[3.0, 1]]), head, torch.zeros(2), torch.tensor(0.5)).isfinite().all()


def test_taken_out_whole_nothing_along_the_direction_counts() -> None:
    head, e, features = nn.Linear(8, 5).double(), normals(8), normals(3, 8, seed=1)
    with torch.no_grad():
        one, other = (total_direct_effect(f, head, e, torch.tensor(1.0)) for f in (features, features + 3 * e))
        assert torch.allclose(one, other)
        cosine = F.cosine_similarity(features, e[None])[:, None] * features.norm(dim=1, keepdim=True)
        length = head.weight.norm(dim=1) * F.cosine_similarity(head.weight, e[None])
        assert torch.allclose(one, head(features) - cosine * length)


# -- a run ------------------------------------------------------------------------------------------------------------


@cache
def learned(**how: Any) -> Parts:
    parts = assemble(tiny_plan("dde", tasks=2, **{"rounds": 1, "steps": 2, **how}), "cpu", workers=1)
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        pass
    return parts


def at_work(**how: Any) -> tuple[Parts, LocalData, Model, Fit, Memory]:
    """A client in the second task, with exemplars."""
    parts = learned(**how)
    memory = parts.transport.memories[0]  # type: ignore[attr-defined]
    old = Memory({j: x for j, x in memory.exemplars.items() if j < 2})
    data, state = parts.scenario.local(0, parts.scenario.tasks[1]), parts.server.state
    client: Any = parts.engine.client
    return parts, data, state, next(client.train(old, data, state)), old


def test_neighbours_come_from_the_old_networks_features_and_the_new_classes() -> None:
    parts, data, state, fit, old = at_work()
    assert len(old.exemplars) == 2 and len(fit.pool) == len(data.labels) + sum(len(x) for x in old.exemplars.values())
    rows, real, table = fit.pool.extra["neighbours"], fit.pool.extra["real"], fit.given.images
    assert real.all() and rows.shape == (len(fit.pool), 10) and (fit.pool.labels[rows] >= 2).all()
    assert (rows != torch.arange(len(fit.pool))[:, None]).all()
    size = len(table)
    assert len(fit.pool) <= size < 2 * len(fit.pool) and size & (size - 1) == 0
    assert torch.equal(table[rows], fit.pool.images[rows]) and not table[len(fit.pool) :].any()
    net = parts.setting.classifier()
    net.load_state_dict({n: t for n, t in state.old_weights.items() if n != "direction"})
    with torch.no_grad():
        features = net.eval().features(fit.pool.images).double()
    assert [sorted(r) for r in rows.tolist()] == [
        sorted(r) for r in naive_neighbours(features, (fit.pool.labels >= 2).tolist(), 10)
    ]
    client: Any = parts.engine.client
    for weights, same in (("weights", True), ("old_weights", False)):
        other = replace(state, **{weights: {n: t.flip(0) for n, t in getattr(state, weights).items()}})
        found = client.pool(old, replace(data, cache={}), other)[0].extra["neighbours"]
        assert torch.equal(found, rows) == same, weights


def test_neighbours_have_no_gradient_and_leave_the_direction_alone() -> None:
    parts, _, _, fit, _ = at_work()
    parts.engine.slots[0].networks.thaw(fit)
    net: Any = parts.engine.nets["net"]
    before = net.direction.clone()
    extra = {name: values[:4] for name, values in fit.pool.extra.items()}
    batch = Batch(fit.pool.images[:4] / 255, fit.pool.labels[:4], torch.Generator(), extra)
    near = parts.engine.client.neighbours(net, batch, fit.given)  # type: ignore[attr-defined]
    assert near.shape == (4, 10, 4) and not near.requires_grad and torch.allclose(near.sum(2), torch.ones(4, 10))
    assert torch.equal(net.direction, before)
    with torch.no_grad():
        again = net.features(fit.pool.images[extra["neighbours"].flatten()] / 255)  # of their own batch's statistics
    expected = net.head(again).softmax(1).view(4, 10, -1)
    assert torch.allclose(near, expected, atol=1e-5)
    fit.loss({name: parts.engine.nets[name] for name in fit.load}, batch, fit.given)
    with torch.no_grad():
        assert torch.allclose(net.direction, 0.9 * before + net.features(batch.images).mean(0), atol=1e-5)


@pytest.mark.parametrize(("augment", "same"), [("none", True), ("crop", False)])
def test_neighbours_are_augmented_as_images_are(augment: str, same: bool) -> None:
    parts, _, _, fit, _ = at_work(augment=augment)
    parts.engine.slots[0].networks.thaw(fit)
    extra = {name: values[:4] for name, values in fit.pool.extra.items()}
    client: Any = parts.engine.client
    near = []
    for seed in (0, 1):
        draws = torch.Generator().manual_seed(seed)
        batch = Batch(fit.pool.images[:4] / 255, fit.pool.labels[:4], draws, extra)
        near.append(client.neighbours(parts.engine.nets["net"], batch, fit.given))
    assert torch.equal(*near) == same


def test_in_the_first_task_there_is_cross_entropy_alone_and_nothing_is_subtracted() -> None:
    parts = assemble(tiny_plan("dde", tasks=1, rounds=1, steps=1), "cpu", workers=1)
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        pass
    client: Any = parts.engine.client
    state, data = parts.server.state, parts.scenario.local(0, parts.scenario.tasks[0])
    fit = next(client.train(Memory(), data, state))
    assert fit.load.keys() == {"net"} and not fit.pool.extra and len(fit.given.images) == 0
    assert state.weights["direction"].norm() > 0
    with torch.no_grad():
        scores = client.predict(state, data.images)
        assert torch.equal(scores, client.net(data.images)[:, :2])


def test_the_direction_starts_anew_with_a_task_and_is_averaged_over_clients() -> None:
    parts, _ = finished("dde", Watching, rounds=1)
    trained = [seen for seen in parts.transport.seen if seen.handler == "train"]  # type: ignore[attr-defined]
    assert len(trained) == 6 and not any(seen.sent["weights/direction"].any() for seen in trained)
    last = torch.stack([seen.reply.weights["direction"] for seen in trained[-2:]])
    assert torch.allclose(parts.server.state.weights["direction"], last.mean(0)) and not torch.equal(*last)


@pytest.mark.parametrize("without", [{"neighbours": 0}, {"distill": 0.0}, {"effect": 0.0}, {"decay": 0.0}])
def test_every_part_changes_what_is_learned_or_said(without: dict[str, Any]) -> None:
    (one, other), images = (learned(), learned(**without)), learned().scenario.dataset.test_images[:20]
    with torch.no_grad():
        said = [p.engine.client.predict(p.server.state, images) for p in (one, other)]
    assert not torch.allclose(*said)


def test_clients_of_one_image_and_of_none_train_without_harm() -> None:
    parts, data, state, _, old = at_work()
    for count in (0, 1, 2):
        for memory in (old, Memory()):
            few = replace(data, images=data.images[:count], labels=data.labels[:count], cache={})
            call = Call(task=1, step=0, round=0, rounds=1, seed=0)
            answered = parts.engine.answer(0, Client.train, memory, few, state, call)
            assert answered.reply.count == count + sum(len(x) for x in memory.exemplars.values())
            assert all(t.isfinite().all() for t in answered.reply.weights.values())


def test_with_a_codec_new_images_and_neighbours_pass_it_too() -> None:
    parts, data, state, fit, old = at_work(exemplar_codec="klt:6")
    codec: Any = parts.engine.client.codec  # type: ignore[attr-defined]
    decoded = codec.decode(state.codec, codec.encode(state.codec, data.images))
    assert torch.equal(fit.pool.images[: len(data.labels)], decoded) and not torch.equal(decoded, data.images)
    assert torch.equal(fit.given.images[: len(data.labels)], decoded)
    assert all(x.shape[1:] == (6,) for x in old.exemplars.values())


# -- the centralised algorithm ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_double")
def test_one_client_is_the_centralised_algorithm() -> None:
    """Weights, direction and exemplars of a plain reference in float64, twelve steps in three tasks."""
    alone = replace(TINY, clients=1, active=1, train_limit=30, test_limit=5)
    settings = {**reference.PROTOCOL, "neighbours": 4, "distill": 0.7, "decay": 0.8}
    parts = assemble(plan("dde", alone, settings=settings), "cpu")
    w, tasks = {n: t.clone() for n, t in parts.server.state.weights.items() if n != "direction"}, []
    for task in parts.scenario.tasks:
        parts.scenario.begin(task)
        data = parts.scenario.local(0, task)
        tasks.append((data.images, data.labels))
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        pass

    step, kept, terms, e = 0, dict[int, Tensor](), list[float](), torch.zeros(64)
    for task, (images, labels) in enumerate(tasks):
        old, seen = 2 * task, 2 * task + 2
        teacher, e = dict(w), torch.zeros(64)
        pool = torch.cat([images, *(kept[j] for j in sorted(kept))])
        names = torch.cat([labels, *(torch.full((len(kept[j]),), j) for j in sorted(kept))])
        near = torch.tensor(naive_neighbours(means_of(teacher, pool), (names >= old).tolist(), 4)) if old else None

        def objective(v: dict[str, Tensor], x: Tensor, y: Tensor, pool=pool, near=near, t=teacher,
                      old: int = old, seen: int = seen) -> Tensor:  # fmt: skip
            nonlocal e
            if old:
                which = (pool[None] == x[:, None]).flatten(2).all(2).int().argmax(1)
                with torch.no_grad():
                    beside = reference.scores(v, pool[near[which].flatten()], True)[:, :seen].softmax(1)
            plain = {**v, "head.weight": torch.eye(64), "head.bias": torch.zeros(64)}
            features = reference.scores(plain, x, True)
            e = 0.8 * e + features.detach().mean(0)
            said = (features @ v["head.weight"].T + v["head.bias"])[:, :seen]
            p = said.softmax(1)
            if not old:
                return -p[torch.arange(len(y)), y].log().mean()
            joint = (p + beside.view(len(y), 4, seen).mean(1)) / 2
            learned = -joint[torch.arange(len(y)), y].log().mean()
            with torch.no_grad():
                taught = (reference.scores(t, x, False)[:, :old] / 2).softmax(1)
            held = (taught * (taught.log() - (said[:, :old] / 2).log_softmax(1))).sum(1).mean()
            terms.append(float(held.detach()))
            return learned + 0.7 * 2**2 * held

        for round in range(reference.ROUNDS):
            step += 1
            w = reference.sgd(w, objective, pool, names, round, step)
        step += 1
        each = 10 * 6 // seen  # sixty images' bytes, shared by the classes seen
        kept = {j: x[:each] for j, x in kept.items()}
        for j in range(old, seen):
            own = images[labels == j]
            kept[j] = own[naive(means_of(w, own), min(each, len(own)))]
    memory = parts.transport.memories[0].exemplars  # type: ignore[attr-defined]
    assert memory.keys() == kept.keys() and all(torch.equal(memory[j], kept[j]) for j in kept)
    ours = parts.server.state.weights
    assert len(terms) == 8 and min(terms) > 1e-4
    assert max((ours[n] - w[n]).abs().max().item() for n in w) < 1e-9
    assert e.norm() > 1 and (ours["direction"] - e).abs().max() < 1e-9
    test = parts.scenario.dataset.test_images[:20]
    features, unit = means_of(w, test), e / e.norm()
    weight = w["head.weight"]
    cosine = (features @ unit / features.norm(dim=1))[:, None]
    expected = features @ weight.T + w["head.bias"] - 0.5 * cosine * features.norm(dim=1)[:, None] * (weight @ unit)
    with torch.no_grad():
        assert (parts.engine.client.predict(parts.server.state, test) - expected).abs().max() < 1e-9
