"""MFCL: its three losses by hand, what the generator learns and who has it, and the centralised algorithm."""

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.errors import UserError
from fcil.federation import engine
from fcil.federation.loop import learn
from fcil.method import Batch, Fit
from fcil.methods.mfcl import Client, Config, Given, Model, Server, generator_for, head_distance
from fcil.parts import Parts, assemble
from fcil.seeds import seed_of
from tests import test_reference as plain
from tests.conftest import QUICK, tiny_plan
from tests.test_every_method import accuracies
from tests.test_reference import BATCH, CLIP, ROUNDS, STEPS, Numbers

SMALL = {"latent": 10, "synthetic": 8, "generator_steps": 4, "generator_batch": 16}
TAUGHT: dict[str, Any] = {"tasks": 2, "rounds": 8, "steps": 6, "batch_size": 32}  # time enough to learn
FULL: dict[str, Any] = {name: getattr(Config(), name) for name in QUICK["mfcl"]}
NEW, OLD = torch.tensor([0, 0, 1, 1, 0, 0]).bool(), torch.tensor([1, 1, 0, 0, 0, 0]).bool()


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine, "cores", lambda: 1)  # evaluation takes all cores; others are at work here
    with engine.threads(1):
        yield


# -- the client's losses ----------------------------------------------------------------------------------------------


@cache
def alone(**settings: Any) -> Client:
    """A client with an old model, a new one and a generator that all differ."""
    parts = assemble(tiny_plan("mfcl", **{**SMALL, **settings}), "cpu", workers=1)
    torch.manual_seed(1)
    client: Client = parts.engine.client  # type: ignore[assignment]
    for net in client.networks().values():
        for value in net.parameters():
            value.data.add_(0.1 * torch.randn_like(value))
    for net in (client.old, client.generator):
        net.eval().requires_grad_(False)
    return client


def batch_of(count: int = 6) -> Batch:
    draws = torch.Generator().manual_seed(5)
    return Batch(torch.rand(count, 1, 8, 8, generator=draws), torch.tensor([2, 3] * (count // 2)), draws)


def loss_of(client: Client, seed: int = 7, first: bool = False) -> Tensor:
    batch = batch_of()
    batch.generator.manual_seed(seed)
    nets = {"net": client.net} if first else client.networks()
    client.net.train()
    return client.loss(nets, batch, Given(NEW, OLD))


def test_the_loss_is_three_terms_kept_apart() -> None:
    client = alone()
    batch, net, old = batch_of(), client.net.train(), client.old
    noise = torch.randn(8, 10, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        made = client.generator(noise)
        said = old(made)[:, :2].argmax(1)
        every = torch.cat([batch.images, made])
        features, old_features = net.features(every), old.features(every)
        logits = net.head(features)
    learned = F.cross_entropy(logits[:6, 2:4], batch.labels - 2)
    headed = F.cross_entropy(logits[:, :4], torch.cat([batch.labels, said]))
    off = ((features - old_features) @ old.head.weight[:2].T).square()
    kept = off.sum(1).mean() / 2
    assert loss_of(client).item() == pytest.approx((learned + headed + 0.1 * kept).item(), rel=1e-5)


def test_the_distance_is_the_old_heads_over_the_old_classes_only() -> None:
    head = torch.nn.Linear(2, 3)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0], [50.0, 50.0]]))
    one, other = torch.tensor([[3.0, 1.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    value = head_distance(head, one, other, torch.tensor([True, True, False]))
    assert value.item() == pytest.approx(((4 + 4) / 2 + (0 + 4) / 2) / 2)
    assert head_distance(head, one, other, torch.zeros(3).bool()).item() == 0, "nothing to hold, and no division by 0"


@pytest.mark.parametrize("part", ["head", "distill"])
def test_leaving_out_a_part_changes_the_loss(part: str) -> None:
    assert loss_of(alone(**{part: 0.0})).item() != pytest.approx(loss_of(alone()).item(), rel=1e-3)


def gradients(**settings: Any) -> tuple[Tensor, Tensor]:
    client = alone(**settings)
    client.net.zero_grad()
    loss_of(client).backward()
    body = torch.cat([p.grad.flatten() for p in client.net.body.parameters() if p.grad is not None])
    assert client.net.head.weight.grad is not None
    assert all(p.grad is None for net in (client.old, client.generator) for p in net.parameters())
    return body, client.net.head.weight.grad.clone()


def test_only_the_head_learns_from_all_classes_together() -> None:
    (with_it, head), (without, other) = gradients(), gradients(head=0.0)
    assert torch.allclose(with_it, without, rtol=1e-4, atol=1e-6) and not torch.allclose(head, other, rtol=1e-2)
    assert (other[:2] == 0).all(), "without it, no old class of the head learns"
    assert (head[4:] == 0).all(), "a class that has not come is nobody's"


def test_features_are_held_by_the_old_head_and_the_new_one_is_not() -> None:
    (with_it, head), (without, other) = gradients(), gradients(distill=0.0)
    assert not torch.allclose(with_it, without, rtol=1e-2) and torch.allclose(head, other)


def test_every_step_draws_other_images_from_a_generator_at_rest() -> None:
    client = alone()
    assert loss_of(client, 1).item() != loss_of(client, 2).item()
    before = {name: value.clone() for name, value in client.generator.state_dict().items()}
    loss_of(client)
    assert all(torch.equal(value, before[name]) for name, value in client.generator.state_dict().items())


def test_the_first_task_is_plain_cross_entropy_of_its_classes() -> None:
    client, batch = alone(), batch_of()
    expected = F.cross_entropy(client.net.train()(batch.images)[:, 2:4], batch.labels - 2)
    assert loss_of(client, first=True).item() == pytest.approx(expected.item())


# -- the generator ----------------------------------------------------------------------------------------------------


@cache
def learned(**settings: Any) -> tuple[Parts, list[Model], list[Fit], list[Any]]:
    """A run of three tasks, its state after each task, its trainings and its ledger."""
    parts = assemble(tiny_plan("mfcl", **settings), "cpu", workers=1)
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


def same(one: Numbers, other: Numbers) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_generator_goes_on_from_task_to_task_and_rests_while_clients_train() -> None:
    _, states, fits, _ = learned(**SMALL)
    assert not same(states[0].generator, states[1].generator)
    by_task = [fits[: len(fits) // 3], fits[len(fits) // 3 : -len(fits) // 3], fits[-len(fits) // 3 :]]
    assert all(fit.load.keys() == {"net"} for fit in by_task[0])
    for task in (1, 2):
        for fit in by_task[task]:
            assert fit.trains == ("net",) and same(fit.load["generator"], states[task - 1].generator)
            assert same(fit.load["old"], states[task - 1].weights)
            assert (fit.momentum, fit.weight_decay) == (0.0, 1e-5)


def test_training_goes_on_from_the_last_task_and_not_from_the_beginning() -> None:
    parts, states, _, _ = learned(**SMALL)
    server: Server = parts.server  # type: ignore[assignment]
    server.state = replace(states[2], generator=states[1].generator)
    assert same(server.taught(seed_of(0, "generator", 2)), states[2].generator)
    server.state = replace(states[2], generator=states[0].generator)
    assert not same(server.taught(seed_of(0, "generator", 2)), states[2].generator)


def test_the_first_task_needs_no_generator_and_sends_none() -> None:
    parts = assemble(tiny_plan("mfcl", **SMALL), "cpu", workers=1)
    assert parts.server.broadcast().generator == {} and parts.server.state.generator
    assert learned(**SMALL)[0].server.broadcast().generator


@cache
def trained_server() -> tuple[Server, Model]:
    parts, states, _, _ = learned(**TAUGHT, **FULL)
    return parts.server, states[0]  # type: ignore[return-value]


def scored(server: Server, images: Tensor) -> dict[str, float]:
    """Each term of the generator's loss by itself."""
    names, config = ("sure", "even", "statistics", "smooth"), server.config
    found = {}
    for name in names:
        others = {other: 0.0 for other in names if other != name}
        server.config = replace(config, **others)
        found[name] = server.generator_loss(images).item()
    server.config = config
    return found


def test_training_brings_the_generator_nearer_to_what_the_model_has_seen() -> None:
    server, after = trained_server()
    server.state = after
    noise = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.manual_seed(0)
        fresh = Server(server.config, server.setting)
        fresh.state = replace(after, generator=fresh.state.generator)
        before, later = (one.ready()(noise) for one in (fresh, server))
        start, end = scored(server, before), scored(server, later)
    assert end["statistics"] < 0.5 * start["statistics"] and end["even"] < 0.2
    assert sum(end.values()) == pytest.approx(server.generator_loss(later).item(), rel=1e-5)
    assert all(value > 0 for value in end.values()), "every term counts"


def test_a_picture_of_each_class_is_shown() -> None:
    server, after = trained_server()
    server.state = after
    shown = server.look()
    assert set(shown) == {0, 1} and all(p.shape == (1, 8, 8) and p.dtype == torch.uint8 for p in shown.values())


def test_the_ledger_says_what_share_of_the_classes_is_made() -> None:
    parts, states, _, lines = learned(**SMALL)
    found = [line["measured"]["classes_made"] for line in lines if line["kind"] == "task"]
    server: Server = deepcopy(parts.server)  # type: ignore[assignment]
    for task, (state, share) in enumerate(zip(states, found, strict=True)):
        server.state = state
        draws = torch.Generator().manual_seed(seed_of(0, "made", 2 * task + 2))
        with torch.no_grad():
            said = server.net(torch.cat([server.ready()(torch.randn(64, 10, generator=draws)) for _ in range(8)]))
        assert share == len(set(said[:, : 2 * task + 2].argmax(1).tolist())) / (2 * task + 2)
    weights = {name: value.clone() for name, value in server.state.weights.items()}
    with torch.no_grad():
        server.state.weights["head.bias"][3] += 1e3
        assert server.measured() == {"classes_made": 1 / 6}, "all are taken for one"
        server.state.weights["head.bias"].copy_(weights["head.bias"])
    fresh = assemble(tiny_plan("mfcl", **SMALL), "cpu", workers=1).server
    assert fresh.measured() == {"classes_made": None}  # type: ignore[attr-defined]


def test_old_classes_are_kept_that_fine_tuning_forgets() -> None:
    parts = assemble(tiny_plan("finetune", **TAUGHT), "cpu", workers=1)
    without = accuracies(list(learn(parts.scenario, parts.server, parts.door, parts.engine)))[-1]
    with_it = accuracies(learned(**TAUGHT, **FULL)[3])[-1]
    assert with_it[0] > without[0] + 30 and with_it[1] > 60


def test_networks_without_statistics_are_refused_unless_one_does_without() -> None:
    with pytest.raises(UserError, match="mfcl makes images from the statistics .* norm=group .* statistics=0"):
        assemble(tiny_plan("mfcl", norm="group"), "cpu")
    parts = assemble(tiny_plan("mfcl", norm="group", statistics=0.0, tasks=2, rounds=1, **SMALL), "cpu", workers=1)
    assert len(accuracies(list(learn(parts.scenario, parts.server, parts.door, parts.engine)))) == 2


def test_the_knobs_are_the_papers() -> None:
    c = Config()
    parts = assemble(tiny_plan("mfcl", **SMALL), "cpu", workers=1)
    setting = replace(parts.setting, shape=(3, 32, 32), network="resnet18", capacity=100)
    net = generator_for(c, setting, setting.classifier())
    assert sum(p.numel() for p in net.parameters()) == 8_423_939
    assert (c.lr, c.decay, c.synthetic, c.head, c.distill, c.latent) == (0.1, 1e-5, 128, 1.0, 0.1, 1000)
    assert (c.generator_steps, c.generator_batch, c.generator_lr) == (100, 128, 1e-3)
    assert (c.sure, c.sure_temperature, c.even, c.statistics, c.smooth) == (1.0, 1000.0, 1.0, 50.0, 1e-3)


# -- with one client it is a centralised algorithm, written here with nothing of fcil ----------------------------------

LR, TASKS = 0.1, 3


@cache
def by_fcil() -> tuple[plain.Given, Numbers, Model]:
    parts = assemble(
        plain.plan("mfcl", plain.ALONE, settings={**plain.PROTOCOL, **SMALL}), "cpu", workers=1
    )  # the protocol's momentum and decay are not the method's
    first = {n: t.clone() for n, t in parts.server.state.weights.items()}
    made = {n: t.clone() for n, t in parts.server.state.generator.items()}
    data = []
    for task in parts.scenario.tasks:
        parts.scenario.begin(task)
        data.append(parts.scenario.local(0, task))
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        pass
    return plain.Given(first, [(d.images, d.labels) for d in data]), made, parts.server.state


def features(w: Numbers, x: Tensor, training: bool, met: list[Any] | None = None) -> Tensor:
    """Three times convolution, batch norm, ReLU; mean over the places; `x` is within -1..1."""
    for layer, stride in enumerate((1, 2, 2)):
        x = F.conv2d(x, w[f"body.layers.{layer}.0.weight"], stride=stride, padding=1)
        x = batch_norm(w, f"body.layers.{layer}.1", x, training, met=met).relu()
    return x.mean((2, 3))


def batch_norm(
    w: Numbers, name: str, x: Tensor, training: bool, eps: float = 1e-5, met: list[Any] | None = None
) -> Tensor:
    usual = w[f"{name}.running_mean"], w[f"{name}.running_var"]
    mean, var, n = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), x.numel() / x.shape[1]
    if met is not None:
        met.append((mean, var, *usual))
    if training:
        with torch.no_grad():
            w[f"{name}.running_mean"] = usual[0] + 0.1 * (mean - usual[0])
            w[f"{name}.running_var"] = usual[1] + 0.1 * (var * n / (n - 1) - usual[1])
            w[f"{name}.num_batches_tracked"] = w[f"{name}.num_batches_tracked"] + 1
    else:
        mean, var = usual
    x = (x - mean.view(-1, 1, 1)) / (var.view(-1, 1, 1) + eps).sqrt()
    return x * w[f"{name}.weight"].view(-1, 1, 1) + w[f"{name}.bias"].view(-1, 1, 1)


def generated(w: Numbers, noise: Tensor, training: bool) -> Tensor:
    """Noise to 32 maps of 2x2, twice doubled, convolved, normalised; then squeezed and normalised once more."""
    x = (noise @ w["linear.weight"].T + w["linear.bias"]).view(-1, 32, 2, 2)
    x = batch_norm(w, "first", x, training)
    for i in range(2):
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        x = F.conv2d(x, w[f"convolutions.{i}.weight"], w[f"convolutions.{i}.bias"], padding=1)
        x = F.leaky_relu(batch_norm(w, f"norms.{i}", x, training, 0.8), 0.2)
    x = F.conv2d(x, w["last.weight"], w["last.bias"], padding=1).tanh()
    return batch_norm(w, "whiten", x, training)


def train_generator(made: Numbers, w: Numbers, task: int) -> Numbers:
    made = {name: value.clone().requires_grad_(plain.is_parameter(name)) for name, value in made.items()}
    adam = torch.optim.Adam([v for n, v in made.items() if plain.is_parameter(n)], 1e-3)
    draws, seen = torch.Generator().manual_seed(plain.seed_of(0, "generator", task)), 2 * task + 2
    line = torch.tensor([math.exp(-((m / 2) ** 2)) for m in range(-2, 3)])
    kernel = torch.outer(line, line) / line.sum() ** 2
    for _ in range(SMALL["generator_steps"]):
        met: list[Any] = []
        x = generated(made, torch.randn(SMALL["generator_batch"], SMALL["latent"], generator=draws), True)
        logits = (features(w, x, False, met) @ w["head.weight"].T + w["head.bias"])[:, :seen]
        sure = F.cross_entropy(logits / 1000, logits.argmax(1))
        mean = logits.softmax(1).mean(0)
        even = 1 + (mean * mean.log()).sum() / math.log(seen)
        kl = [
            ((v.sqrt() / r.sqrt()).log() - 0.5 * (1 - (r + (rm - m) ** 2) / v)).mean()
            for m, v, rm, r in ((m, v + 1e-8, rm, r + 1e-8) for m, v, rm, r in met)
        ]
        smooth = F.mse_loss(x, F.conv2d(F.pad(x, (2,) * 4, mode="reflect"), kernel[None, None]))
        total = sure + even + 50 / 3 * sum(kl) + 1e-3 * smooth
        adam.zero_grad()
        total.backward()
        adam.step()
    return {name: value.detach() for name, value in made.items()}


def sgd(
    w: Numbers, loss: Callable[[Numbers, Tensor, Tensor, Any], Tensor], data: tuple[Tensor, Tensor], at: tuple[int, int]
) -> Numbers:
    w = {n: v.detach().clone().requires_grad_(plain.is_parameter(n)) for n, v in w.items()}
    learned, (images, labels), (round, step) = [n for n in w if plain.is_parameter(n)], data, at
    draws = torch.Generator().manual_seed(plain.seed_of(0, 0, step))
    rows = plain.order(len(labels), STEPS * BATCH, draws).view(STEPS, BATCH)
    for s, index in enumerate(rows):
        lr = LR * 0.5 * (1 + math.cos(math.pi * (round + s / STEPS) / ROUNDS))
        x = images[index] / 255 * 2 - 1
        found = torch.autograd.grad(loss(w, x, labels[index], draws), [w[n] for n in learned])
        shrink = min(1.0, CLIP / (float(sum((g**2).sum() for g in found) ** 0.5) + 1e-6))
        with torch.no_grad():
            for name, g in zip(learned, found, strict=True):
                w[name] -= lr * (shrink * g + 1e-5 * w[name])
    return {n: v.detach() for n, v in w.items()}


def by_hand(given: plain.Given, made: Numbers) -> tuple[Numbers, Numbers]:
    w, step = given.weights, 0
    for task, data in enumerate(given.tasks):
        old, n = dict(w), 2 * task

        def loss(v: Numbers, x: Tensor, y: Tensor, draws: Any, old: Any = old, n: int = n, made: Any = made) -> Tensor:
            if n == 0:
                logits = features(v, x, True) @ v["head.weight"].T + v["head.bias"]
                return F.cross_entropy(logits[:, :2], y)
            with torch.no_grad():
                fake = generated(made, torch.randn(SMALL["synthetic"], SMALL["latent"], generator=draws), False)
                every = torch.cat([x, fake])
                then = features(old, every, False)
                said = (then[len(x) :] @ old["head.weight"].T + old["head.bias"])[:, :n].argmax(1)
            now = features(v, every, True)
            new = F.cross_entropy((now[: len(x)] @ v["head.weight"].T + v["head.bias"])[:, n : n + 2], y - n)
            both = now.detach() @ v["head.weight"].T + v["head.bias"]
            head = F.cross_entropy(both[:, : n + 2], torch.cat([y, said]))
            kept = ((now - then) @ old["head.weight"][:n].T).square().sum(1).mean() / n
            return new + head + 0.1 * kept

        for round in range(ROUNDS):
            step += 1
            w = sgd(w, loss, data, (round, step))
        made = train_generator(made, w, task)
    return w, made


@pytest.mark.usefixtures("in_double")
def test_with_one_client_mfcl_is_the_centralised_algorithm() -> None:
    given, made, ours = by_fcil()
    weights, generator = by_hand(given, made)
    assert plain.gap(ours.weights, weights) < 1e-9
    # a bias before a normalisation changes nothing: its gradient is rounding, which Adam brings to the size of others
    counts = [
        name for name in made if not name.endswith((".0.bias", ".1.bias", "s.0.running_mean", "s.1.running_mean"))
    ]
    assert len(counts) == len(made) - 6 and "linear.weight" in counts
    assert plain.gap(*({n: one[n] for n in counts} for one in (ours.generator, generator))) < 1e-9
    noise = torch.randn(16, SMALL["latent"], generator=torch.Generator().manual_seed(1))
    assert (generated({**ours.generator}, noise, True) - generated({**generator}, noise, True)).abs().max() < 1e-7
    for mine, first in ((ours.weights, given.weights), (ours.generator, made)):
        assert plain.gap(mine, first) > 1e-3, "nothing was learned, so nothing was compared"
