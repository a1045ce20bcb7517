"""REMIND: what is frozen, quantised, kept, replayed and sent; and one client is the centralised algorithm."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import beta as beta_distribution
from scipy.stats import kstest
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks.feature_replay import beta, cropped, kept, mixed_cross_entropy, replay_loss
from fcil.blocks.quantizer import coded, decoded
from fcil.blocks.training import loaded
from fcil.errors import UserError
from fcil.federation.engine import threads
from fcil.federation.loop import Line, learn
from fcil.method import Fit
from fcil.networks import build
from fcil.networks.split import SplitClassifier
from fcil.parts import Parts, assemble
from fcil.plan import plan
from fcil.records import flatten, size_in_bytes, unflatten
from fcil.scenario.tasks import mask
from tests import test_reference as reference
from tests.conftest import tiny_plan
from tests.test_reference import order, seed_of

ALL = mask((0, 1, 2, 3), 4)
LOGITS = torch.tensor([[1.0, 2.0, 3.0, 0.5], [0.2, -1.0, 0.3, 2.0]])
LABELS, OTHERS = torch.tensor([2, 1]), torch.tensor([0, 3])
UNIT = 32  # bytes of a digit's code: 16 places, 2 codebooks

Numbers = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with threads(1):
        yield


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- a network in two parts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(
    ("network", "shape", "above", "maps"),
    [
        ("resnet18", (3, 32, 32), 1, (512, 4, 4)),
        ("resnet18", (3, 32, 32), 2, (256, 8, 8)),
        ("resnet8", (3, 32, 32), 1, (32, 16, 16)),
        ("small", (1, 8, 8), 1, (32, 4, 4)),
        ("small", (1, 8, 8), 2, (16, 8, 8)),
    ],
)
def test_both_parts_together_are_the_network(
    network: str, shape: tuple[int, int, int], above: int, maps: tuple[int, int, int], norm: str
) -> None:
    torch.manual_seed(0)
    net = build(network, shape, 4, norm).eval()
    images = torch.rand(2, *shape, generator=draws())
    with torch.no_grad():
        whole = net(images)
        split = SplitClassifier(net, above).eval()
        assert torch.allclose(split(images), whole, atol=1e-5) and whole.abs().max() > 0
        assert split.maps_of(shape) == maps
        assert torch.allclose(split.upper(split.lower(images)), whole, atol=1e-5)
    parts = {name.split(".")[0] for name in split.state_dict()}
    assert parts == {"lower", "upper"}
    assert sum(p.numel() for p in split.parameters()) == sum(p.numel() for p in net.parameters())


def test_the_upper_part_is_the_last_block_and_the_head() -> None:
    upper = SplitClassifier(build("resnet18", (3, 32, 32), 100), 1).upper
    assert sum(p.numel() for p in upper.parameters()) == 2 * (512 * 512 * 9 + 2 * 512) + 512 * 100 + 100


@pytest.mark.parametrize("above", [0, 3, 7])
def test_a_part_without_pieces_is_refused(above: int) -> None:
    with pytest.raises(UserError, match=f"1 to 2 can be plastic, not {above}"):
        SplitClassifier(build("small", (1, 8, 8), 4), above)


# -- the loss ---------------------------------------------------------------------------------------------------------


def test_known_answers() -> None:
    assert mixed_cross_entropy(LOGITS, LABELS, OTHERS, torch.tensor(1.0), ALL).item() == pytest.approx(
        1.897826, abs=1e-6
    )
    parts = [float(F.cross_entropy(LOGITS, labels)) for labels in (LABELS, OTHERS)]
    half = mixed_cross_entropy(LOGITS, LABELS, OTHERS, torch.tensor(0.3), ALL)
    assert half.item() == pytest.approx(0.3 * parts[0] + 0.7 * parts[1], rel=1e-6)


def test_classes_that_are_not_seen_do_not_count() -> None:
    some = mixed_cross_entropy(LOGITS, LABELS, LABELS, torch.tensor(0.5), mask((0, 1, 2), 4))
    assert some.item() == pytest.approx(float(F.cross_entropy(LOGITS[:, :3], LABELS)), rel=1e-6)


def test_mixing_shares_follow_the_beta_distribution() -> None:
    generator = draws()
    for alpha in (0.1, 0.5, 1.0):
        found = torch.stack([beta(alpha, generator) for _ in range(3000)])
        assert found.dtype == torch.float64 and kstest(found.numpy(), beta_distribution(alpha, alpha).cdf).pvalue > 1e-3
    assert torch.equal(beta(0.1, draws(5)), beta(0.1, draws(5))) and beta(0.1, draws(5)) != beta(0.1, draws(6))


def windows_from(draws: Tensor, least: float) -> list[tuple[float, float, float, float]]:
    """Left, top, width and height of each piece, in shares of the side, from four random numbers for each."""
    found = []
    for u, v, x, y in draws.T.tolist():
        area = least + (1 - least) * u
        ratio = min(max(0.75 * (16 / 9) ** v, area), 1 / area)
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        found.append((x * (1 - w), y * (1 - h), w, h))
    return found


def bilinear(image: Tensor, x: float, y: float) -> Tensor:
    """The value of (channels, height, width) at a point, in pixels whose middles are at 0.5, 1.5, ..."""
    _, height, width = image.shape
    x, y = min(max(x - 0.5, 0), width - 1), min(max(y - 0.5, 0), height - 1)
    left, top = min(int(x), width - 2), min(int(y), height - 2)
    a, b = x - left, y - top
    upper = (1 - a) * image[:, top, left] + a * image[:, top, left + 1]
    lower = (1 - a) * image[:, top + 1, left] + a * image[:, top + 1, left + 1]
    return (1 - b) * upper + b * lower


def piece(image: Tensor, window: tuple[float, float, float, float]) -> Tensor:
    """A piece of (channels, height, width), stretched to the whole."""
    (left, top, w, h), (_, height, width) = window, image.shape
    rows = [(top + h * (r + 0.5) / height) * height for r in range(height)]
    columns = [(left + w * (c + 0.5) / width) * width for c in range(width)]
    return torch.stack([torch.stack([bilinear(image, x, y) for x in columns], 1) for y in rows], 1)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize(("height", "width"), [(4, 4), (8, 8), (3, 5)])
def test_a_crop_is_a_stretched_piece_of_its_map(height: int, width: int) -> None:
    maps = torch.randn(40, 2, height, width, generator=draws(1))
    found = windows_from(torch.rand(4, 40, generator=draws(2)), 0.5)
    by_hand = torch.stack([piece(own, window) for own, window in zip(maps, found, strict=True)])
    assert (cropped(maps, 0.5, draws(2)) - by_hand).abs().max() < 1e-9
    assert torch.allclose(cropped(maps, 1.0, draws(2)), maps), "the whole map is itself"
    areas = [w * h for _, _, w, h in windows_from(torch.rand(4, 400, generator=draws(2)), 0.5)]
    assert min(areas) >= 0.5 - 1e-9 and max(areas) <= 1 + 1e-9 and max(areas) - min(areas) > 0.4


def upper_by_hand(maps: Tensor) -> Tensor:
    """A fixed upper part that is not linear."""
    flat = maps.flatten(1)
    weight = torch.linspace(-1, 1, flat.shape[1] * 4).view(-1, 4).to(flat)
    return (flat @ weight).sin() * 3


def loss(new: int = 3, old: int = 8, alpha: float = 0.4, least: float = 0.5, seed: int = 0) -> Tensor:
    maps = torch.randn(new + old, 2, 4, 4, generator=draws(9))
    labels = torch.arange(new + old) % 4
    return replay_loss(upper_by_hand, maps, labels, new, ALL, alpha, least, draws(seed))


@pytest.mark.usefixtures("in_double")
def test_the_loss_by_hand() -> None:
    maps, labels, generator = torch.randn(11, 2, 4, 4, generator=draws(9)), torch.arange(11) % 4, draws(0)
    cut = cropped(maps, 0.5, generator)
    share = float(beta(0.4, generator))
    total = 0.0
    for i in range(3):
        total += float(F.cross_entropy(upper_by_hand(cut[i : i + 1]), labels[i : i + 1]))
    for i in range(3, 7):
        said = upper_by_hand((share * cut[i] + (1 - share) * cut[i + 4])[None])
        total += share * float(F.cross_entropy(said, labels[i : i + 1]))
        total += (1 - share) * float(F.cross_entropy(said, labels[i + 4 : i + 5]))
    assert 0.001 < share < 0.999 and float(loss()) == pytest.approx(total / 7)


@pytest.mark.usefixtures("in_double")
def test_every_part_of_the_loss_matters() -> None:
    values = [float(loss(**without)) for without in ({}, {"alpha": 0.0}, {"least": 0.0}, {"old": 0}, {"seed": 1})]
    assert len({round(v, 9) for v in values}) == 5
    plain = loss(alpha=0.0, least=0.0, old=0)
    maps = torch.randn(3, 2, 4, 4, generator=draws(9))
    assert float(plain) == pytest.approx(float(F.cross_entropy(upper_by_hand(maps), torch.arange(3))))


# -- what is kept -----------------------------------------------------------------------------------------------------


def some_codes(sizes: dict[int, int], seed: int = 0) -> dict[int, Tensor]:
    generator = draws(seed)
    return {j: torch.randint(0, 256, (n, 8), generator=generator).to(torch.uint8) for j, n in sizes.items()}


def evicted(sizes: dict[int, int], room: int) -> list[int]:
    """One after the other out of the largest class, until all fit."""
    left = dict(sizes)
    while 8 * sum(left.values()) > room:
        left[max(left, key=lambda j: left[j])] -= 1
    return sorted(left.values())


@pytest.mark.parametrize("room", [0, 7, 8, 50, 100, 256, 10_000])
def test_the_largest_class_gives_way(room: int) -> None:
    old, new = some_codes({0: 9, 1: 2, 5: 4}), some_codes({2: 12, 5: 3}, seed=1)
    codes, labels = torch.cat(list(new.values())), torch.tensor([2] * 12 + [5] * 3)
    found = kept(old, codes, labels, room, draws())
    every = {0: old[0], 1: old[1], 2: new[2], 5: torch.cat([old[5], new[5]])}
    sizes = sorted(len(rows) for rows in found.values())
    wanted = evicted({j: len(rows) for j, rows in every.items()}, room)
    assert sizes == [n for n in wanted if n] and sum(rows.nbytes for rows in found.values()) <= room
    for j, rows in found.items():
        own = {tuple(row) for row in every[j].tolist()}
        assert rows.dtype == torch.uint8 and {tuple(row) for row in rows.tolist()} <= own
        assert len({tuple(row) for row in rows.tolist()}) == len(rows)


def test_which_codes_stay_is_drawn_and_none_is_kept_twice() -> None:
    old, none = some_codes({0: 40}), torch.zeros(0, dtype=torch.int64)
    one, other = (kept(old, torch.zeros(0, 8, dtype=torch.uint8), none, 80, draws(seed))[0] for seed in (0, 1))
    assert len(one) == len(other) == 10 and not torch.equal(one, other)
    twice = kept(old, old[0], torch.zeros(40, dtype=torch.int64), 10_000, draws())
    assert len(twice[0]) == 40


# -- a run ------------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What passed the door, and what there was after each task."""

    parts: Parts
    lines: list[Line]
    states: list[Numbers]  # the broadcast after each task
    asked: list[tuple[int, str, str, int]]  # task, stage, question, how many clients
    replies: list[tuple[int, str, Any]]
    fits: list[tuple[int, int, Fit]]  # task, round, training
    memories: list[dict[int, dict[int, Tensor]]]
    held: list[list[int]]  # how many images each client had of each task


@cache
def ran(method: str = "remind", **settings: Any) -> Seen:
    parts = assemble(tiny_plan(method, **settings), "cpu", workers=1)
    out, do, ask = Seen(parts, [], [], [], [], [], [], []), parts.engine.fit, parts.door.ask
    deliver = parts.transport.deliver

    def fit(wanted: Fit, *rest: Any) -> Any:
        out.fits.append((parts.door.task.index, parts.door.round, wanted))
        return do(wanted, *rest)

    def asked(who: Any, handler: Callable[..., Any], message: Any) -> Any:
        out.asked.append((parts.door.task.index, parts.door.stage, handler.__name__, len(who)))
        return ask(who, handler, message)

    def delivered(who: Any, handler: Callable[..., Any], message: Any, call: Any) -> Any:
        for client, answered in deliver(who, handler, message, call):
            out.replies.append((call.task, handler.__name__, answered.reply))
            yield client, answered

    parts.engine.fit, parts.door.ask, parts.transport.deliver = fit, asked, delivered  # type: ignore[method-assign, assignment]
    for line in learn(parts.scenario, parts.server, parts.door, parts.engine):
        out.lines.append(line)
        if line["kind"] == "task":
            out.states.append({n: t.clone() for n, t in flatten(parts.server.state).items()})
            out.held.append([len(parts.scenario.local(c, parts.door.task).labels) for c in parts.door.everyone()])
            out.memories.append({c: dict(m.codes) for c, m in parts.transport.memories.items()})
    return out


def test_after_the_first_task_only_the_upper_part_changes() -> None:
    first, *later = ran().states
    for state in later:
        for name, tensor in first.items():
            if name.startswith("weights/lower.") or name == "codebooks":
                assert torch.equal(tensor, state[name]), name
    moved = [n for n in first if n.startswith("weights/upper.") and not torch.equal(first[n], later[-1][n])]
    assert moved == [n for n in first if n.startswith("weights/upper.")]
    assert any("running_mean" in n for n in first if n.startswith("weights/lower.")), "nor do statistics"


def test_in_the_first_task_the_whole_network_learns_from_images() -> None:
    before = flatten(assemble(tiny_plan("remind"), "cpu", workers=1).server.state)
    after = ran().states[0]
    assert all(not torch.equal(before[n], after[n]) for n in before if n.startswith("weights/"))
    for task, _, fit in ran().fits:
        assert fit.trains == (("net",) if task == 0 else ("net.upper",))
        assert fit.pool.images.ndim == (4 if task == 0 else 2) and fit.pool.augment == (task == 0)


def test_later_tasks_train_on_codes_alone() -> None:
    for task, _, fit in (f for f in ran().fits if f[0] > 0):
        codes = fit.pool.extra["codes"]
        assert fit.pool.images.numel() == 0 and codes.dtype == torch.uint8 and codes.shape[1] == UNIT
        assert fit.beside["replay"].batch_size == 2 * 16 * task, "an old class as often as a new one, mixed by twos"
    assert {fit.beside["replay"].batch_size for task, _, fit in ran(replay=5).fits if task} == {10}


def test_codebooks_are_found_by_exchanges_with_everyone_after_the_first_task() -> None:
    seen = ran(exchanges=4)
    asked = [(task, stage, who) for task, stage, name, who in seen.asked if name == "measure"]
    assert asked == [(0, "codebooks", 4)] * 4
    sizes = {size_in_bytes(reply) for _, name, reply in seen.replies if name == "measure"}
    assert sizes == {2 * 2 * 256 * 16 * 4 + 2 * 256 * 8}, "sums, squares and counts of centres, whatever they hold"


def test_only_what_learns_is_sent() -> None:
    for task, _, reply in (r for r in ran().replies if r[1] == "train"):
        names = {name.split(".")[0] for name in reply.weights}
        assert names == ({"lower", "upper"} if task == 0 else {"upper"})


def test_memories_hold_codes_that_fit_and_every_class_gets_a_share() -> None:
    seen = ran()
    room = seen.parts.setting.budget.per_client
    for task, memories in enumerate(seen.memories):
        assert len(memories) == 4
        for codes in memories.values():
            assert all(rows.dtype == torch.uint8 and rows.shape[1] == UNIT for rows in codes.values())
            assert sum(rows.nbytes for rows in codes.values()) <= room
            assert room - sum(rows.nbytes for rows in codes.values()) < UNIT or task == 0
        assert set().union(*memories.values()) == set(range(2 * task + 2))
    last = {c: {j: len(rows) for j, rows in codes.items()} for c, codes in seen.memories[-1].items()}
    assert any(len(sizes) > 4 and max(sizes.values()) <= room // UNIT // 3 for sizes in last.values())


def test_what_is_kept_are_codes_of_own_images() -> None:
    seen = ran()
    parts, task = seen.parts, seen.parts.scenario.tasks[-1]
    net: Any = loaded(parts.engine.client.net, parts.server.state.weights)  # type: ignore[attr-defined]
    for client, codes in seen.memories[-1].items():
        data = parts.scenario.local(client, task)
        with torch.no_grad():
            own = coded(parts.server.state.codebooks, net.lower(data.images))
        for j in data.classes():
            there = {tuple(row) for row in own[data.labels == j].tolist()}
            assert {tuple(row) for row in codes.get(j, own[:0]).tolist()} <= there


def test_images_are_classified_by_quantised_maps() -> None:
    parts = ran().parts
    state, (images, _) = parts.server.state, parts.scenario.test(parts.scenario.tasks[0])
    net: Any = loaded(parts.engine.client.net, state.weights)  # type: ignore[attr-defined]
    with torch.inference_mode():
        maps = net.lower(images)
        there = decoded(state.codebooks, coded(state.codebooks, maps), (32, 4, 4))
        said = parts.engine.client.predict(state, images)
        assert torch.allclose(said[:, :6], net.upper(there)[:, :6], atol=1e-6)
        assert not torch.allclose(said[:, :6], net.upper(maps)[:, :6], atol=1e-3)


def test_before_there_are_codebooks_maps_are_not_quantised() -> None:
    parts = assemble(tiny_plan("remind"), "cpu", workers=1)
    state, (images, _) = parts.server.state, parts.scenario.test(parts.scenario.tasks[0])
    state.seen = mask((0, 1), len(state.seen))
    with torch.inference_mode():
        said = parts.engine.client.predict(state, images)
        whole = loaded(parts.engine.client.net, state.weights)(images)  # type: ignore[attr-defined]
    assert torch.equal(said[:, :2], whole[:, :2]) and said[:, :2].std() > 0


def test_replay_is_what_keeps_old_classes() -> None:
    def last(**settings: Any) -> list[float]:
        line = [line for line in ran(rounds=8, steps=6, tasks=2, **settings).lines if line["kind"] == "task"][-1]
        return [c / n for c, n in zip(line["correct"], line["total"], strict=True)]

    with_it, without = last(), last(memory=0)
    assert with_it[0] > 0.8 and without[0] < 0.3


# -- a single pass ----------------------------------------------------------------------------------------------------


def test_in_a_single_pass_each_image_is_learned_from_at_most_once() -> None:
    seen = ran(single_pass=True, rounds=6)
    for task in (1, 2):
        fits = [fit for t, _, fit in seen.fits if t == task]
        assert fits and all(fit.pool.batch_size == 1 and fit.steps == len(fit.pool) for fit in fits)
        assert all(fit.beside["replay"].batch_size == 100 for fit in fits)
        learned = torch.cat([fit.pool.extra["codes"] for fit in fits])
        there, distinct = sum(seen.held[task]), len(torch.unique(learned, dim=0))
        assert 0.5 * there < len(learned) <= there and distinct > 0.95 * len(learned)
    whole = [fit for t, _, fit in seen.fits if t == 0]
    assert all(fit.steps == 0 and fit.pool.batch_size == 0 for fit in whole), "the first task is learned as ever"


def test_in_a_single_pass_images_come_evenly_and_are_replayed_from_then_on() -> None:
    seen = ran(single_pass=True, rounds=6, clients=1, active=1, train_limit=40, memory=40)
    (count,) = seen.held[1]
    sizes = [len(fit.pool) for t, _, fit in seen.fits if t == 1]
    assert sizes == [count * (r + 1) // 6 - count * r // 6 for r in range(6)] and sum(sizes) == count
    replayed = [set(fit.beside["replay"].labels.tolist()) for t, _, fit in seen.fits if t == 1]
    assert replayed[0] == {0, 1} and replayed[-1] == {0, 1, 2, 3}
    for _, memory in seen.parts.transport.memories.items():
        assert len(memory.place) == 0 and size_in_bytes(memory) <= seen.parts.setting.budget.per_client


def test_a_client_that_has_nothing_to_replay_learns_what_has_come_in_one_step() -> None:
    seen = ran(single_pass=True, joining=3, train_limit=40)
    fits = [fit for t, _, fit in seen.fits if t > 0 and len(fit.pool) and not len(fit.beside["replay"])]
    assert fits and all(fit.steps == 1 and fit.pool.batch_size == max(2, len(fit.pool)) for fit in fits)


def test_a_single_pass_goes_on_from_its_records() -> None:
    """After every line a new server, engine and door take over: all they get is state, memories and cursor."""
    settings = {"single_pass": True, "rounds": 4, "tasks": 2, "exchanges": 2}
    whole, parts, lines = ran(**settings), assemble(tiny_plan("remind", **settings), "cpu", workers=1), []
    while (line := next(learn(parts.scenario, parts.server, parts.door, parts.engine), None)) is not None:
        lines.append(line)
        heir = assemble(tiny_plan("remind", **settings), "cpu", workers=1)
        heir.server.state, heir.door.cursor = remade(parts.server.state), copy.deepcopy(parts.door.cursor)
        heir.transport.memories = {client: remade(memory) for client, memory in parts.transport.memories.items()}
        parts = heir
    assert [{**line, "seconds": 0} for line in lines] == [{**line, "seconds": 0} for line in whole.lines]
    one, other = flatten(parts.server.state), flatten(whole.parts.server.state)
    assert all(torch.equal(one[name], other[name]) for name in other)


def remade(rec: Any) -> Any:
    """Take a record apart and put it together again."""
    return unflatten(type(rec), {name: tensor.clone() for name, tensor in flatten(rec).items()})


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"part": 5}, "32 channels cannot be cut into parts of 5"),
        ({"plastic": 3}, "1 to 2 can be plastic, not 3"),
        ({"memory": 0.1}, "an exemplar takes 32"),
        ({"memory": 0, "single_pass": True}, "single_pass notes 4 bytes"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        assemble(tiny_plan("remind", **settings), "cpu", workers=1)


# -- one client is the centralised algorithm --------------------------------------------------------------------------

ROUNDS, STEPS, BATCH, LR, CLIP, DECAY, MOMENTUM = (
    reference.ROUNDS, reference.STEPS, reference.BATCH, reference.LR, reference.CLIP, reference.DECAY,
    reference.MOMENTUM,
)  # fmt: skip
CENTRES, EXCHANGES, ALPHA = 8, 6, 0.4
ALONE = replace(reference.ALONE, memory=1000, memory_scope="client")  # nothing has to go
SETTINGS = {**reference.PROTOCOL, "centres": CENTRES, "exchanges": EXCHANGES, "mixup": ALPHA}


@dataclass
class Run:
    """What a run comes to."""

    first: Numbers
    data: list[tuple[Tensor, Tensor]]
    weights: list[Numbers]  # after each task
    codebooks: Tensor
    kept: list[tuple[Tensor, Tensor]]  # codes and labels after each task, in the order in which they are replayed


@cache
def by_fcil(method: str = "remind", **settings: Any) -> Run:
    parts = assemble(plan(method, ALONE, settings={**SETTINGS, **settings}), "cpu", workers=1)
    state = parts.server.state
    out = Run(weights_in(state), [], [], torch.zeros(0), [])
    for line in learn(parts.scenario, parts.server, parts.door, parts.engine):
        if line["kind"] == "task":
            data, memory = parts.scenario.local(0, parts.door.task), parts.transport.memories[0]
            out.data.append((data.images, data.labels))
            out.weights.append(weights_in(state))
            labels = torch.tensor([j for j, rows in memory.codes.items() for _ in rows])
            out.kept.append((torch.cat(list(memory.codes.values())), labels))
    out.codebooks = state.codebooks
    return out


def weights_in(state: Any) -> Numbers:
    """All that is trained; an autoencoder's weights have names that begin with it."""
    more = {f"autoencoder.{n}": t.clone() for n, t in getattr(state, "autoencoder", {}).items()}
    return {n: t.clone() for n, t in state.weights.items()} | more


def layer(w: Numbers, name: str, x: Tensor, stride: int, training: bool) -> Tensor:
    """Convolution, batch norm, ReLU."""
    x = F.conv2d(x, w[f"{name}.conv.weight"], stride=stride, padding=1)
    return normalised(w, f"{name}.norm", x, training).relu()


def normalised(w: Numbers, norm: str, x: Tensor, training: bool) -> Tensor:
    mean, var = w[f"{norm}.running_mean"], w[f"{norm}.running_var"]
    if training:
        mean, var, n = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), x.numel() / x.shape[1]
        with torch.no_grad():
            w[f"{norm}.running_mean"] += 0.1 * (mean - w[f"{norm}.running_mean"])
            w[f"{norm}.running_var"] += 0.1 * (var * n / (n - 1) - w[f"{norm}.running_var"])
            w[f"{norm}.num_batches_tracked"] += 1
    x = (x - mean.view(-1, 1, 1)) / (var.view(-1, 1, 1) + 1e-5).sqrt()
    return x * w[f"{norm}.weight"].view(-1, 1, 1) + w[f"{norm}.bias"].view(-1, 1, 1)


def lower(w: Numbers, images: Tensor, training: bool) -> Tensor:
    x = images / 127.5 - 1
    return layer(w, "lower.2", layer(w, "lower.1", x, 1, training), 2, training)


def upper(w: Numbers, maps: Tensor, training: bool) -> Tensor:
    return layer(w, "upper.body.0", maps, 2, training).mean((2, 3)) @ w["upper.head.weight"].T + w["upper.head.bias"]


def descended(w: Numbers, loss: Callable[[Numbers, int], Tensor], learns: str | tuple[str, ...], round: int) -> Numbers:
    """SGD with momentum, decay, clipping and cosine on what begins with `learns`."""
    w = {name: value.detach().clone() for name, value in w.items()}
    learned = {n: v.requires_grad_() for n, v in w.items() if n.startswith(learns) and reference.is_parameter(n)}
    speed: Numbers = {}
    for s in range(STEPS):
        gradients = torch.autograd.grad(loss(w, s), list(learned.values()))
        shrink = min(1.0, CLIP / (float(sum((g**2).sum() for g in gradients)) ** 0.5 + 1e-6))
        for (name, value), g in zip(learned.items(), gradients, strict=True):
            push = shrink * g + DECAY * value.detach()
            speed[name] = push if name not in speed else MOMENTUM * speed[name] + push
            with torch.no_grad():
                value -= LR * 0.5 * (1 + math.cos(math.pi * (round + s / STEPS) / ROUNDS)) * speed[name]
    return {name: value.detach() for name, value in w.items()}


def codebooks_by_hand(maps: Tensor, width: int) -> Tensor:
    """k-means on the vectors of every part; a centre without vectors goes to where it is drawn."""
    parts = [part.movedim(1, 3).reshape(-1, width) for part in maps.split(width, 1)]
    books = [torch.zeros(CENTRES, width) for _ in parts]
    for e in range(EXCHANGES):
        generator = torch.Generator().manual_seed(seed_of(0, "codebooks", e))
        noise = torch.randn(len(parts), CENTRES, width, generator=generator)
        cells = [
            [found[torch.cdist(found, centres).argmin(1) == c] for c in range(CENTRES)]
            for found, centres in zip(parts, books, strict=True)
        ]
        error = torch.tensor([[float(((m - m.mean(0)) ** 2).sum()) + 1e-12 * len(m) if len(m) else 0.0 for m in own]
                              for own in cells])  # fmt: skip
        origin = torch.multinomial(error, CENTRES, replacement=True, generator=generator)
        for b, own in enumerate(cells):
            for c, members in enumerate(own):
                there = own[int(origin[b, c])]
                drawn = there.mean(0) + noise[b, c] * there.std(0, correction=0)
                books[b][c] = members.mean(0) if len(members) else drawn
    return torch.stack(books)


def codes_by_hand(books: Tensor, maps: Tensor) -> Tensor:
    """Image by image, place by place, part by part."""
    rows, width = [], books.shape[2]
    for image in maps:
        places = [image[:, r, c] for r in range(4) for c in range(4)]
        rows.append([int((book - place[width * b : width * b + width]).norm(dim=1).argmin())
                     for place in places for b, book in enumerate(books)])  # fmt: skip
    return torch.tensor(rows)


def maps_by_hand(books: Tensor, codes: Tensor) -> Tensor:
    number, _, width = books.shape
    maps = torch.zeros(len(codes), number * width, 4, 4)
    for i, code in enumerate(codes.tolist()):
        for place in range(16):
            for b in range(number):
                maps[i, width * b : width * b + width, place // 4, place % 4] = books[b, code[number * place + b]]
    return maps


def share_by_hand(generator: torch.Generator) -> float:
    """Jöhnk's draw from Beta(ALPHA, ALPHA): the first pair that is good."""
    pairs = torch.rand(16, 2, generator=generator).tolist()
    x, y = next((u ** (1 / ALPHA), v ** (1 / ALPHA)) for u, v in pairs if u ** (1 / ALPHA) + v ** (1 / ALPHA) <= 1)
    return x / (x + y)


def step_generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(0, 0, step))


def replay_by_hand(
    score: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, known: list[int], least: float, generator: torch.Generator,
    mixup: bool = True, crop: bool = True,
) -> Tensor:  # fmt: skip
    """The loss of a batch of new maps, and after them those to be mixed by twos."""
    half = (len(x) - BATCH) // 2
    u = torch.rand(4, len(x), generator=generator)
    share = share_by_hand(generator) if mixup else 1.0
    if crop:
        x = torch.stack([piece(own, window) for own, window in zip(x, windows_from(u, least), strict=True)])
    said = score(torch.cat([x[:BATCH], share * x[BATCH : BATCH + half] + (1 - share) * x[BATCH + half :]]))
    total = BATCH * reference.likelihood(said[:BATCH], y[:BATCH], known)
    total = total + half * share * reference.likelihood(said[BATCH:], y[BATCH : BATCH + half], known)
    return (total + half * (1 - share) * reference.likelihood(said[BATCH:], y[BATCH + half :], known)) / (BATCH + half)


def later_tasks(
    given: Run, w: Numbers, step: int, books: Tensor, encode: Callable[[Tensor], Tensor],
    decode: Callable[[Tensor], Tensor], score: Callable[[Numbers, Tensor, bool], Tensor], least: float,
    mixup: bool = True, crop: bool = True, balanced: bool = True,
) -> list[Numbers]:  # fmt: skip
    """The weights after each task but the first: the upper part learns from codes, of as many of each class."""
    results = []
    for task in range(1, len(given.data)):
        images, labels = given.data[task]
        codes, old_labels = given.kept[task - 1]
        old, new = (decode(maps_by_hand(books, c)) for c in (codes.long(), codes_by_hand(books, encode(images))))
        size, known = 2 * BATCH * (task if balanced else 1), list(range(2 * task + 2))
        for round in range(ROUNDS):
            step += 1
            generator = step_generator(step)
            rows = order(len(new), STEPS * BATCH, generator).view(STEPS, BATCH)
            again = order(len(old), STEPS * size, generator).view(STEPS, size)

            def replay(
                v: Numbers, s: int, r: Tensor = rows, a: Tensor = again, g: torch.Generator = generator,
                some: tuple[Tensor, Tensor] = (new, old), of: tuple[Tensor, Tensor] = (labels, old_labels),
                among: list[int] = known,
            ) -> Tensor:  # fmt: skip
                x, y = (torch.cat([own[r[s]], others[a[s]]]) for own, others in (some, of))
                return replay_by_hand(lambda z: score(v, z, True), x, y, among, least, g, mixup, crop)

            w = descended(w, replay, "upper.", round)
        step += 1  # the client is asked to remember
        results.append(w)
    return results


def kept_by_hand(given: Run, books: Tensor, encode: Callable[[Tensor], Tensor]) -> list[list[list[int]]]:
    """Labels and codes of all images so far, each once, after each task."""
    own = [torch.cat([labels[:, None], codes_by_hand(books, encode(images))], 1) for images, labels in given.data]
    return [distinct(torch.cat(own[: task + 1])) for task in range(len(own))]


def distinct(rows: Tensor) -> list[list[int]]:
    found: list[list[int]] = rows.unique(dim=0).tolist()
    return found


def by_hand(
    given: Run, mixup: bool = True, crop: bool = True, balanced: bool = True
) -> tuple[list[Numbers], Tensor, list[list[list[int]]]]:
    """The weights after each task, the codebooks, and what is kept."""
    w, step = given.first, 0
    images, labels = given.data[0]
    for round in range(ROUNDS):
        step += 1
        rows = order(len(labels), STEPS * BATCH, step_generator(step)).view(STEPS, BATCH)

        def loss(v: Numbers, s: int, rows: Tensor = rows) -> Tensor:
            return reference.likelihood(upper(v, lower(v, images[rows[s]], True), True), labels[rows[s]], [0, 1])

        w = descended(w, loss, "", round)
    step += EXCHANGES + 1  # sums are asked for, and the client is asked to remember

    @torch.no_grad()
    def encode(x: Tensor, first: Numbers = w) -> Tensor:
        return lower(first, x, False)

    books = codebooks_by_hand(encode(images), 16)
    later = later_tasks(given, w, step, books, encode, lambda maps: maps, upper, 0.5, mixup, crop, balanced)
    return [w, *later], books, kept_by_hand(given, books, encode)


@pytest.mark.usefixtures("in_double")
def test_with_one_client_remind_is_the_centralised_algorithm() -> None:
    given = by_fcil()
    results, books, kept = by_hand(given)
    assert (books - given.codebooks).abs().max() < 1e-9 and books.std() > 0.05
    assert kept == [distinct(torch.cat([labels[:, None], codes.long()], 1)) for codes, labels in given.kept]
    assert len(results) * ROUNDS * STEPS >= 10
    for ours, theirs in zip(given.weights, results, strict=True):
        assert reference.gap(ours, theirs) < 1e-9
    assert reference.gap(given.weights[2], given.weights[1]) > 1e-2, "something was learned"


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("without", ["mixup", "crop", "balanced"])
def test_leaving_a_part_out_changes_the_result(without: str) -> None:
    results, _, _ = by_hand(by_fcil(), **{without: False})
    assert reference.gap(by_fcil().weights[2], results[2]) > 1e-4
