"""iCaRL: its loss, its herding, its nearest mean; and one client is the centralised algorithm."""

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks.exemplars import herded
from fcil.blocks.losses import binary_cross_entropy
from fcil.blocks.nearest_mean import feature_sums, nearness
from fcil.errors import UserError
from fcil.federation.loop import learn
from fcil.method import Batch
from fcil.methods.icarl import Given, Memory, loss
from fcil.parts import Parts, assemble
from fcil.plan import plan
from fcil.records import size_in_bytes
from fcil.scenario.tasks import mask
from tests import test_reference as reference
from tests.conftest import TINY, tiny_plan

LOGITS = torch.tensor([[1.0, 2.0, 3.0, 0.5], [0.2, -1.0, 0.3, 2.0]])
OLD_LOGITS = torch.tensor([[2.0, 1.0, 9.0, 9.0], [-1.0, 0.5, 9.0, 9.0]])
LABELS = torch.tensor([2, 1])
ALL, OLD = mask((0, 1, 2, 3), 4), mask((0, 1), 4)


class Says(nn.Module):
    """A network that says what it is told to."""

    def __init__(self, logits: Tensor):
        super().__init__()
        self.logits = logits

    def forward(self, images: Tensor) -> Tensor:
        return self.logits


def value(old: Tensor | None = OLD_LOGITS, taught: Tensor = ALL) -> float:
    nets = {"net": Says(LOGITS)} | ({} if old is None else {"old": Says(old)})
    batch = Batch(torch.zeros(2, 1, 8, 8), LABELS, torch.Generator())
    return loss(nets, batch, Given(OLD if old is not None else mask((), 4), taught, torch.tensor(1.0))).item()


# -- the loss ---------------------------------------------------------------------------------------------------------


def test_known_answers() -> None:
    assert value(None) == pytest.approx(1.194442, abs=1e-6)
    assert value() == pytest.approx(0.847662, abs=1e-6)


def test_the_label_of_an_exemplar_is_not_used() -> None:
    """The second label is an old class: its output learns from the old network alone."""
    nets = {"net": Says(LOGITS), "old": Says(OLD_LOGITS)}
    other = Batch(torch.zeros(2, 1, 8, 8), torch.tensor([2, 0]), torch.Generator())
    assert loss(nets, other, Given(OLD, ALL, torch.tensor(1.0))).item() == value()


def test_classes_that_are_not_seen_do_not_count() -> None:
    by_hand = F.binary_cross_entropy_with_logits(LOGITS[:, :3], torch.tensor([[0.0, 0, 1], [0, 1, 0]]))
    assert value(None, mask((0, 1, 2), 4)) == pytest.approx(by_hand.item(), rel=1e-6)


def test_outputs_without_a_class_have_no_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    binary_cross_entropy(logits, torch.zeros(2, 4), mask((1, 3), 4)).backward()
    assert logits.grad is not None and (logits.grad[:, [0, 2]] == 0).all() and (logits.grad[:, [1, 3]] != 0).all()


# -- herding ----------------------------------------------------------------------------------------------------------


def naive(features: Tensor, number: int) -> list[int]:
    """Rebuffi et al., Algorithm 4, one candidate after the other."""
    unit = features / features.norm(dim=1, keepdim=True)
    middle, chosen = unit.mean(0), list[int]()
    for k in range(1, number + 1):
        rest = [i for i in range(len(unit)) if i not in chosen]
        chosen.append(min(rest, key=lambda i: float((middle - unit[[*chosen, i]].sum(0) / k).norm())))
    return chosen


def distances(features: Tensor, chosen: list[int]) -> list[float]:
    """How far the mean of the first k is from the class's, for every k."""
    unit = features / features.norm(dim=1, keepdim=True)
    return [float((unit.mean(0) - unit[chosen[:k]].mean(0)).norm()) for k in range(1, len(chosen) + 1)]


def nearest_next(features: Tensor, rows: Tensor) -> list[float]:
    """How near it could have come at every step, given the steps before."""
    chosen = rows.tolist()
    rest = [[i for i in range(len(features)) if i not in chosen[:k]] for k in range(len(chosen))]
    return [min(distances(features, [*chosen[:k], i])[-1] for i in free) for k, free in enumerate(rest)]


@settings(max_examples=40)
@drawn(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 15)), min_size=1, max_size=5), st.integers(0, 99))
def test_herding_is_the_papers_for_every_class_at_once(sizes: list[tuple[int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = {j: torch.randn(n, 6, generator=generator, dtype=torch.float64) for j, (n, _) in enumerate(sizes)}
    numbers = {j: want for j, (_, want) in enumerate(sizes)}
    found = herded(features, numbers)
    assert found.keys() == {j for j, want in numbers.items() if want}
    for j, rows in found.items():
        assert len(set(rows.tolist())) == len(rows) == min(numbers[j], len(features[j]))
        off, best = distances(features[j], rows.tolist()), distances(features[j], naive(features[j], len(rows)))
        assert off[0] == pytest.approx(best[0])  # later ones may follow another of two that were equally good
        assert all(one == pytest.approx(least) for one, least in zip(off, nearest_next(features[j], rows), strict=True))


def test_a_shorter_list_is_the_head_of_a_longer_one() -> None:
    features = {0: torch.randn(20, 8, generator=torch.Generator().manual_seed(0))}
    assert torch.equal(herded(features, {0: 5})[0], herded(features, {0: 20})[0][:5])
    assert sorted(herded(features, {0: 20})[0].tolist()) == list(range(20))


def test_herding_does_not_care_for_the_length_of_features() -> None:
    features = torch.randn(15, 8, generator=torch.Generator().manual_seed(1))
    longer = features * torch.rand(15, 1, generator=torch.Generator().manual_seed(2)).add(0.5)
    assert torch.equal(herded({0: features}, {0: 15})[0], herded({0: longer}, {0: 15})[0])


# -- a run ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class After:
    """What there is when a task has ended."""

    parts: Parts
    memories: list[dict[int, dict[int, Tensor]]]  # task by task: client -> class -> exemplars


@cache
def learned(**how: Any) -> After:
    parts = assemble(tiny_plan("icarl", **how), "cpu", workers=1)
    memories = []
    for line in learn(parts.scenario, parts.server, parts.door, parts.engine):
        if line["kind"] == "task":
            held = parts.transport.memories  # type: ignore[attr-defined]
            memories.append({who: {j: x.clone() for j, x in held[who].exemplars.items()} for who in held})
            budget = parts.engine.setting.budget.at(parts.scenario.tasks[line["task"]])
            assert all(size_in_bytes(Memory(own)) <= budget for own in memories[-1].values())
    return After(parts, memories)


@pytest.mark.parametrize("codec", ["raw", "klt:12", "dct:20"])
def test_lists_are_heads_of_earlier_lists_and_stay_to_the_bit(codec: str) -> None:
    memories = learned(exemplar_codec=codec).memories
    seen = 0
    for before, after in zip(memories, memories[1:], strict=False):
        for who, own in before.items():
            for j, codes in own.items():
                left = after[who].get(j, codes[:0])
                assert torch.equal(left, codes[: len(left)])
                seen += len(left)
    assert seen > 0
    size = 64 if codec == "raw" else int(codec[4:])
    assert all(x[0].numel() == size for own in memories[-1].values() for x in own.values())


def test_a_smaller_code_keeps_more_images() -> None:
    count = [sum(len(x) for own in learned(exemplar_codec=c, memory=2).memories[-1].values() for x in own.values())
             for c in ("raw", "klt:12")]  # fmt: skip
    assert count[1] > 3 * count[0]


def test_with_a_codec_new_images_pass_it_too() -> None:
    parts = learned(exemplar_codec="klt:6").parts
    task = parts.scenario.tasks[0]
    parts.scenario.begin(task)
    data, client = parts.scenario.local(0, task), parts.engine.client
    state = parts.server.state
    pool = next(client.train(Memory(), data, state)).pool  # type: ignore[attr-defined]
    codec = client.codec  # type: ignore[attr-defined]
    assert torch.equal(pool.images, codec.decode(state.codec, codec.encode(state.codec, data.images)))
    assert not torch.equal(pool.images, data.images)


def test_classification_is_by_the_mean_of_exemplars_over_all_clients() -> None:
    after = learned()
    parts, state = after.parts, after.parts.server.state
    client = parts.engine.client
    client.net.load_state_dict(state.weights)  # type: ignore[attr-defined]
    client.net.eval()  # type: ignore[attr-defined]
    with torch.no_grad():
        for j in range(6):
            images = torch.cat([own[j] for own in after.memories[-1].values() if j in own])
            unit = F.normalize(client.net.features(images))  # type: ignore[attr-defined]
            assert torch.allclose(state.means[j], F.normalize(unit.mean(0), dim=0), atol=1e-5)
        test = parts.scenario.dataset.test_images[:40]
        features = F.normalize(client.net.features(test))  # type: ignore[attr-defined]
        nearest = (features[:, None] - state.means[:6]).norm(dim=2).argmin(1)
    assert torch.equal(parts.engine.classify(parts.server.broadcast(), test), nearest)


def test_a_class_without_exemplars_is_never_predicted_and_that_is_said() -> None:
    parts = learned().parts
    server, test = deepcopy(parts.server), parts.scenario.dataset.test_images
    before = parts.engine.classify(server.broadcast(), test)
    assert (before == 3).any() and server.measured() == {"classes_without_exemplars": 0.0}  # type: ignore[attr-defined]
    server.state.means[3] = 0
    after = parts.engine.classify(server.broadcast(), test)
    assert not (after == 3).any() and torch.equal(before[before != 3], after[before != 3])
    assert server.measured() == {"classes_without_exemplars": 1.0}  # type: ignore[attr-defined]


def test_a_class_without_a_mean_is_ruled_out_also_where_all_means_are_far() -> None:
    scores = nearness(torch.tensor([[-3.0, -4.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]))
    assert scores[0].tolist() == [pytest.approx(-0.6), -torch.inf, pytest.approx(-0.8)]


def test_without_any_exemplar_the_head_classifies() -> None:
    parts = learned(memory=0).parts
    state, net, test = parts.server.state, parts.setting.classifier(), parts.scenario.dataset.test_images[:40]
    net.load_state_dict(state.weights)
    with torch.no_grad():
        said = net.eval()(test)[:, :6].argmax(1)
    assert not state.means.any() and torch.equal(parts.engine.classify(state, test), said)


def test_mirror_images_count_where_training_mirrors() -> None:
    plain, mirrored = (learned(augment=how).parts.server.state for how in ("crop", "crop-flip"))
    assert plain.means.any() and mirrored.means.any()
    client = assemble(tiny_plan("icarl", augment="crop-flip"), "cpu", workers=1).engine.client
    client.net.eval()  # type: ignore[attr-defined]
    images = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        sums = feature_sums(client.net.features, {3: images}, "crop-flip").sums[3]  # type: ignore[attr-defined]
        turned = F.normalize(client.net.features(images.flip(3))).sum(0)  # type: ignore[attr-defined]
    assert sums.shape[0] == 2 and torch.allclose(sums[1], turned, atol=1e-6) and not torch.allclose(sums[0], sums[1])


@pytest.mark.parametrize(("tasks", "alike"), [(1, True), (2, False)])
def test_a_mean_over_all_classes_that_will_come_does_not_shrink_with_them(tasks: int, alike: bool) -> None:
    """Two of six classes have come: with three times the rate the first task is the same, and the next is not."""
    how = {"stop_after": tasks, "sgd_decay": 0.0, "clip": 1e9}
    seen, every = (learned(over=over, lr=lr, **how).parts.server.state for over, lr in (("seen", 0.1), ("all", 0.3)))
    far = max((w - every.weights[name]).abs().max().item() for name, w in seen.weights.items())
    assert (far < 1e-5) == alike


def test_absent_new_classes_may_be_left_out() -> None:
    plain, masked = (learned(alpha=0.05, mask_absent_new=how).parts.server.state for how in (False, True))
    assert any(not torch.equal(w, masked.weights[name]) for name, w in plain.weights.items())


@pytest.mark.parametrize("spec", ["png:300", "webp", "webp:0", "webp:many", "raw:3", ""])
def test_another_codec_is_refused_in_one_sentence(spec: str) -> None:
    allowed = "write raw, or klt, trellis, dct or webp"
    with pytest.raises(UserError, match=f"exemplar_codec={spec} is not allowed; {allowed}"):
        assemble(tiny_plan("icarl", exemplar_codec=spec), "cpu")


# -- the centralised algorithm ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_double")
def test_one_client_is_the_centralised_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, exemplars and class means of a plain reference in float64, twelve steps in three tasks."""
    monkeypatch.setattr(reference, "MOMENTUM", 0.0)
    monkeypatch.setattr(reference, "DECAY", 1e-5)
    alone = replace(TINY, clients=1, active=1, train_limit=30, test_limit=5)
    parts = assemble(plan("icarl", alone, settings=reference.PROTOCOL), "cpu")
    w, tasks = {n: t.clone() for n, t in parts.server.state.weights.items()}, []
    for task in parts.scenario.tasks:
        parts.scenario.begin(task)
        data = parts.scenario.local(0, task)
        tasks.append((data.images, data.labels))
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        pass

    step, kept = 0, dict[int, Tensor]()
    for task, (images, labels) in enumerate(tasks):
        old, seen = 2 * task, 2 * task + 2
        teacher = dict(w)

        def objective(
            v: dict[str, Tensor], x: Tensor, y: Tensor, t=teacher, old: int = old, seen: int = seen
        ) -> Tensor:
            said, target = reference.scores(v, x, True)[:, :seen], torch.zeros(len(y), seen)
            target[torch.arange(len(y)), y] = 1
            if old:
                with torch.no_grad():
                    target[:, :old] = 1 / (1 + (-reference.scores(t, x, False)[:, :old]).exp())
            p = 1 / (1 + (-said).exp())
            return -(target * p.log() + (1 - target) * (1 - p).log()).mean()

        pool = torch.cat([images, *(kept[j] for j in sorted(kept))])
        names = torch.cat([labels, *(torch.full((len(kept[j]),), j) for j in sorted(kept))])
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
    ours = parts.server.state
    assert max((ours.weights[n] - w[n]).abs().max().item() for n in w) < 1e-9
    for j, own in kept.items():
        unit = means_of(w, own)
        middle = (unit / unit.norm(dim=1, keepdim=True)).mean(0)
        assert (ours.means[j] - middle / middle.norm()).abs().max() < 1e-9


def means_of(w: dict[str, Tensor], images: Tensor) -> Tensor:
    """The features before the head, with running statistics."""
    plain = {**w, "head.weight": torch.eye(64), "head.bias": torch.zeros(64)}
    return reference.scores(plain, images, False)
