"""The engine: a Fit is plain SGD to the bit, and an answer depends on nothing but what it was given."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fcil.blocks.losses import log_shares
from fcil.blocks.training import loaded, weights_of
from fcil.federation.calls import Call
from fcil.federation.engine import Engine, seeded, threads
from fcil.federation.fitting import order, rate, work
from fcil.federation.in_process import InProcess
from fcil.federation.loop import learn
from fcil.method import Batch, Fit, Method, Nets, Pool, Setting, Trained, Training, remote
from fcil.parts import assemble
from fcil.records import ByClass, Done, Update, Weights, record
from fcil.scenario.benchmarks import Protocol
from fcil.scenario.memory import Budget
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import LocalData, Task
from fcil.seeds import seed_of
from tests.conftest import TINY, tiny_plan

PROTOCOL = Protocol(rounds=4, steps=5, batch_size=8, momentum=0.9, weight_decay=1e-2, clip=0.5)
CALL = Call(seed=0, task=0, step=7, round=1, rounds=4)
FREE = Budget(10**9, "fixed", 6)


@record
class Sent:
    weights: Weights


@record
class Memory:
    images: ByClass
    visits: int = 0


class Pupil:
    """A client that gives every kind of answer."""

    makes = 0

    def __init__(self, config: object, setting: Setting):
        self.net, self.old = setting.classifier(), setting.classifier()

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net, "old": self.old}

    def predict(self, message: Sent, images: Tensor) -> Tensor:
        return loaded(self.net, message.weights)(images)

    @remote
    def train(self, memory: Memory, data: LocalData, message: Sent) -> Training[Update]:
        trained = yield a_fit(message.weights, Pool(data.images, data.labels))
        return Update(trained.weights, trained.count)

    @remote
    def train_twice(self, memory: Memory, data: LocalData, message: Sent) -> Training[Update]:
        first = yield a_fit(message.weights, Pool(data.images, data.labels))
        second = yield a_fit(first.weights, Pool(data.images[:0], data.labels[:0]))
        return Update(second.weights, first.count)

    @remote
    def draw(self, memory: Memory, data: LocalData, message: Done) -> Sent:
        mine, stray = torch.rand(3, generator=data.generator), torch.rand(3)

        def make(generator: torch.Generator) -> Tensor:
            Pupil.makes += 1
            return torch.rand(3, generator=generator)

        kept = data.cached("things", make)
        threads_now = torch.tensor(torch.get_num_threads())
        return Sent(
            {"mine": mine, "stray": stray, "kept": kept, "again": data.cached("things", make), "n": threads_now}
        )


METHOD = Method(object, object, Pupil, lambda: Memory({}))  # type: ignore[arg-type]


def cross_entropy(nets: Nets, batch: Batch, given: Any) -> Tensor:
    return nn.functional.cross_entropy(nets["net"](batch.images), batch.labels)


def a_fit(weights: Weights, pool: Pool, **how: Any) -> Fit:
    return Fit(**{"loss": cross_entropy, "load": {"net": weights}, "trains": ("net",), "pool": pool, "lr": 0.2, **how})


def an_engine(protocol: Protocol = PROTOCOL, augment: str = "none") -> Engine:
    with seeded("engine"):
        return Engine(METHOD, None, Setting(6, (1, 8, 8), protocol, FREE, "small", augment))


def a_pool(count: int = 21) -> Pool:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)
    return Pool(images, torch.randint(0, 6, (count,), generator=generator))


def fitted(engine: Engine, fit: Fit, call: Call = CALL) -> Trained:
    return engine.fit(fit, call, torch.Generator().manual_seed(1))


def start() -> Weights:
    return weights_of(an_engine().nets["net"])


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):  # as in every answer
        yield


# -- batches and rates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "length"), [(1, 5), (7, 21), (7, 20), (7, 23), (10, 3), (64, 64)])
def test_order_gives_every_index_once_a_pass(count: int, length: int) -> None:
    found = order(count, length, torch.Generator().manual_seed(0))
    assert found.shape == (length,)
    for p in range(0, length, count):
        some = found[p : p + count].tolist()
        assert len(set(some)) == len(some) and set(some) <= set(range(count))


def test_order_shuffles_each_pass_anew_and_follows_its_generator() -> None:
    first, again, other = (order(50, 100, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first[:50], first[50:]) and not torch.equal(first[:50], torch.arange(50))


def shared(pool: Pool, share: float, new: tuple[int, ...], **more: int) -> Tensor:
    todo = work(a_fit({}, pool), replace(PROTOCOL, new_share=share, **more), CALL._replace(new=new))
    return todo.tables(torch.Generator().manual_seed(0))[""]


@pytest.mark.parametrize(("share", "number"), [(0.5, 4), (0.4, 3), (0.99, 7)])
def test_new_classes_have_their_share_of_every_step(share: float, number: int) -> None:
    pool = a_pool(40)
    rows = shared(pool, share, (1, 4))
    is_new = torch.isin(pool.labels, torch.tensor([1, 4]))
    assert rows.shape == (5, 8) and is_new[rows].sum(1).tolist() == [number] * 5
    for kind in (is_new, ~is_new):  # each of them as often as the others, but for one pass that is not over
        counts = torch.bincount(rows.flatten(), minlength=40)[kind]
        assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_classes_have_the_share_of_steps_that_a_loss_is_told(share: float) -> None:
    pool = a_pool(40)
    counts, is_new = torch.bincount(pool.labels).float(), torch.tensor([j in (1, 4) for j in range(6)])
    drawn = torch.bincount(pool.labels[shared(pool, share, (1, 4), steps=2000)].flatten()).float()
    assert torch.allclose(log_shares(counts, is_new, share).exp(), drawn / drawn.sum(), atol=1e-3)


def test_where_more_are_new_than_asked_for_images_come_as_they_are() -> None:
    plain = order(40, 40, torch.Generator().manual_seed(0)).view(5, 8)
    assert torch.equal(shared(a_pool(40), 0.1, (1, 4)), plain)


@pytest.mark.parametrize("new", [(), (0, 1, 2, 3, 4, 5), (9,)])
def test_where_all_are_new_or_none_images_come_as_they_are(new: tuple[int, ...]) -> None:
    rows = shared(a_pool(40), 0.5, new)
    assert rows.shape == (5, 8) and sorted(rows.flatten().tolist()) == list(range(40))
    assert shared(a_pool(40), 0.5, (1,), batch_size=1).shape == (5, 1)


def test_without_a_share_no_bit_of_the_order_changes() -> None:
    rows = shared(a_pool(40), 0.0, (1,))
    assert torch.equal(rows, order(40, 40, torch.Generator().manual_seed(0)).view(5, 8))


def test_a_run_knows_which_classes_are_new() -> None:
    """Of a client's own classes in the second task and the images that it kept, here all of them."""
    parts = assemble(tiny_plan("joint", new_share=0.75, batch_size=8), "cpu", workers=1)
    seen, fit = [], parts.engine.fit

    def fitting(asked: Fit, call: Call, *rest: Any) -> Trained:
        is_new = torch.isin(asked.pool.labels, torch.tensor(call.new))
        rows = work(asked, parts.engine.setting.protocol, call).tables(torch.Generator().manual_seed(0))[""]
        seen.append((call.task, is_new.all().item(), is_new[rows].sum(1).tolist()))
        return fit(asked, call, *rest)

    parts.engine.fit = fitting  # type: ignore[method-assign]
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        pass
    later = [counts for task, alone, counts in seen if task and not alone]
    assert later and all(set(counts) == {6} for counts in later)
    assert all(set(counts) == {8} for task, _, counts in seen if not task)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [("cosine", (1.0, 0.5, 0.0)), ("exponential", (1.0, 10**-0.5, 0.1)), ("constant", (1.0, 1.0, 1.0))],
)
def test_the_rate_over_a_task(schedule: str, factors: tuple[float, ...]) -> None:
    for begins, factor in zip((0.0, 0.5, 1.0), factors, strict=True):
        assert rate(Protocol(schedule=schedule), begins, begins + 0.1) == pytest.approx(factor)
        warm = Protocol(schedule=schedule, warmup=0.2)
        assert rate(warm, 0.2 + 0.8 * begins, 1.1) == pytest.approx(factor)  # the schedule runs over the rest


@pytest.mark.parametrize("schedule", ["cosine", "exponential", "constant"])
@pytest.mark.parametrize(("rounds", "steps", "warmup"), [(20, 10, 0.1), (20, 1, 0.1), (4, 5, 0.3), (3, 7, 0.9)])
def test_the_rate_rises_step_by_step_to_where_the_schedule_starts(
    schedule: str, rounds: int, steps: int, warmup: float
) -> None:
    protocol = Protocol(rounds=rounds, steps=steps, schedule=schedule, warmup=warmup)
    fit, calls = a_fit({}, a_pool()), (CALL._replace(round=r, rounds=rounds) for r in range(rounds))
    rates = [lr / fit.lr for call in calls for lr in work(fit, protocol, call).rates]
    rising = math.ceil(warmup * rounds * steps - 1e-9)
    each = 1 / (warmup * rounds * steps)
    assert rates[:rising] == pytest.approx([min(1.0, (s + 1) * each) for s in range(rising)])
    assert rates[0] == pytest.approx(each) and max(rates) == pytest.approx(1.0)
    assert rates[rising:] == sorted(rates[rising:], reverse=True) and rates[rising] > 0.8


def test_a_rise_shorter_than_a_step_or_none_changes_nothing() -> None:
    def rates(warmup: float) -> list[float]:
        return work(a_fit({}, a_pool()), replace(PROTOCOL, warmup=warmup), CALL._replace(round=0)).rates

    plain = [0.2 * (0.5 * (1 + math.cos(math.pi * (step / 5) / 4))) for step in range(5)]
    assert rates(0.0) == plain and rates(1e-9) == pytest.approx(plain)


# -- a Fit ------------------------------------------------------------------------------------------------------------


def by_hand(weights: Weights, pool: Pool, protocol: Protocol, steps: int, lr: float, call: Call) -> Weights:
    """The same training written down, with PyTorch's own optimiser."""
    net = an_engine().nets["net"]
    net.load_state_dict(weights)
    net.train()
    optimizer = torch.optim.SGD(
        net.parameters(), lr, momentum=protocol.momentum, weight_decay=protocol.weight_decay, fused=True
    )
    index = order(len(pool), steps * protocol.batch_size, torch.Generator().manual_seed(1)).view(steps, -1)
    for s in range(steps):
        progress = (call.round + s / steps) / call.rounds
        rest = (progress - protocol.warmup) / (1 - protocol.warmup)
        factor = {"cosine": (1 + math.cos(math.pi * rest)) / 2, "exponential": 0.1**rest, "constant": 1.0}
        optimizer.param_groups[0]["lr"] = lr * factor[protocol.schedule]
        if progress < protocol.warmup:
            optimizer.param_groups[0]["lr"] = lr * min(
                1.0, (call.round + (s + 1) / steps) / call.rounds / protocol.warmup
            )
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(pool.images[index[s]].float() / 255), pool.labels[index[s]])
        loss.backward()
        if protocol.clip:
            nn.utils.clip_grad_norm_(net.parameters(), protocol.clip)
        optimizer.step()
    return weights_of(net)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"momentum": 0.0},
        {"weight_decay": 0.0},
        {"clip": 0.0},
        {"schedule": "constant"},
        {"schedule": "exponential"},
        {"warmup": 0.4},
    ],
    ids=str,
)
def test_a_fit_is_plain_sgd_to_the_bit(change: dict[str, Any]) -> None:
    protocol = replace(PROTOCOL, **change)
    weights, pool = start(), a_pool()
    trained = fitted(an_engine(protocol), a_fit(weights, pool))
    assert equal(trained.weights, by_hand(weights, pool, protocol, 5, 0.2, CALL))
    assert trained.count == 21 and trained.loss.isfinite()
    if change:
        assert not equal(trained.weights, fitted(an_engine(), a_fit(weights, pool)).weights)


def test_a_fit_may_have_its_own_numbers() -> None:
    weights, pool = start(), a_pool()
    trained = fitted(an_engine(), a_fit(weights, replace(pool, batch_size=4), steps=3, momentum=0.5, weight_decay=0.0))
    protocol = replace(PROTOCOL, batch_size=4, momentum=0.5, weight_decay=0.0)
    assert equal(trained.weights, by_hand(weights, pool, protocol, 3, 0.2, CALL))


@pytest.mark.parametrize(("images", "epochs", "steps"), [(21, 1, 3), (21, 2, 6), (16, 3, 6), (5, 1, 1), (1, 2, 1)])
def test_steps_follow_from_epochs(images: int, epochs: int, steps: int) -> None:
    protocol = replace(PROTOCOL, steps=0, epochs=epochs)
    seen: list[int] = []

    def loss(nets: Nets, batch: Batch, given: Any) -> Tensor:
        seen.append(len(batch.labels))
        return cross_entropy(nets, batch, given)

    fitted(an_engine(protocol), a_fit(start(), a_pool(images), loss=loss))
    assert seen == [8] * steps  # never a partial batch


def test_training_the_head_leaves_the_body_and_its_statistics_alone() -> None:
    weights = start()
    trained = fitted(an_engine(), a_fit(weights, a_pool(), trains=("net.head",))).weights
    moved = {name for name in weights if not torch.equal(weights[name], trained[name])}
    assert moved == {"head.weight", "head.bias"}


def test_training_the_body_leaves_the_head_alone() -> None:
    weights = start()
    trained = fitted(an_engine(), a_fit(weights, a_pool(), trains=("net.body",))).weights
    still = {name for name in weights if torch.equal(weights[name], trained[name])}
    assert still == {"head.weight", "head.bias"}


def test_networks_that_do_not_train_stay_as_they_are() -> None:
    engine, weights = an_engine(), start()
    old = weights_of(engine.nets["old"])
    modes: list[tuple[bool, bool]] = []

    def loss(nets: Nets, batch: Batch, given: Any) -> Tensor:
        modes.append((nets["net"].training, nets["old"].training))
        return (
            cross_entropy(nets, batch, given) + (nets["old"](batch.images) - nets["net"](batch.images)).square().mean()
        )

    trained = fitted(engine, a_fit(weights, a_pool(), loss=loss, load={"net": weights, "old": old}))
    assert set(trained.networks) == {"net"} and set(modes) == {(True, False)}
    assert equal(old, weights_of(engine.nets["old"])) and not equal(weights, trained.weights)


def test_two_networks_may_train_at_once() -> None:
    engine = an_engine()

    def loss(nets: Nets, batch: Batch, given: Any) -> Tensor:
        return (
            cross_entropy(nets, batch, given) + (nets["old"](batch.images) - nets["net"](batch.images)).square().mean()
        )

    load = {name: weights_of(net) for name, net in engine.nets.items()}
    trained = fitted(engine, a_fit({}, a_pool(), loss=loss, load=load, trains=("net", "old")))
    assert not equal(trained.networks["net"], load["net"]) and not equal(trained.networks["old"], load["old"])


def test_nothing_to_train_on_gives_the_weights_back() -> None:
    engine, weights = an_engine(), start()
    fitted(engine, a_fit(weights, a_pool()))  # leaves other weights in the scratch network
    trained = fitted(engine, a_fit(weights, a_pool(0)))
    assert trained.count == 0 and equal(trained.weights, weights) and trained.loss.isnan()


def test_a_loss_sees_no_network_that_its_fit_did_not_load() -> None:
    def loss(nets: Nets, batch: Batch, given: Any) -> Tensor:
        return nets["old"](batch.images).sum()

    with pytest.raises(KeyError, match="old"):
        fitted(an_engine(), a_fit(start(), a_pool(), loss=loss))
    with pytest.raises(ValueError, match="does not load"):
        fitted(an_engine(), a_fit(start(), a_pool(), load={"old": start()}))


def test_pools_have_batches_of_their_own_size_and_know_more_of_each_image() -> None:
    def loss(nets: Nets, batch: Batch, given: Any) -> Tensor:
        seen.append(batch)
        return cross_entropy(nets, batch, given)

    seen: list[Batch] = []
    pool = a_pool(21)
    main = replace(pool, batch_size=4, extra={"number": torch.arange(21)})
    fitted(an_engine(), a_fit(start(), main, loss=loss, beside={"replay": replace(pool, batch_size=3)}))
    assert all(len(batch.labels) == 4 and len(batch.beside["replay"].labels) == 3 for batch in seen)
    assert all(torch.equal(pool.labels[batch.extra["number"]], batch.labels) for batch in seen)
    assert seen[0].beside["replay"].extra == {}


def test_pools_beside_reach_the_loss_in_batches_of_their_own() -> None:
    seen: list[Batch] = []

    def loss(nets: Nets, batch: Batch, given: Any) -> Tensor:
        seen.append(batch)
        return cross_entropy(nets, batch, given)

    replay, features = a_pool(3), Pool(torch.randn(9, 5), torch.arange(9))
    beside = {"replay": replay, "features": features, "empty": a_pool(0)}
    fitted(an_engine(), a_fit(start(), a_pool(), loss=loss, beside=beside))
    assert len(seen) == 5 and all(set(batch.beside) == {"replay", "features"} for batch in seen)
    one = seen[0].beside["replay"]
    assert one.images.shape == (8, 1, 8, 8) and one.images.is_floating_point() and one.images.max() <= 1
    allowed = (replay.images.float() / 255).flatten(1)
    assert all((image.flatten() == allowed).all(1).any() for image in one.images)
    rows = seen[0].beside["features"]
    assert torch.equal(rows.images, features.images[rows.labels])


def test_only_images_that_ask_for_it_are_augmented() -> None:
    seen: list[Tensor] = []

    def loss(nets: Nets, batch: Batch, given: Any) -> Tensor:
        seen.append(batch.images)
        return cross_entropy(nets, batch, given)

    pool = a_pool(4)
    originals = (pool.images.float() / 255).flatten(1)

    def share_kept(pool: Pool) -> float:
        seen.clear()
        fitted(an_engine(augment="crop-flip"), a_fit(start(), pool, loss=loss))
        return torch.stack([(im.flatten() == originals).all(1).any() for im in torch.cat(seen)]).float().mean().item()

    assert share_kept(replace(pool, augment=False)) == 1.0 and share_kept(pool) < 0.5


def test_given_and_message_are_not_touched() -> None:
    weights, anchor, pool = start(), start(), a_pool()
    copies = [{n: t.clone() for n, t in w.items()} for w in (weights, anchor)]

    def loss(nets: Nets, batch: Batch, given: Sent) -> Tensor:
        near = torch.stack([(p - given.weights[n]).square().sum() for n, p in nets["net"].named_parameters()]).sum()
        return cross_entropy(nets, batch, given) + near

    images = pool.images.clone()
    trained = fitted(an_engine(), a_fit(weights, pool, loss=loss, given=Sent(anchor)))
    assert equal(weights, copies[0]) and equal(anchor, copies[1]) and torch.equal(pool.images, images)
    assert not any(t.requires_grad for t in trained.weights.values())
    kept = {n: t.clone() for n, t in trained.weights.items()}
    engine = an_engine()
    result = fitted(engine, a_fit(weights, pool)).weights
    frozen = {n: t.clone() for n, t in result.items()}
    fitted(engine, a_fit(weights, pool, lr=1.0))  # the next training does not reach into the last one's result
    assert equal(result, frozen) and equal(kept, trained.weights)


# -- an answer --------------------------------------------------------------------------------------------------------


@dataclass
class Room:
    """A tiny scenario with an engine of its own."""

    transport: InProcess
    task: Task

    def ask(self, who: list[int], handler: Any, message: Any, call: Call = CALL) -> dict[int, Any]:
        return dict(self.transport.deliver(who, handler, message, call))


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return Scenario(TINY, 0)


@pytest.fixture
def room(scenario: Scenario) -> Room:
    return a_room(scenario)


def a_room(scenario: Scenario, task: int = 0) -> Room:
    transport = InProcess(an_engine(), scenario, lambda: Memory({}), None)
    scenario.begin(scenario.tasks[task])
    transport.begin(scenario.tasks[task])
    return Room(transport, scenario.tasks[task])


@pytest.fixture
def four_threads() -> Iterator[None]:
    with threads(4):
        yield


def test_every_answer_computes_with_one_thread(room: Room, four_threads: None) -> None:
    seen: list[int] = []

    def loss(nets: Nets, batch: Batch, given: Any) -> Tensor:
        seen.append(torch.get_num_threads())
        return cross_entropy(nets, batch, given)

    class Counting(Pupil):
        @remote
        def train(self, memory: Memory, data: LocalData, message: Sent) -> Training[Update]:
            trained = yield a_fit(message.weights, Pool(data.images, data.labels), loss=loss)
            return Update(trained.weights, trained.count)

    assert room.ask([0], Pupil.draw, Done())[0].reply.weights["n"] == 1
    room.ask([0], Counting.train, Sent(start()))
    assert set(seen) == {1} and torch.get_num_threads() == 4


def test_threads_are_given_back_after_an_error(room: Room, four_threads: None) -> None:
    def broken(*_: Any) -> Done:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        room.ask([0], broken, Done())
    assert torch.get_num_threads() == 4


def test_an_answer_does_not_depend_on_who_answered_before(scenario: Scenario) -> None:
    message = Sent(start())
    alone = a_room(scenario).ask([3], Pupil.train, message)[3]
    after = a_room(scenario).ask([0, 1, 2, 3], Pupil.train, message)[3]
    again = a_room(scenario).ask([3, 3, 1], Pupil.train, message)[3]
    assert equal(alone.reply.weights, after.reply.weights) and equal(alone.reply.weights, again.reply.weights)
    assert not equal(alone.reply.weights, message.weights) and alone.images == alone.reply.count > 0


def test_draws_differ_by_client_and_step_and_run_and_nothing_else(scenario: Scenario) -> None:
    def drawn(client: int = 0, **call: int) -> Weights:
        return a_room(scenario).ask([client], Pupil.draw, Done(), CALL._replace(**call))[client].reply.weights

    first = drawn()
    assert equal(first, drawn()) and not torch.equal(first["mine"], first["stray"])
    for other in (drawn(client=1), drawn(step=8), drawn(seed=1)):
        assert not torch.equal(first["mine"], other["mine"]) and not torch.equal(first["stray"], other["stray"])
    assert equal(first, drawn(round=2))


def test_the_global_generator_is_left_as_it_was(room: Room) -> None:
    before = torch.get_rng_state()
    room.ask([0, 1], Pupil.draw, Done())
    room.ask([0, 1], Pupil.train, Sent(start()))
    assert torch.equal(before, torch.get_rng_state())


def test_seeds_have_nothing_in_common() -> None:
    seeds = {seed_of(run, client, step) for run in range(5) for client in range(20) for step in range(20)}
    assert len(seeds) == 2000 and all(0 <= s < 2**63 for s in seeds)
    assert seed_of(1, 23) != seed_of(12, 3) and seed_of("1") != seed_of(1)
    assert seed_of(0, 1, 2) == 1772749440416956875  # the same in every process and version


def test_what_is_cached_stays_for_a_task_and_is_rebuilt_alike(scenario: Scenario) -> None:
    room = a_room(scenario)
    Pupil.makes = 0

    def kept(where: Room, client: int = 0, step: int = 1) -> Tensor:
        call = CALL._replace(task=where.task.index, step=step)
        reply = where.ask([client], Pupil.draw, Done(), call)[client].reply.weights
        assert torch.equal(reply["kept"], reply["again"])
        return reply["kept"]

    first = kept(room)
    assert torch.equal(first, kept(room, step=2)) and Pupil.makes == 1
    assert not torch.equal(first, kept(room, client=1)) and Pupil.makes == 2
    assert torch.equal(first, kept(a_room(scenario), step=9)) and Pupil.makes == 3  # as after a restart
    room.transport.begin(room.task)
    assert torch.equal(first, kept(room)) and Pupil.makes == 4
    assert not torch.equal(first, kept(a_room(scenario, task=1)))


def test_a_second_training_without_images_does_not_spoil_the_loss(room: Room) -> None:
    answered = room.ask([0], Pupil.train_twice, Sent(start()))[0]
    once = room.ask([0], Pupil.train, Sent(start()))[0]
    assert answered.images == once.images > 0
    assert float(answered.loss) == float(once.loss)


def test_a_training_on_nothing_has_no_loss(room: Room) -> None:
    data = LocalData(room.task, torch.zeros(0, 1, 8, 8, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
    weights = start()
    answered = room.transport.engine.answer(0, Pupil.train, Memory({}), data, Sent(weights), CALL)
    assert answered.images == 0 and math.isnan(float(answered.loss))
    assert answered.reply.count == 0 and equal(answered.reply.weights, weights)


# -- memories ---------------------------------------------------------------------------------------------------------


def test_a_memory_that_changed_is_kept_weighed_and_marked(room: Room) -> None:
    def remember(self: Pupil, memory: Memory, data: LocalData, message: Done) -> Done:
        memory.images[0], memory.visits = data.images[:2], memory.visits + 1
        return Done()

    answered = room.ask([0, 2], remember, Done())
    transport = room.transport
    assert answered[0].kept == 2 * 64 + 8 and transport.changed == {0, 2} == set(transport.memories)
    transport.changed.clear()
    room.ask([0, 2], Pupil.draw, Done())
    assert transport.changed == set()
    room.ask([2], remember, Done())
    assert transport.changed == {2} and transport.memories[2].visits == 2 and transport.memories[0].visits == 1


def test_a_memory_changed_in_place_is_noticed(room: Room) -> None:
    def fill(self: Pupil, memory: Memory, data: LocalData, message: Done) -> Done:
        memory.images[0] = torch.zeros(3)
        return Done()

    def touch(self: Pupil, memory: Memory, data: LocalData, message: Done) -> Done:
        memory.images[0][1] = 5.0
        return Done()

    def drop(self: Pupil, memory: Memory, data: LocalData, message: Done) -> Done:
        memory.images.clear()
        return Done()

    for handler in (fill, touch, drop):
        room.transport.changed.clear()
        room.ask([1], handler, Done())
        assert room.transport.changed == {1}, handler.__name__
    assert room.transport.memories[1].images == {}


def test_what_was_derived_from_a_memory_goes_when_the_memory_changes(room: Room) -> None:
    def derive(self: Pupil, memory: Memory, data: LocalData, message: Done) -> Done:
        seen.append(data.cached("count", lambda _: len(memory.images)))
        return Done()

    def learn(self: Pupil, memory: Memory, data: LocalData, message: Done) -> Done:
        memory.images[len(memory.images)] = data.images[:1]
        return Done()

    seen: list[int] = []
    for handler in (derive, learn, derive, derive):
        room.ask([1], handler, Done())
    assert seen == [0, 1, 1]


def test_derived_data_is_kept_for_some_clients_only(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcil.federation.in_process.MOST_CACHES", 2)

    def derive(self: Pupil, memory: Memory, data: LocalData, message: Done) -> Done:
        data.cached("draw", lambda generator: drawn.append(float(torch.rand((), generator=generator))) or True)
        return Done()

    drawn: list[float] = []
    for client in (0, 1, 0, 2, 1):  # 1 is dropped for 2, and made again
        room.ask([client], derive, Done())
    assert len(room.transport.caches) == 2 and len(drawn) == 4 and drawn[1] == drawn[3]


# -- classification ---------------------------------------------------------------------------------------------------


def test_classify_gives_the_highest_score_of_every_image_whatever_the_batch() -> None:
    engine, message, images = an_engine(), Sent(start()), a_pool(23).images
    whole = engine.classify(message, images)
    assert whole.shape == (23,) and torch.equal(
        whole.repeat(50),
        engine.classify(message, images.repeat(50, 1, 1, 1)),  # more than one batch
    )
    with torch.no_grad():
        assert torch.equal(whole, engine.client.predict(message, images).argmax(1))
    assert engine.classify(message, images[:0]).shape == (0,)
