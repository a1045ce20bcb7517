"""FedSpace: its three losses, prototypes and radius, the mixed aggregation, the fractals, and a reference."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks.prototypes import contrast, followed, noisy, radius_of
from fcil.blocks.training import loaded
from fcil.experiment import run
from fcil.federation.calls import Answered, Call
from fcil.federation.engine import threads
from fcil.federation.in_process import InProcess
from fcil.federation.loop import Line, learn
from fcil.method import Batch
from fcil.methods.fedspace import TURNS, Client, Config, Given, mixed, turns
from fcil.parts import Parts, assemble
from fcil.plan import plan
from fcil.records import size_in_bytes
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import mask
from tests.conftest import TINY, tiny_plan
from tests.test_reference import order, seed_of

PLAIN = {"pretrain": 0}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


def doubles(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- prototypes -------------------------------------------------------------------------------------------------------


def test_prototypes_follow_slowly_and_begin_with_their_first_mean() -> None:
    before, known = doubles([[1, 1], [0, 0], [5, 5]]), mask((0, 2), 3)
    sums, counts = {0: doubles([8, 12]), 1: doubles([6, 9])}, {0: torch.tensor(4), 1: torch.tensor(3)}
    after, knows = followed(before, known, sums, counts, 0.1)
    assert torch.allclose(after, doubles([[0.1 * 2 + 0.9 * 1, 0.1 * 3 + 0.9 * 1], [2, 3], [5, 5]]))
    assert knows.tolist() == [True, True, True] and known.tolist() == [True, False, True], "what was sent stays"
    assert torch.equal(followed(before, known, None, None, 0.1)[0], before)


def test_the_radius_is_the_deviation_in_one_direction_averaged_over_classes() -> None:
    features = {0: doubles([[0, 0], [2, 4]]), 1: doubles([[1, 1], [1, 1], [4, 1]]), 2: doubles([[7, 7]])}
    covariances = [torch.cov(features[j].T) for j in (0, 1)]  # one image has no covariance
    expected = math.sqrt(sum(float(c.trace()) / 2 for c in covariances) / 2)
    found = radius_of(features)
    assert found is not None and float(found) == pytest.approx(expected)
    assert radius_of({2: features[2]}) is None and radius_of({}) is None


def test_noise_around_prototypes_of_the_classes_asked_for_alone() -> None:
    prototypes = 100.0 * torch.arange(6)[:, None].expand(-1, 50)
    rows, which = noisy(prototypes, torch.tensor(0.5), mask((1, 4, 5), 6), 3000, seeded())
    assert {j: 800 < which.tolist().count(j) < 1200 for j in (1, 4, 5)} == {1: True, 4: True, 5: True}
    noise = rows - prototypes[which]
    assert float(noise.std()) == pytest.approx(0.5, rel=0.02) and float(noise.mean()) == pytest.approx(0, abs=0.01)
    none, zero = noisy(prototypes, torch.tensor(0.5), mask((), 6), 10, seeded())
    assert none.isfinite().all() and zero.tolist() == [0] * 10


def naive_contrast(rows: Tensor, labels: list[int], classes: set[int], with_self: bool = False) -> float:
    """The same by its formula, one anchor after the other."""
    unit = [row / row.norm() for row in rows]
    total = 0.0
    for i, label in enumerate(labels):
        alike = [j for j in range(len(labels)) if labels[j] == label and j != i]
        if label not in classes or not alike:
            continue
        others = sum(math.exp(float(unit[i] @ unit[j])) for j in range(len(labels)) if j != i)
        others += 1.0 if with_self else 0.0
        total -= sum(float(unit[i] @ unit[j]) - math.log(others) for j in alike) / len(alike)
    return total / len(labels)


@pytest.mark.parametrize("with_self", [False, True])
def test_the_contrast_is_its_formula(with_self: bool) -> None:
    rows, labels = torch.randn(9, 5, generator=seeded(), dtype=torch.float64), [0, 1, 1, 2, 1, 0, 3, 3, 2]
    here = torch.ones(9, dtype=torch.bool)
    for classes in ({0, 1, 2}, {1}, {0, 1, 2, 3}):
        found = contrast(rows, torch.tensor(labels), here, mask(tuple(classes), 5), with_self)
        assert float(found) == pytest.approx(naive_contrast(rows, labels, classes, with_self), rel=1e-12)
    fewer = torch.arange(9) < 6
    found = contrast(rows, torch.tensor(labels), fewer, mask((0, 1), 5), with_self)
    assert float(found) == pytest.approx(naive_contrast(rows[:6], labels[:6], {0, 1}, with_self), rel=1e-12)


def test_the_contrast_by_hand() -> None:
    """Two equal rows and one across: each of the two has a share e / (e + 1)."""
    rows, labels, here = doubles([[1, 0], [2, 0], [0, 1]]), torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool)
    expected = 2 * -math.log(math.e / (math.e + 1)) / 3
    assert float(contrast(rows, labels, here, mask((0, 1), 2))) == pytest.approx(expected)
    with_self = 2 * -math.log(math.e / (math.e + 1 + 1)) / 3
    assert float(contrast(rows, labels, here, mask((0,), 2), True)) == pytest.approx(with_self)


def test_a_contrast_without_company_is_nothing_and_has_no_gradient() -> None:
    for count, labels in ((1, [0]), (3, [0, 1, 2])):
        rows = torch.randn(count, 4, generator=seeded()).requires_grad_()
        found = contrast(rows, torch.tensor(labels), torch.ones(count, dtype=torch.bool), mask((0, 1, 2), 4))
        found.backward()
        assert found.item() == 0 and rows.grad is not None and (rows.grad == 0).all()


# -- the loss ---------------------------------------------------------------------------------------------------------


class Fake:
    """A network whose features are some pixels, and which remembers what it was shown."""

    def __init__(self, capacity: int):
        self.shown: list[Tensor] = []
        self.weight = torch.randn(TURNS * capacity, 4, generator=seeded(5)).requires_grad_()

    def features(self, images: Tensor) -> Tensor:
        self.shown.append(images)
        return images.flatten(1)[:, :4] + 0.1

    def head(self, features: Tensor) -> Tensor:
        return features @ self.weight.T


IMAGES = torch.rand(6, 1, 3, 3, generator=seeded(1))
LABELS = torch.tensor([2, 3, 2, 3, 3, 2])
HELD, SEEN = mask((2, 3), 6), mask((0, 1, 2, 3), 6)
GIVEN = Given(HELD, HELD, SEEN, torch.randn(6, 4, generator=seeded(2)), mask((0, 1, 2), 6), torch.tensor(0.3))
REACHED = replace(GIVEN, among=SEEN)


@cache
def tiny_scenario() -> Scenario:
    return Scenario(TINY, 0)


@cache
def setting() -> Any:
    return assemble(tiny_plan("fedspace"), "cpu", tiny_scenario(), workers=1).setting


def loss_of(given: Given = GIVEN, net: Any = None, **config: Any) -> Tensor:
    client = Client(replace(Config(), **config), setting())
    return client.loss({"net": net or Fake(6)}, Batch(IMAGES, LABELS, seeded(7)), given)


@torch.no_grad()
def by_hand(given: Given = GIVEN) -> tuple[float, float, float]:
    """The three losses, image by image and row by row."""
    net, generator, known = Fake(6), seeded(7), given.known.nonzero()[:, 0].tolist()
    among, current, seen = (c.nonzero()[:, 0].tolist() for c in (given.among, given.current, given.seen))
    labelled = []
    for image, label in zip(IMAGES, LABELS.tolist(), strict=True):
        for k in range(4):
            logits = net.head(net.features(torch.rot90(image, k, (1, 2))[None]))[0] / 0.1
            told = torch.stack([logits[4 * c + turn] for c in among for turn in range(4)])
            labelled.append((told.logsumexp(0) - logits[4 * label + k]).item())

    def drawn(classes: list[int]) -> tuple[list[Tensor], list[int]]:
        places = (torch.rand(6, 1, generator=generator)[:, 0] * len(classes)).floor().long().tolist()
        which, noise = [classes[p] if classes else 0 for p in places], torch.randn(6, 4, generator=generator)
        return [given.prototypes[j] + 0.3 * n for j, n in zip(which, noise, strict=True)], which

    kept, (rows, which) = [], drawn([j for j in known if j not in current])
    for row, j in zip(rows, which, strict=True):
        logits = net.head(row) / 0.1
        kept.append(
            float(torch.stack([logits[4 * c + k] for c in seen for k in range(4)]).logsumexp(0) - logits[4 * j])
        )
    rows, which = drawn(known)
    every = torch.stack([*(net.features(IMAGES)), *(rows if known else [])]).double()
    labels = LABELS.tolist() + (which if known else [])
    return sum(labelled) / 24, sum(kept) / 6, naive_contrast(every, labels, set(current))


@pytest.mark.parametrize("given", [GIVEN, REACHED], ids=["held", "reached"])
def test_the_loss_is_rotations_prototypes_and_contrast(given: Given) -> None:
    labelled, kept, apart = by_hand(given)
    assert loss_of(given).item() == pytest.approx(labelled + 0.01 * kept + 0.01 * apart, rel=1e-5)
    more = loss_of(given, prototype_weight=0.5, contrast_weight=2.0)
    assert more.item() == pytest.approx(labelled + 0.5 * kept + 2 * apart, rel=1e-5)
    assert min(labelled, kept, apart) > 0.1, "none is nothing"


def test_before_there_are_prototypes_only_images_count() -> None:
    none = replace(GIVEN, known=mask((), 6))
    labelled, _, apart = by_hand(none)
    assert loss_of(none).item() == pytest.approx(labelled + 0.01 * apart, rel=1e-5)


def test_a_client_that_has_all_known_classes_replays_none() -> None:
    all_held = replace(GIVEN, known=mask((2, 3), 6))
    assert loss_of(all_held, prototype_weight=9.0).item() == pytest.approx(loss_of(all_held).item())


@pytest.mark.parametrize(
    "other", [{"prototype_weight": 0.0}, {"contrast_weight": 0.0}, {"contrast_self": True}, {"temperature": 1.0}]
)
def test_leaving_out_a_part_changes_the_loss(other: dict[str, Any]) -> None:
    assert abs(loss_of(**other).item() - loss_of().item()) > 1e-4


def test_the_network_sees_every_image_turned_four_times_the_upright_ones_first() -> None:
    net = Fake(6)
    loss_of(net=net)
    (shown,) = net.shown
    assert shown.shape == (24, 1, 3, 3) and torch.equal(shown[:6], IMAGES)
    assert torch.equal(shown[6:12], IMAGES.flip(2).transpose(2, 3)) or torch.equal(
        shown[6:12], IMAGES.transpose(2, 3).flip(2)
    )
    assert torch.equal(shown[12:18], IMAGES.flip(2, 3))


def test_images_move_outputs_of_classes_at_hand_and_prototypes_those_of_all_seen() -> None:
    held, seen = (turns(classes).nonzero()[:, 0].tolist() for classes in (GIVEN.among, GIVEN.seen))
    for weight, expected in ((0.0, held), (1.0, seen)):
        net = Fake(6)
        loss_of(net=net, prototype_weight=weight).backward()
        assert net.weight.grad is not None
        assert net.weight.grad.abs().sum(1).nonzero()[:, 0].tolist() == expected
    assert held == list(range(8, 16)) and seen == list(range(16))


# -- a run ------------------------------------------------------------------------------------------------------------


class Listening(InProcess):
    """Clients whose answers are kept."""

    def deliver(self, who: Any, handler: Any, message: Any, call: Call) -> Iterator[tuple[int, Answered[Any]]]:
        for client, answered in super().deliver(who, handler, message, call):
            self.heard.append((client, call.task, message, answered.reply))
            yield client, answered


def parts_of(**settings: Any) -> Parts:
    parts = assemble(tiny_plan("fedspace", **{**PLAIN, **settings}), "cpu", workers=1)
    parts.transport.__class__ = Listening
    parts.transport.heard = []  # type: ignore[attr-defined]
    return parts


def lines_of(parts: Parts) -> Iterator[Line]:
    return learn(parts.scenario, parts.server, parts.door, parts.engine)


def test_the_head_has_four_outputs_a_class_and_every_fourth_predicts() -> None:
    parts = parts_of(rounds=1)
    list(lines_of(parts))
    message = parts.server.broadcast()
    assert message.weights["head.weight"].shape == (4 * 6, 64)
    images, _ = parts.scenario.test(parts.scenario.tasks[0])
    with torch.inference_mode():
        scores = parts.engine.client.predict(message, images)
        outputs = loaded(parts.setting.classifier(4), message.weights)(images)
    assert torch.equal(scores, outputs[:, [0, 4, 8, 12, 16, 20]])


def test_the_global_model_is_half_of_the_average_and_half_of_the_last_one() -> None:
    one, other = {"w": doubles([2.0, 4.0]), "n": torch.tensor(7)}, {"w": doubles([0.0, 2.0]), "n": torch.tensor(3)}
    assert mixed(one, other, 0.5)["w"].tolist() == [1.0, 3.0] and mixed(one, other, 0.25)["w"].tolist() == [0.5, 2.5]
    assert int(mixed(one, other, 0.5)["n"]) == 7
    for mix in (0.5, 1.0):
        parts = parts_of(rounds=1, tasks=1, mix=mix)
        first = {name: value.clone() for name, value in parts.server.state.weights.items()}
        next(lines_of(parts))
        heard = parts.transport.heard  # type: ignore[attr-defined]
        for name in ("head.weight", "body.layers.0.1.running_mean"):
            average = torch.stack([reply.weights[name] for *_, reply in heard]).mean(0)
            assert torch.allclose(parts.server.state.weights[name], mix * average + (1 - mix) * first[name], atol=1e-6)


def test_clients_send_sums_of_upright_features_under_their_own_weights() -> None:
    parts = parts_of(rounds=2, tasks=1)
    list(lines_of(parts))
    task = parts.scenario.tasks[0]
    for client, _, _, reply in parts.transport.heard:  # type: ignore[attr-defined]
        data, net = parts.scenario.local(client, task), loaded(parts.setting.classifier(4), reply.weights)
        with torch.no_grad():
            features = net.features(data.images)  # type: ignore[operator]
        assert sorted(reply.sums) == sorted(reply.counts) == data.classes() and reply.count == len(data.labels)
        spreads = []
        for j in data.classes():
            own = features[data.labels == j]
            assert torch.allclose(reply.sums[j], own.sum(0), atol=1e-4) and int(reply.counts[j]) == len(own)
            spreads.append(torch.cov(own.T).trace() / 64)
        radius = torch.stack(spreads).mean().sqrt()
        assert reply.measured == reply.count and torch.allclose(reply.radius / reply.count, radius, rtol=1e-4)


def test_prototypes_and_radius_are_weighed_by_samples_and_the_radius_is_of_the_first_task() -> None:
    parts = parts_of(rounds=3, partition="powerlaw_dirichlet", clients=6, active=3)
    prototypes: dict[int, Tensor] = {}
    heard, radii, asked = parts.transport.heard, [], 0  # type: ignore[attr-defined]
    for line in lines_of(parts):
        if line["kind"] == "task":
            radii.append(float(parts.server.state.radius))
            continue
        replies, asked = [reply for *_, reply in heard[asked:]], len(heard)
        for j in {j for reply in replies for j in reply.sums}:
            total = sum(reply.sums[j] for reply in replies if j in reply.sums)
            mean = total / sum(int(reply.counts[j]) for reply in replies if j in reply.counts)
            prototypes[j] = 0.1 * mean + 0.9 * prototypes[j] if j in prototypes else mean
        if line["task"] == 0:
            radius = sum(float(r.radius) for r in replies) / sum(r.measured for r in replies)
            assert float(parts.server.state.radius) == pytest.approx(radius, rel=1e-5)
        else:
            assert all(reply.measured == 0 and float(reply.radius) == 0 for reply in replies)
    assert radii[0] > 0 and len(set(radii)) == 1
    state = parts.server.state
    assert state.known.nonzero()[:, 0].tolist() == sorted(prototypes) and len(prototypes) >= 5
    for j, prototype in prototypes.items():
        assert torch.allclose(state.prototypes[j], prototype, atol=1e-4)
    assert (state.prototypes[~state.known] == 0).all()


def test_clients_keep_nothing() -> None:
    parts = parts_of(rounds=1)
    lines = list(lines_of(parts))
    assert all(line["kept"] == 0 for line in lines if line["kind"] == "task")
    assert all(size_in_bytes(memory) == 0 for memory in parts.transport.memories.values())


def test_the_radius_is_measured_in_the_first_task_that_anyone_has_images_of() -> None:
    parts = parts_of(rounds=2, lag=1, clients=2, active=2, seed=next(s for s in range(99) if all_behind(s)))
    found = [line["measured"]["radius"] for line in lines_of(parts) if line["kind"] == "task"]
    assert found[0] == 0 < found[1] == found[2]


def all_behind(seed: int) -> bool:
    return bool(Scenario(replace(TINY, lag=1, clients=2, active=2), seed).lags.all())


def givens(mask: str, **changes: Any) -> list[tuple[set[int], int, Given]]:
    """The classes that clients have in each training, its task, and what the loss is given."""
    benchmark = replace(TINY, clients=4, active=4, **changes)
    parts = assemble(tiny_plan("fedspace", benchmark, rounds=1, steps=1, mask=mask, **PLAIN), "cpu", workers=1)
    found, do = [], parts.engine.fit

    def fit(wanted: Any, *rest: Any) -> Any:
        found.append((set(wanted.pool.labels.tolist()), parts.door.task.index, wanted.given))
        return do(wanted, *rest)

    parts.engine.fit = fit  # type: ignore[method-assign]
    list(lines_of(parts))
    return [entry for entry in found if entry[0]]


def those(classes: Tensor) -> set[int]:
    return set(classes.nonzero()[:, 0].tolist())


def test_a_client_that_lacks_a_class_of_its_task_goes_by_what_it_holds_or_by_what_it_has_reached() -> None:
    halves = {"partition": "class_subset", "class_share": 0.5}
    for held, _, given in givens("held", **halves):
        assert len(held) == 1 and those(given.among) == those(given.current) == held
    for held, task, given in givens("reached", **halves):
        assert len(held) == 1 and held < those(given.current) == {2 * task, 2 * task + 1}
        assert those(given.among) == those(given.seen) == set(range(2 * task + 2))


def test_a_client_that_is_behind_has_reached_its_own_task() -> None:
    entries = givens("reached", lag=1)
    assert any(max(held) < 2 * task for held, task, _ in entries) and any(max(held) >= 2 * t for held, t, _ in entries)
    for held, task, given in entries:
        own = max(held) // 2
        assert own in (task - 1, task) and those(given.current) == {2 * own, 2 * own + 1} >= held
        assert those(given.among) == set(range(2 * own + 2)) and those(given.seen) == set(range(2 * task + 2))


# -- fractals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_the_body_learns_fractals_before_the_first_round_and_the_ledger_says_so(norm: str) -> None:
    parts = parts_of(pretrain=40, fractals=20, rounds=2, tasks=1, norm=norm)
    first = {name: value.clone() for name, value in parts.server.state.weights.items()}
    lines = list(lines_of(parts))
    measured = lines[-1]["measured"]
    assert measured["fractal_loss_after"] < 0.85 * measured["fractal_loss_before"]
    assert measured["fractal_loss_before"] == pytest.approx(math.log(20), abs=0.5)
    _, _, message, _ = parts.transport.heard[0]  # type: ignore[attr-defined]
    for name, value in message.weights.items():
        assert torch.equal(value, first[name]) == name.startswith("head."), name


def test_without_steps_there_is_no_pretraining() -> None:
    parts = parts_of(rounds=1, tasks=1)
    first = {name: value.clone() for name, value in parts.server.state.weights.items()}
    lines = list(lines_of(parts))
    assert lines[-1]["measured"]["fractal_loss_before"] is lines[-1]["measured"]["fractal_loss_after"] is None
    _, _, message, _ = parts.transport.heard[0]  # type: ignore[attr-defined]
    assert all(torch.equal(value, first[name]) for name, value in message.weights.items())
    assert parts.server.pages() == {}  # type: ignore[attr-defined]


def test_fractals_are_a_picture_in_the_run_folder(tmp_path: Path) -> None:
    run(
        "fedspace", settings={"rounds": 1, "steps": 2, "tasks": 2, "fractals": 9}, out=tmp_path, device="cpu", workers=1
    )
    with Image.open(tmp_path / "fractals.png") as page:
        assert page.size == (8 * 52 + 4, 8 * 52 + 4) and page.getextrema() == ((0, 255),) * 3
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert {"fractal_loss_before", "fractal_loss_after", "radius"} == lines[-1]["measured"].keys()
    run("fedspace", settings={"rounds": 1, "steps": 1, "tasks": 1, "pretrain": 0}, out=tmp_path / "b", device="cpu")
    assert not (tmp_path / "b" / "fractals.png").exists()


# -- with one client, the centralised algorithm ------------------------------------------------------------------------

TASKS, ROUNDS, STEPS, BATCH, WIDTH = 2, 3, 2, 16, 64  # twelve steps
LR, MOMENTUM, DECAY, CLIP = 0.02, 0.9, 5e-3, 5.0
ALONE = replace(TINY, tasks=TASKS, clients=1, active=1, train_limit=30, test_limit=5)
SETTINGS = {
    "rounds": ROUNDS, "steps": STEPS, "batch_size": BATCH, "momentum": MOMENTUM, "sgd_decay": DECAY, "clip": CLIP,
    "lr": LR, "pretrain": 0, "prototype_weight": 0.3, "contrast_weight": 0.5,
}  # fmt: skip

Numbers = dict[str, Tensor]


def by_fcil(**settings: Any) -> tuple[Numbers, list[tuple[Tensor, Tensor]], Any]:
    parts = assemble(plan("fedspace", ALONE, settings={**SETTINGS, **settings}), "cpu", workers=1)
    first, data = {n: t.clone() for n, t in parts.server.state.weights.items()}, []
    for task in parts.scenario.tasks:
        parts.scenario.begin(task)
        local = parts.scenario.local(0, task)
        data.append((local.images, local.labels))
    list(lines_of(parts))
    return first, data, parts.server.state


def features(w: Numbers, images: Tensor, training: bool) -> Tensor:
    """Three times convolution, batch norm, ReLU; mean over the places."""
    x = images / 127.5 - 1
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
        x = (x * w[f"{norm}.weight"].view(-1, 1, 1) + w[f"{norm}.bias"].view(-1, 1, 1)).relu()
    return x.mean((2, 3))


def likelihood(rows: Tensor, w: Numbers, outputs: list[int], classes: list[int]) -> Tensor:
    logits = 10 * (rows @ w["head.weight"].T + w["head.bias"])
    among = logits[:, [4 * c + k for c in classes for k in range(4)]]
    return (among.logsumexp(1) - logits[torch.arange(len(rows)), outputs]).mean()


def near(rows: Tensor, labels: list[int], classes: list[int]) -> Tensor:
    unit, total = rows / rows.norm(dim=1, keepdim=True), torch.zeros(())
    for i, label in enumerate(labels):
        alike = [j for j in range(len(labels)) if labels[j] == label and j != i]
        others = [j for j in range(len(labels)) if j != i]
        if label in classes and alike:
            total = total - (unit[alike] @ unit[i] - (unit[others] @ unit[i]).exp().sum().log()).mean()
    return total / len(labels)


def centralised(
    w: Numbers, data: list[tuple[Tensor, Tensor]],
    alpha: float = 0.3, beta: float = 0.5, mix: float = 0.5, pace: float = 0.1, reached: bool = False,
) -> tuple[Numbers, dict[int, Tensor], float]:  # fmt: skip
    prototypes: dict[int, Tensor] = {}
    radius, asked = 0.0, 0
    for task, (images, labels) in enumerate(data):
        held, seen = sorted(set(labels.tolist())), list(range(2 * task + 2))
        for round in range(ROUNDS):
            asked += 1
            generator = torch.Generator().manual_seed(seed_of(0, 0, asked))
            table = order(len(labels), STEPS * BATCH, generator).view(STEPS, BATCH)
            v = {name: value.clone() for name, value in w.items()}
            learned = {n: t.requires_grad_() for n, t in v.items() if "running" not in n and "tracked" not in n}
            speed: Numbers = {}

            def replayed(classes: list[int], g: torch.Generator = generator, r: float = radius) -> tuple[Any, Any]:
                draws, noise = torch.rand(BATCH, 1, generator=g), torch.randn(BATCH, WIDTH, generator=g)
                which = [classes[int(u * len(classes))] for u in draws[:, 0].tolist()] if classes else []
                return [prototypes[j] + r * n for j, n in zip(which, noise, strict=False)], which

            for s, index in enumerate(table):
                x, y = images[index].double(), labels[index].tolist()
                f = features(v, torch.cat([torch.rot90(x, k, (2, 3)) for k in range(4)]), True)
                loss = likelihood(f, v, [4 * c + k for k in range(4) for c in y], seen if reached else held)
                rows, which = replayed([j for j in sorted(prototypes) if j not in held])
                if which:
                    loss = loss + alpha * likelihood(torch.stack(rows), v, [4 * c for c in which], seen)
                rows, which = replayed(sorted(prototypes))
                loss = loss + beta * near(torch.stack([*f[:BATCH], *rows]), y + which, held)
                gradients = torch.autograd.grad(loss, list(learned.values()))
                shrink = min(1.0, CLIP / (float(sum((g**2).sum() for g in gradients) ** 0.5) + 1e-6))
                rate = LR * 0.5 * (1 + math.cos(math.pi * (round + s / STEPS) / ROUNDS))
                for (name, value), g in zip(learned.items(), gradients, strict=True):
                    push = shrink * g + DECAY * value.detach()
                    speed[name] = push if name not in speed else MOMENTUM * speed[name] + push
                    with torch.no_grad():
                        value -= rate * speed[name]
            v = {name: value.detach() for name, value in v.items()}
            own = features(v, images.double(), False)
            means = {j: own[labels == j].mean(0) for j in held}
            if task == 0:
                radius = float(sum(torch.cov(own[labels == j].T).trace() / WIDTH for j in held) / len(held)) ** 0.5
            for j, m in means.items():
                prototypes[j] = pace * m + (1 - pace) * prototypes[j] if j in prototypes else m
            w = {n: mix * v[n] + (1 - mix) * w[n] if v[n].is_floating_point() else v[n] for n in v}
    return w, prototypes, radius


def gap(one: Numbers, other: Numbers) -> float:
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).abs().max()) for n in one)


@cache
def both() -> tuple[Any, Any, Any, Any]:
    first, data, state = by_fcil()
    return first, data, state, lambda **other: centralised(first, data, **other)


@pytest.mark.usefixtures("in_double")
def test_one_client_is_the_centralised_algorithm() -> None:
    first, _, state, reference = both()
    w, prototypes, radius = reference()
    assert state.weights["head.weight"].dtype == torch.float64
    assert gap(state.weights, w) < 1e-9 < 1e-2 < gap(state.weights, first)
    assert float(state.radius) == pytest.approx(radius, abs=1e-9)
    assert gap(dict(enumerate(state.prototypes)), prototypes) < 1e-9  # type: ignore[arg-type]


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [({"prototype_weight": 0.0}, {"alpha": 0.0}), ({"contrast_weight": 0.0}, {"beta": 0.0}),
     ({"mix": 1.0}, {"mix": 1.0}), ({"pace": 1.0}, {"pace": 1.0}), ({"mask": "reached"}, {"reached": True})],
)  # fmt: skip
def test_another_setting_changes_the_result(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    _, _, state, reference = both()
    w, _, _ = reference(**theirs)
    assert gap(state.weights, w) > 1e-6 and gap(by_fcil(**ours)[2].weights, w) < 1e-9
