"""FedFTG: its losses, its generator, what the server does each round, and the whole of it written once more."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks import hard_images
from fcil.blocks.hard_images import (
    Teacher,
    classification,
    disagreement,
    ensemble,
    sameness,
    shares,
    soft_cross_entropy,
)
from fcil.blocks.softmax import Model
from fcil.blocks.training import weights_of
from fcil.experiment import run
from fcil.federation.engine import threads
from fcil.federation.loop import learn
from fcil.methods.fedftg import Client, State
from fcil.networks.conditional_generator import ConditionalGenerator
from fcil.parts import Parts, assemble
from fcil.plan import plan
from fcil.records import flatten, read_tensors
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import mask
from tests.conftest import TINY, tiny_plan
from tests.test_reference import order, seed_of

S = torch.tensor([[1.0, 2.0, 3.0, 0.5], [0.2, -1.0, 0.3, 2.0]])  # what the student says
T = torch.tensor([[2.0, 1.0, 7.0, 0.0], [-1.0, 0.5, -2.0, 0.0]])  # and a teacher
LABELS, WEIGHT = torch.tensor([1, 0]), torch.tensor([0.25, 1.0])
OLD, NEW, ALL = mask((0, 1), 4), mask((2, 3), 4), mask((0, 1, 2, 3), 4)
FEW = {"iterations": 2, "fakes": 8, "student_steps": 2, "latent": 8}

Numbers = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


# -- the losses -------------------------------------------------------------------------------------------------------


def test_the_share_of_a_teacher_is_its_share_of_the_images_of_a_class() -> None:
    counts = torch.tensor([[3.0, 0.0, 5.0, 0.0], [1.0, 2.0, 5.0, 0.0]])
    assert shares(counts).tolist() == [[0.75, 0.0, 0.5, 0.0], [0.25, 1.0, 0.5, 0.0]]


def test_disagreement_is_the_mean_difference_of_logits_by_weight() -> None:
    everywhere = (0.25 * (1 + 1 + 4 + 0.5) / 4 + 1.0 * (1.2 + 1.5 + 2.3 + 2) / 4) / 2
    among_old = (0.25 * (1 + 1) / 2 + 1.0 * (1.2 + 1.5) / 2) / 2
    assert disagreement(S, T, ALL, WEIGHT).item() == pytest.approx(everywhere)
    assert disagreement(S, T, OLD, WEIGHT).item() == pytest.approx(among_old)
    moved = T + torch.tensor([0.0, 0.0, 50.0, -50.0])
    assert disagreement(S, moved, OLD, WEIGHT).item() == pytest.approx(among_old), "other classes have no part"


def naive(logits: Tensor, label: int, classes: list[int]) -> float:
    return math.log(sum(math.exp(logits[j]) for j in classes)) - float(logits[label])


def test_the_cross_entropy_of_each_image_is_weighed_by_itself() -> None:
    each = [naive(T[0], 1, [0, 1, 2, 3]), naive(T[1], 0, [0, 1, 2, 3])]
    assert classification(T, LABELS, ALL, WEIGHT, False).item() == pytest.approx((0.25 * each[0] + each[1]) / 2)
    own = [naive(T[0], 1, [0, 1]), naive(T[1], 0, [0, 1])]
    assert classification(T, LABELS, OLD, WEIGHT, False).item() == pytest.approx((0.25 * own[0] + own[1]) / 2)


def test_the_released_code_weighs_the_mean() -> None:
    each = [naive(T[0], 1, [0, 1, 2, 3]), naive(T[1], 0, [0, 1, 2, 3])]
    assert classification(T, LABELS, ALL, WEIGHT, True).item() == pytest.approx(sum(each) / 2 * (0.25 + 1) / 2)


@pytest.mark.parametrize("quirk", [False, True])
def test_a_label_that_a_teacher_does_not_know_weighs_nothing_and_breaks_nothing(quirk: bool) -> None:
    logits = T.clone().requires_grad_()
    value = classification(logits, torch.tensor([1, 3]), OLD, torch.tensor([1.0, 0.0]), quirk)
    assert value.item() == pytest.approx(naive(T[0], 1, [0, 1]) / 2)
    (slope,) = torch.autograd.grad(value, logits)
    assert slope.isfinite().all() and slope[1].abs().max() == 0


def test_sameness_falls_where_images_differ_as_their_noise_does() -> None:
    noise, images = torch.randn(3, 5), torch.randn(3, 2, 4, 4)
    total = 0.0
    for i in range(3):
        for j in range(3):
            total += float(((noise[i] - noise[j]) ** 2).mean() * (images[i] - images[j]).abs().mean())
    assert sameness(noise, images).item() == pytest.approx(math.exp(-total / 9), rel=1e-5)
    assert sameness(noise, images[:1].expand(3, -1, -1, -1)).item() == 1.0
    assert sameness(noise, 2 * images) < sameness(noise, images) < sameness(noise, 0.5 * images)


def teachers(*what: tuple[Tensor, list[float]]) -> list[Teacher]:
    return [Teacher(torch.nn.Identity(), knows, torch.tensor(share)) for knows, share in what]


def test_teachers_speak_by_their_share_of_the_label() -> None:
    both = teachers((ALL, [0.75, 0.5, 0.0, 0.0]), (ALL, [0.25, 0.5, 1.0, 1.0]))
    said = ensemble([S, T], LABELS, both)
    assert torch.allclose(said[0], 0.5 * S[0].softmax(0) + 0.5 * T[0].softmax(0))
    assert torch.allclose(said[1], 0.75 * S[1].softmax(0) + 0.25 * T[1].softmax(0))


def test_a_teacher_says_nothing_of_classes_that_it_does_not_know() -> None:
    one = teachers((OLD, [1.0, 1.0, 0.0, 0.0]), (NEW, [0.0, 0.0, 1.0, 1.0]))
    said = ensemble([S, T], torch.tensor([1, 2]), one)
    assert torch.allclose(said[0], F.pad(S[0, :2].softmax(0), (0, 2)))
    assert torch.allclose(said[1], F.pad(T[1, 2:].softmax(0), (2, 0)))


def test_the_student_learns_soft_labels_among_the_classes_compared() -> None:
    target = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.3, 0.0, 0.0]])
    compared = torch.stack([ALL, OLD])
    total = -(target[0] * S[0].log_softmax(0)).sum() - (target[1, :2] * S[1, :2].log_softmax(0)).sum()
    for outputs in (4, 3):
        value = soft_cross_entropy(S, target, compared, torch.tensor(outputs))
        assert value.item() == pytest.approx(total.item() / (2 * outputs)), "images times outputs"


# -- the generator ----------------------------------------------------------------------------------------------------


def test_the_generator_has_the_parameters_of_the_paper() -> None:
    net = ConditionalGenerator(256, 100, (3, 32, 32))
    assert sum(p.numel() for p in net.parameters()) == 1_690_115


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 64, 64), (3, 84, 84)])
def test_the_generator_makes_images_of_any_benchmark(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    net = ConditionalGenerator(16, 10, shape, 8)
    noise, labels = torch.randn(4, 16), torch.tensor([0, 0, 3, 9])
    images = net(noise, labels)
    assert images.shape == (4, *shape)
    assert images.mean((0, 2, 3)).abs().max() < 1e-4 and (images.std((0, 2, 3)) - 1).abs().max() < 0.01
    net.eval()
    one = net(noise[:1], labels[:1])
    assert torch.allclose(net(noise, labels)[:1], one, atol=1e-5), "an image does not depend on those beside it"
    assert not torch.allclose(net(noise[1:2], labels[:1]), one), "noise matters"
    assert not torch.allclose(net(noise[:1], labels[2:3]), one), "and so does the label"


def test_the_generator_is_for_square_images() -> None:
    with pytest.raises(ValueError, match="square here, not 8x16"):
        ConditionalGenerator(4, 2, (1, 8, 16))


# -- a run, under observation ------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """A run, and what went by in it."""

    parts: Parts
    messages: list[Model] = field(default_factory=list)  # to the first client of each round
    replies: list[list[Any]] = field(default_factory=list)  # of each round
    tuned: list[dict[str, Any]] = field(default_factory=list)  # what the server tuned with
    steps: list[list[str]] = field(default_factory=list)  # whose turn it was
    drawn: list[list[int]] = field(default_factory=list)  # labels of all images made
    states: list[State] = field(default_factory=list)  # after each round
    fits: list[tuple[Tensor, Tensor, Any]] = field(default_factory=list)  # of each training: classes, labels, the whole


@cache
def watched(method: str = "fedftg", **changes: Any) -> Watched:
    benchmark = replace(TINY, **{k: changes.pop(k) for k in list(changes) if hasattr(TINY, k)})
    parts = assemble(
        tiny_plan(method, benchmark, **{"rounds": 2, "steps": 2, **FEW, **changes}), "cpu", Scenario(benchmark, 0)
    )
    found, server = Watched(parts), parts.server
    fit, tune, deliver = parts.engine.fit, server.tune, parts.transport.deliver  # type: ignore[attr-defined]

    def delivering(who: Any, handler: Any, message: Any, call: Any) -> Any:
        found.messages.append(message)
        found.replies.append([])
        for client, answered in deliver(who, handler, message, call):
            found.replies[-1].append(answered.reply)
            yield client, answered

    def tuning(weights: list[Numbers], knows: Tensor, counts: Tensor, round: int, seed: int) -> None:
        found.steps.append([])
        found.drawn.append([])
        before = {n: t.clone() for n, t in server.state.weights.items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hard_images, "descend", descending(found, server, hard_images.descend))
            patch.setattr(server.generator, "forward", making(found, server.generator.forward))  # type: ignore[attr-defined]
            tune(weights, knows, counts, round, seed)
        found.tuned.append({"weights": weights, "knows": knows, "counts": counts, "before": before})

    def fitting(wanted: Any, *rest: Any) -> Any:
        if len(wanted.pool):
            found.fits.append((wanted.given, wanted.pool.labels, wanted))
        return fit(wanted, *rest)

    parts.transport.deliver, parts.engine.fit = delivering, fitting  # type: ignore[method-assign, assignment]
    server.tune = tuning  # type: ignore[attr-defined]
    for line in learn(parts.scenario, server, parts.door, parts.engine):
        if line["kind"] == "round":
            found.states.append(State(**vars(server.state)))
    return found


def descending(found: Watched, server: Any, descend: Callable[..., None]) -> Callable[..., None]:
    def descended(value: Tensor, optimizer: torch.optim.Optimizer) -> None:
        who = "generator" if isinstance(optimizer, torch.optim.Adam) else "student"
        modes = server.generator.training, server.student.training
        found.steps[-1].append(f"{who} {modes}")
        descend(value, optimizer)

    return descended


def making(found: Watched, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(noise: Tensor, labels: Tensor) -> Tensor:
        found.drawn[-1] += labels.tolist()
        return forward(noise, labels)

    return made


def same(one: Numbers, other: Numbers) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("method", ["fedftg", "fedftg-plain"])
def test_every_round_tunes_the_average_and_the_next_one_starts_from_it(method: str) -> None:
    of = watched(method)
    assert len(of.tuned) == len(of.states) == 6
    for before, after, message in zip(of.states[:-1], of.states[1:], of.messages[1:], strict=True):
        assert same(message.weights, before.weights)
        assert not same(before.generator, after.generator), "the generator goes on learning"
    for tuned, state, replies in zip(of.tuned, of.states, of.replies, strict=True):
        mean = torch.stack([reply.weights["head.weight"] for reply in replies]).mean(0)
        assert torch.allclose(tuned["before"]["head.weight"], mean, atol=1e-7)
        assert not torch.equal(state.weights["head.weight"], mean)


@pytest.mark.parametrize(("method", "train"), [("fedftg", False), ("fedftg-plain", True)])
def test_the_generator_takes_a_step_for_each_teacher_then_the_student_its_own(method: str, train: bool) -> None:
    of = watched(method)
    for state, steps in zip(of.states, of.steps, strict=True):
        count = 2 + bool(state.old_weights)
        assert steps == 2 * (count * ["generator (True, False)"] + 2 * [f"student (False, {train})"])
    assert [bool(state.old_weights) for state in of.states] == [False, False, *[method == "fedftg"] * 4]


def test_the_clients_statistics_stand_after_tuning() -> None:
    for method in ("fedftg", "fedftg-plain"):
        of = watched(method)
        for tuned, state in zip(of.tuned, of.states, strict=True):
            buffers = [name for name in state.weights if "running" in name or "num_batches" in name]
            assert buffers and all(torch.equal(state.weights[n], tuned["before"][n]) for n in buffers)


def test_clients_send_counts_and_nothing_else_of_their_images() -> None:
    of = watched()
    for state, replies in zip(of.states, of.replies, strict=True):
        for reply in replies:
            assert set(vars(reply)) == {"weights", "count", "counts"}
            assert reply.counts.shape == (6,) and reply.counts.sum() == reply.count
            assert (reply.counts[~state.seen] == 0).all() and (reply.counts[state.old] == 0).all()


def test_the_old_teacher_is_the_global_model_after_the_last_task() -> None:
    of = watched()
    for task in (1, 2):
        for state in of.states[2 * task : 2 * task + 2]:
            assert same(state.old_weights, of.states[2 * task - 1].weights)
            assert state.old.nonzero()[:, 0].tolist() == list(range(2 * task))


def test_its_counts_are_those_of_a_round_on_average() -> None:
    of = watched()
    for task in (0, 1):
        rounds = [sum(reply.counts for reply in replies) for replies in of.replies[2 * task : 2 * task + 2]]
        own = slice(2 * task, 2 * task + 2)
        for state in of.states[2 * task + 1 :]:
            assert torch.allclose(state.counts[own], (rounds[0] + rounds[1])[own] / 2)


def test_rounds_that_nobody_answered_have_no_part_in_the_counts() -> None:
    of = watched(lost=0.6, active=2, rounds=6, steps=1, iterations=1)
    silent = 0
    for task in (0, 1, 2):
        rounds, state = of.replies[6 * task : 6 * task + 6], of.states[6 * task + 5]
        came = [sum(reply.counts for reply in replies if reply.count) for replies in rounds if replies]
        silent += 6 - len(came)
        assert state.rounds == len(came) > 0
        assert torch.allclose(state.counts[2 * task : 2 * task + 2], (sum(came) / len(came))[2 * task : 2 * task + 2])
    assert silent, "in some round nobody answered"


def test_a_class_that_comes_late_counts_from_then_on_and_is_taught_from_the_next_task() -> None:
    of = watched(lag=1, clients=3, active=3, partition="class_subset", class_share=0.5)
    first: dict[int, tuple[int, Tensor]] = {}  # of each class the task in which images came, and how many a round
    late = set[int]()
    for task in (0, 1, 2):
        rounds = slice(2 * task, 2 * task + 2)
        state, known = of.states[rounds][-1], set(first)
        assert set(state.old.nonzero()[:, 0].tolist()) == known <= set(range(2 * task))
        sums = sum(reply.counts for replies in of.replies[rounds] for reply in replies)
        for j in set(sums.nonzero()[:, 0].tolist()) - known:  # type: ignore[union-attr]
            first[j] = task, sums[j] / 2  # type: ignore[index]
            late |= {j} if j < 2 * task else set()
        assert state.counts.tolist() == pytest.approx([float(first[j][1]) if j in first else 0.0 for j in range(6)])
    assert late and any(late & set(drawn) for drawn in of.drawn[4:]), "made in the task in which it is taught"


def test_a_client_that_is_behind_learns_and_teaches_the_classes_of_its_own_task() -> None:
    of = watched(lag=1, active=4)
    behind = 0
    for task in (1, 2):
        for tuned in of.tuned[2 * task : 2 * task + 2]:
            for knows, counts in zip(tuned["knows"], tuned["counts"], strict=True):
                own = int(counts.nonzero().max()) // 2
                assert knows.nonzero()[:, 0].tolist() == [2 * own, 2 * own + 1]
                behind += own < task
    assert behind
    for given, labels, _ in of.fits:
        own = int(labels.max()) // 2
        assert given.nonzero()[:, 0].tolist() == [2 * own, 2 * own + 1]


def test_old_classes_are_made_where_an_old_model_teaches_them() -> None:
    ours, plain = watched(), watched("fedftg-plain")
    for task in range(3):
        rounds = slice(2 * task, 2 * task + 2)
        old, new = set(range(2 * task)), {2 * task, 2 * task + 1}
        made, published = ({j for drawn in of.drawn[rounds] for j in drawn} for of in (ours, plain))
        assert made >= new and made <= old | new and published == new
        assert bool(made & old) == bool(old)


def test_labels_come_as_often_as_teachers_have_images_of_them() -> None:
    of = watched(iterations=8, fakes=128, student_steps=1, tasks=2, train_limit=20)
    state, last = of.states[-1], of.tuned[-1]
    wanted = last["counts"].sum(0) + state.counts * state.old
    found = torch.bincount(torch.tensor(of.drawn[-1]), minlength=4) / len(of.drawn[-1])
    assert torch.allclose(found, wanted / wanted.sum(), atol=0.05)


def test_a_class_that_no_teacher_has_is_not_made() -> None:
    of = watched(clients=12, active=1, train_limit=8)
    rare = 0
    for tuned, state, drawn in zip(of.tuned, of.states, of.drawn, strict=True):
        held = set((tuned["counts"].sum(0) + state.counts * state.old).nonzero()[:, 0].tolist())
        assert set(drawn) <= held
        rare += len(held) < int(state.seen.sum())
    assert rare, "some round had no client with some class"


def test_only_models_that_came_teach() -> None:
    of = watched(lost=0.5, active=4)
    assert {len(tuned["weights"]) for tuned in of.tuned} != {4}
    came = [[reply for reply in replies if reply.count] for replies in of.replies]
    assert [len(tuned["weights"]) for tuned in of.tuned] == [len(replies) for replies in came if replies]
    most = max(len(t["weights"]) + bool(s.old_weights) for t, s in zip(of.tuned, of.states, strict=False))
    assert len(of.parts.server.bench.scratch) <= max(most, 4), "networks for the teachers of one round, and no more"  # type: ignore[attr-defined]


def test_a_client_that_stayed_behind_teaches_what_it_has() -> None:
    of = watched(staying=0.5, active=4)
    stayed = [reply for replies in of.replies[2:] for reply in replies if reply.counts[:2].sum()]
    assert stayed and all(t.isfinite().all() for t in of.states[-1].weights.values())


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_client_learns_its_own_classes_or_as_published_all(norm: str) -> None:
    for method, how, expected in (
        ("fedftg", {}, [2, 3]), ("fedftg", {"own_classes": False}, [0, 1, 2, 3]), ("fedftg-plain", {}, [0, 1, 2, 3]),
    ):  # fmt: skip
        given, _, fit = watched(method, norm=norm, tasks=2, rounds=1, steps=1, **how).fits[-1]
        assert given.nonzero()[:, 0].tolist() == expected
        assert (fit.momentum, fit.weight_decay) == (0.0, 1e-3), "not the protocol's"


def test_pictures_of_every_class_seen(tmp_path: Any) -> None:
    run(
        "fedftg", "digits", settings={"tasks": 2, "rounds": 1, "steps": 1, **FEW}, out=tmp_path, device="cpu", workers=1
    )
    pictures, _ = read_tensors(tmp_path / "replay.safetensors")
    assert {name for name in pictures if "/made/" in name} >= {f"1/made/{j}" for j in range(4)}
    assert all(p.dtype == torch.uint8 and p.shape == (1, 8, 8) for p in pictures.values())
    assert (tmp_path / "replay.png").exists()


# -- the whole of it, once more, with nothing of fcil -----------------------------------------------------------------

NEAR = 1e-8  # what Adam makes of slopes that are 0 but for rounding, as those of biases before batch norm
TASKS, ROUNDS, STEPS, BATCH = 2, 2, 3, 16
LR, MOMENTUM, DECAY, CLIP = 0.1, 0.9, 5e-3, 1.0
TUNE = {"iterations": 2, "fakes": 8, "student_steps": 3, "latent": 8, "student_lr": 0.5, "student_decay": 0.1,
        "generator_lr": 0.02, "classify": 0.7, "diversify": 3.0}  # fmt: skip
ALONE = replace(TINY, clients=1, active=1, train_limit=30, test_limit=5, tasks=TASKS)
PROTOCOL = {"rounds": ROUNDS, "steps": STEPS, "batch_size": BATCH, "sgd_momentum": MOMENTUM, "sgd_decay": DECAY,
            "clip": CLIP, "lr": LR}  # fmt: skip


def normed(w: Numbers, name: str, x: Tensor, training: bool) -> Tensor:
    if training:
        mean, var, n = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), x.numel() / x.shape[1]
        with torch.no_grad():
            w[f"{name}.running_mean"] = 0.9 * w[f"{name}.running_mean"] + 0.1 * mean
            w[f"{name}.running_var"] = 0.9 * w[f"{name}.running_var"] + 0.1 * var * n / (n - 1)
    else:
        mean, var = w[f"{name}.running_mean"], w[f"{name}.running_var"]
    x = (x - mean.view(-1, 1, 1)) / (var.view(-1, 1, 1) + 1e-5).sqrt()
    if f"{name}.weight" not in w:
        return x
    return x * w[f"{name}.weight"].view(-1, 1, 1) + w[f"{name}.bias"].view(-1, 1, 1)


def scores(w: Numbers, x: Tensor, training: bool = False) -> Tensor:
    for layer, stride in enumerate((1, 2, 2)):
        x = F.conv2d(x, w[f"body.layers.{layer}.0.weight"], stride=stride, padding=1)
        x = normed(w, f"body.layers.{layer}.1", x, training).relu()
    return x.mean((2, 3)) @ w["head.weight"].T + w["head.bias"]


def generated(g: Numbers, z: Tensor, y: Tensor, training: bool) -> Tensor:
    one_hot = torch.eye(g["label.weight"].shape[1])[y]
    parts = [x @ g[f"{n}.weight"].T + g[f"{n}.bias"] for n, x in (("noise", z), ("label", one_hot))]
    x = normed(g, "norms.0", torch.cat([p.view(len(z), -1, 2, 2) for p in parts], 1), training)
    for layer in (0, 1):
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        x = F.conv2d(x, g[f"convolutions.{layer}.weight"], g[f"convolutions.{layer}.bias"], padding=1)
        x = normed(g, f"norms.{layer + 1}", x, training)
        x = torch.where(x > 0, x, 0.2 * x)
    x = F.conv2d(x, g["convolutions.2.weight"], g["convolutions.2.bias"], padding=1)
    return normed(g, "last", x.tanh(), training)


def is_parameter(name: str) -> bool:
    return not name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def thawed(w: Numbers) -> tuple[Numbers, Numbers]:
    w = {name: value.detach().clone() for name, value in w.items()}
    return w, {name: value.requires_grad_() for name, value in w.items() if is_parameter(name)}


def among(logits: Tensor, labels: Tensor, classes: list[int]) -> Tensor:
    return logits[:, classes].exp().sum(1).log() - logits[range(len(labels)), labels]


def local_training(w: Numbers, x: Tensor, y: Tensor, classes: list[int], round: int, step: int) -> Numbers:
    w, learned = thawed(w)
    drawn = order(len(y), STEPS * BATCH, torch.Generator().manual_seed(seed_of(0, 0, step))).view(STEPS, BATCH)
    speed: Numbers = {}
    for s, index in enumerate(drawn):
        lr = LR * 0.5 * (1 + math.cos(math.pi * (round + s / STEPS) / ROUNDS))
        loss = among(scores(w, x[index], True), y[index], classes).mean()
        gradients = torch.autograd.grad(loss, list(learned.values()))
        shrink = min(1.0, CLIP / (float(sum((g**2).sum() for g in gradients)) ** 0.5 + 1e-6))
        for (name, value), slope in zip(learned.items(), gradients, strict=True):
            push = shrink * slope + DECAY * value.detach()
            speed[name] = push if name not in speed else MOMENTUM * speed[name] + push
            with torch.no_grad():
                value -= lr * speed[name]
    return {name: value.detach() for name, value in w.items()}


@dataclass
class Voice:
    """A teacher of the reference: a network, its classes, and how many images of each it has."""

    weights: Numbers
    classes: list[int]
    counts: list[float]


def tuned(
    w: Numbers, g: Numbers, voices: list[Voice], task: int, round: int, norm: str, quirk: bool
) -> tuple[Numbers, Numbers]:
    kept = dict(w)
    (w, w_learned), (g, g_learned) = thawed(w), thawed(g)
    total = torch.tensor([v.counts for v in voices]).sum(0)
    random, number = torch.Generator().manual_seed(seed_of(0, "fakes", task, round)), TUNE["iterations"] * TUNE["fakes"]
    labels = torch.multinomial(total, int(number), replacement=True, generator=random)
    noise = torch.randn(int(number), int(TUNE["latent"]), generator=random)
    rate = 0.5 * (1 + math.cos(math.pi * round / ROUNDS))
    first, second, moves = ({n: torch.zeros_like(v) for n, v in g_learned.items()} for _ in range(2)), None, 0
    first, second = first
    for z, y in zip(noise.split(8), labels.split(8), strict=True):
        alphas = [torch.tensor([v.counts[j] / float(total[j]) for j in y.tolist()]) for v in voices]
        for voice, alpha in zip(voices, alphas, strict=True):
            x = generated(g, z, y, True)
            said, mine, c = scores(voice.weights, x), scores(w, x), voice.classes
            apart = (mine[:, c] - said[:, c]).abs().mean(1)
            known = torch.tensor([j in c for j in y.tolist()])
            wrong = torch.zeros(len(y))
            if known.any():
                wrong = wrong.index_put((known,), among(said[known], y[known], c))
            if quirk:
                wrong = wrong[known].mean().expand(len(y))
            product = torch.stack(
                [((z[i] - z[j]) ** 2).mean() * (x[i] - x[j]).abs().mean() for i in range(8) for j in range(8)]
            )
            loss = -(apart * alpha).mean() + TUNE["classify"] * (wrong * alpha).mean()
            loss = loss + TUNE["diversify"] / len(voices) * torch.exp(-product.mean())
            moves += 1
            slopes = torch.autograd.grad(loss, list(g_learned.values()))
            for (name, value), slope in zip(g_learned.items(), slopes, strict=True):
                first[name] = 0.9 * first[name] + 0.1 * slope
                second[name] = 0.999 * second[name] + 0.001 * slope**2
                mean, square = first[name] / (1 - 0.9**moves), second[name] / (1 - 0.999**moves)
                with torch.no_grad():
                    value -= TUNE["generator_lr"] * rate * mean / (square.sqrt() + 1e-8)
        x = generated(g, z, y, False).detach()
        says = [scores(voice.weights, x).detach() for voice in voices]
        for _ in range(int(TUNE["student_steps"])):
            mine, loss = scores(w, x, norm == "batch"), torch.zeros(())
            for i in range(8):
                heard = {j for v, a in zip(voices, alphas, strict=True) if a[i] > 0 for j in v.classes}
                mine_log = mine[i] - torch.stack([mine[i, j] for j in sorted(heard)]).exp().sum().log()
                for voice, alpha, said in zip(voices, alphas, says, strict=True):
                    word = said[i, voice.classes].softmax(0)
                    if alpha[i] > 0:
                        loss = loss - alpha[i] * (word * mine_log[voice.classes]).sum()
            slopes = torch.autograd.grad(loss / (8 * (2 * task + 2)), list(w_learned.values()))
            with torch.no_grad():
                for value, slope in zip(w_learned.values(), slopes, strict=True):
                    value -= TUNE["student_lr"] * rate * (slope + TUNE["student_decay"] * value)
    w = {name: (w[name] if is_parameter(name) else kept[name]).detach() for name in w}
    return w, {name: value.detach() for name, value in g.items()}


def gap(one: Numbers, other: Numbers) -> float:
    floats = [n for n in one if not n.endswith("num_batches_tracked")]
    return max((one[n] - other[n]).abs().max().item() for n in floats)


FORMS = [("fedftg", "clients", False), ("fedftg", "batch", False), ("fedftg", "clients", True),
         ("fedftg-plain", "batch", False), ("fedftg-plain", "batch", True)]  # fmt: skip


@pytest.mark.parametrize(("method", "norm", "quirk"), FORMS)
@pytest.mark.usefixtures("in_double")
def test_one_client_is_the_centralised_algorithm(method: str, norm: str, quirk: bool) -> None:
    settings = {**PROTOCOL, **TUNE, "student_norm": norm, "code_quirk": quirk}
    parts = assemble(plan(method, ALONE, settings=settings), "cpu", workers=1)
    w, g = (
        {n: t.clone() for n, t in part.items()} for part in (parts.server.state.weights, parts.server.state.generator)
    )
    start, data, step = dict(w), [], 0
    for task in parts.scenario.tasks:
        parts.scenario.begin(task)
        data.append(parts.scenario.local(0, task))
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        pass
    counts = [0.0] * 4
    for task, own in enumerate(data):
        x, y, old_w = own.images.double() / 127.5 - 1, own.labels, dict(w)
        old, new = list(range(2 * task)), [2 * task, 2 * task + 1]
        plain = method == "fedftg-plain"
        classes = old + new if plain else new
        mine = [float((y == j).sum()) for j in range(4)]
        for round in range(ROUNDS):
            step += 1
            w = local_training(w, x, y, classes, round, step)
            voices = [Voice(w, classes, mine)]
            if old and not plain:
                voices.append(Voice(old_w, old, [n if j in old else 0.0 for j, n in enumerate(counts)]))
            w, g = tuned(w, g, voices, task, round, norm, quirk)
        counts = [n or m for n, m in zip(counts, mine, strict=True)]
    assert parts.server.state.weights["head.weight"].dtype == torch.float64
    assert gap(parts.server.state.weights, w) < 1e-9 and gap(parts.server.state.generator, g) < NEAR
    assert gap(w, start) > 1e-2, "nothing was learned, so nothing was compared"


@pytest.mark.usefixtures("in_double")
def test_several_teachers_count_by_their_images_of_each_class() -> None:
    parts = assemble(plan("fedftg", ALONE, settings={**PROTOCOL, **TUNE}), "cpu", workers=1)
    server: Any = parts.server
    nets = [parts.setting.classifier() for _ in range(3)]
    for number, net in enumerate(nets):
        for p in net.parameters():
            p.data.copy_(p + 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))
    one, two, old = (weights_of(net) for net in nets)
    s = server.state
    s.seen, s.old, s.old_weights = mask((0, 1, 2, 3), 4), mask((0, 1), 4), old
    s.counts = torch.tensor([5.0, 9.0, 0.0, 0.0])
    counts = torch.tensor([[0.0, 4.0, 7.0, 2.0], [0.0, 0.0, 1.0, 8.0]])  # the first one stayed behind
    voices = [Voice(one, [1, 2, 3], counts[0].tolist()), Voice(two, [2, 3], counts[1].tolist()),
              Voice(old, [0, 1], [5.0, 9.0, 0.0, 0.0])]  # fmt: skip
    start = dict(s.weights)
    w, g = tuned(s.weights, s.generator, voices, 1, 1, "clients", False)
    knows = torch.stack([mask((1, 2, 3), 4), mask((2, 3), 4)])
    server.tune([one, two], knows, counts, 1, seed_of(0, "fakes", 1, 1))
    assert gap(s.weights, w) < 1e-9 and gap(s.generator, g) < NEAR and gap(w, start) > 1e-3


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("change", [{"classify": 0.0}, {"diversify": 0.0}, {"old_teacher": False}, {"code_quirk": True},
                                    {"student_steps": 1}, {"student_decay": 0.0}, {"own_classes": False}])  # fmt: skip
def test_every_part_counts(change: dict[str, Any]) -> None:
    def last(**settings: Any) -> Numbers:
        few = replace(TINY, tasks=2, train_limit=20)
        parts = assemble(tiny_plan("fedftg", few, rounds=2, steps=1, **{**FEW, **settings}), "cpu", workers=1)
        for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
            pass
        return flatten(parts.server.state)

    one, other = last(), last(**change)
    weights = [n for n in one if n.startswith("weights/") and one[n].is_floating_point()]
    assert max((one[n] - other[n]).abs().max().item() for n in weights) > 1e-6, "more than rounding"


def test_disagreement_is_what_the_generator_looks_for() -> None:
    """With nothing else to do, it finds images on which student and teacher differ more than on those it began with."""
    torch.manual_seed(0)
    parts = assemble(tiny_plan("fedftg", classify=0.0, diversify=0.0, **{**FEW, "iterations": 20}), "cpu")
    server: Any = parts.server
    other = weights_of(parts.setting.classifier())
    server.state.seen = mask((0, 1), 6)
    noise, labels = torch.randn(64, 8), torch.arange(64) % 2

    def apart() -> float:
        net = parts.setting.classifier().eval()
        generator = ConditionalGenerator(8, 6, (1, 8, 8), 16).eval()
        generator.load_state_dict(server.state.generator)
        with torch.no_grad():
            images = net.normalise.pixels(generator(noise, labels))
            net.load_state_dict(start)
            mine = net(images)
            net.load_state_dict(other)
            return (mine - net(images))[:, :2].abs().mean().item()

    start = dict(server.state.weights)
    before = apart()
    server.config = replace(server.config, student_lr=1e-12)
    server.tune([other], mask((0, 1), 6)[None], torch.tensor([[5.0, 5.0, 0, 0, 0, 0]]), 0, 1)
    assert apart() > 1.2 * before


def test_the_client_has_no_network_but_its_own() -> None:
    parts = assemble(tiny_plan("fedftg", **FEW), "cpu")
    client: Client = parts.engine.client  # type: ignore[assignment]
    assert list(client.networks()) == ["net"] and set(vars(parts.server.broadcast())) == {"weights", "seen"}


def test_a_client_that_says_it_has_images_and_counts_none_breaks_no_round() -> None:
    parts = assemble(tiny_plan("fedftg"), "cpu", workers=1)
    server: Any = parts.server
    for task in parts.scenario.tasks:
        known = server.known(task, torch.zeros(len(server.state.seen)))
        assert tuple(known.nonzero()[:, 0].tolist()) == task.new
