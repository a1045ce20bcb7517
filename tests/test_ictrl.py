"""i-CTRL: the two players' slopes, the moments, the memory by directions, the subspaces; one client is centralised."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks.class_directions import gaussians, subspace
from fcil.federation.loop import learn
from fcil.method import Batch, Fit, Setting
from fcil.methods.ictrl import METHOD, Config, Model, recalled
from fcil.parts import Parts, assemble
from fcil.plan import plan
from fcil.records import flatten
from fcil.scenario.benchmarks import BENCHMARKS, protocol
from fcil.scenario.tasks import LocalData, Task, mask
from tests.conftest import TINY, tiny_plan
from tests.test_rates import naive_gap, naive_reduction
from tests.test_reference import order, seed_of

Numbers = dict[str, Tensor]

TASKS, ROUNDS, STEPS, BATCH, KEPT = 2, 2, 3, 16, 12
LR, MOMENTUM, DECAY, CLIP = 0.4, 0.5, 1e-3, 10.0
EPS, LAMBDA, KEEP, ASCENT, DIRECTIONS, SAMPLES, LATENT = 0.8, 5.0, 0.7, 0.2, 4, 3, 12
ALONE = replace(TINY, tasks=TASKS, clients=1, active=1, train_limit=20, test_limit=5)
SETTINGS: dict[str, Any] = {
    "rounds": ROUNDS, "steps": STEPS, "batch_size": BATCH, "clip": CLIP, "lr": LR, "sgd_momentum": MOMENTUM,
    "sgd_decay": DECAY, "eps": EPS, "closed_loop": LAMBDA, "keep": KEEP, "ascent": ASCENT, "directions": DIRECTIONS,
    "samples": SAMPLES, "latent": LATENT, "memory_batch": KEPT,
}  # fmt: skip


# -- the algorithm once more, with nothing of fcil ---------------------------------------------------------------------


def normed(x: Tensor, w: Numbers, name: str) -> Tensor:
    """Group normalisation, of 8 channels or a few more in a group."""
    channels = x.shape[1]
    groups = next(n for n in range(max(1, channels // 8), 0, -1) if channels % n == 0)
    parts = x.reshape(len(x), groups, math.prod(x.shape[1:]) // groups)
    parts = parts - parts.mean(2, keepdim=True)
    parts = parts / (parts.square().mean(2, keepdim=True) + 1e-5).sqrt()
    return parts.view_as(x) * w[f"{name}.weight"].view(-1, 1, 1) + w[f"{name}.bias"].view(-1, 1, 1)


def encode(w: Numbers, images: Tensor) -> Tensor:
    """f: three times convolution, normalisation, ReLU; mean over the places; linear; length 1."""
    x = (images - 0.5) / 0.5
    for layer, stride in enumerate((1, 2, 2)):
        x = F.conv2d(x, w[f"encoder.body.layers.{layer}.0.weight"], stride=stride, padding=1)
        x = normed(x, w, f"encoder.body.layers.{layer}.1").relu()
    z = x.mean((2, 3)) @ w["encoder.mean.weight"].T + w["encoder.mean.bias"]
    return z / z.norm(dim=1, keepdim=True)


def decode(w: Numbers, z: Tensor) -> Tensor:
    """g: linear to maps of 2x2, normalised; twice doubled and convolved; convolved; sigmoid."""
    x = (z @ w["decoder.linear.weight"].T + w["decoder.linear.bias"]).unflatten(1, (-1, 2, 2))
    x = normed(x, w, "decoder.norms.0")
    for i in range(2):
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        x = F.conv2d(x, w[f"decoder.convolutions.{i}.weight"], w[f"decoder.convolutions.{i}.bias"], padding=1)
        x = F.leaky_relu(normed(x, w, f"decoder.norms.{i + 1}"), 0.2)
    return F.conv2d(x, w["decoder.convolutions.2.weight"], w["decoder.convolutions.2.bias"], padding=1).sigmoid()


def gaps(z: Tensor, other: Tensor, labels: Tensor, classes: list[int]) -> Tensor:
    found = [naive_gap(z[labels == j], other[labels == j], EPS) for j in classes if (labels == j).any()]
    return torch.stack(found).sum() if found else torch.zeros(())


def encoder_loss(w: Numbers, old: Numbers, x: Tensor, y: Tensor, kept: Tensor, kept_y: Tensor, quirk: bool = False,
                 ascent: float = ASCENT) -> Tensor:  # fmt: skip
    """What f descends. No slope goes through g: its images are as they are."""
    z, labels = encode(w, x), torch.cat([y, kept_y])
    with torch.no_grad():
        shown = torch.cat([decode(w, z), decode(old, kept)])
    again = encode(w, shown)
    new, olds = again[: len(x)], again[len(x) :]
    loop = naive_reduction(again, labels, EPS) + LAMBDA * gaps(z, new, y, sorted(set(y.tolist())))
    loss = -naive_reduction(torch.cat([z, kept]), labels, EPS) - ascent * loop
    loss = loss + KEEP * gaps(kept, olds, kept_y, sorted(set(kept_y.tolist())))
    if quirk:
        loss = loss + KEEP * gaps(z, new, y, sorted(set(y.tolist()))[:-1])
    return loss / LATENT


def decoder_loss(w: Numbers, old: Numbers, x: Tensor, y: Tensor, kept: Tensor, kept_y: Tensor) -> Tensor:
    """What g descends."""
    labels = torch.cat([y, kept_y])
    with torch.no_grad():
        z, olds = encode(w, x), encode(w, decode(old, kept))
    new = encode(w, decode(w, z))
    loss = naive_reduction(torch.cat([z, kept]), labels, EPS)
    loss = loss + naive_reduction(torch.cat([new, olds]), labels, EPS)
    loss = loss + LAMBDA * gaps(z, new, y, sorted(set(y.tolist())))
    if len(kept):
        loss = loss + KEEP * gaps(encode(w, decode(w, kept)), olds, kept_y, sorted(set(kept_y.tolist())))
    return loss / LATENT


def slopes(w: Numbers, old: Numbers, *rows: Tensor, **how: Any) -> Numbers:
    """The encoder's weights have the slopes of its loss, the decoder's those of its own."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in w.items()}
    found = {}
    for part, loss in (
        ("encoder.", encoder_loss(leaves, old, *rows, **how)),
        ("decoder.", decoder_loss(leaves, old, *rows)),
    ):
        own = {name: leaf for name, leaf in leaves.items() if name.startswith(part)}
        found |= dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))
    return found


def learned(z: Tensor) -> dict[str, Tensor]:
    """Directions and Gaussians of a class by the singular vectors of its features, and its subspace."""
    directions = torch.linalg.svd(z, full_matrices=True)[2][:DIRECTIONS]
    directions = directions * torch.where((z @ directions.T).mean(0) < 0, -1.0, 1.0)[:, None]
    along = z @ directions.T
    return {"directions": directions, "centres": along.mean(0), "spreads": along.std(0, correction=0), **spanned(z)}


def spanned(z: Tensor) -> dict[str, Tensor]:
    _, lengths, rows = torch.linalg.svd(z - z.mean(0), full_matrices=True)
    return {"means": z.mean(0), "bases": rows[:DIRECTIONS] * (F.pad(lengths, (0, 9)) > 1e-7)[:DIRECTIONS, None]}


def drawn(facts: dict[str, Tensor], j: int) -> Tensor:
    """Features kept of a class, one draw after the other."""
    generator = torch.Generator().manual_seed(seed_of(0, "kept", j))
    noise = torch.randn(DIRECTIONS, DIRECTIONS * SAMPLES, DIRECTIONS, generator=generator)
    rows = []
    for k in range(DIRECTIONS):
        z = [(facts["centres"] + facts["spreads"] * e) @ facts["directions"] for e in noise[k]]
        z = [row / row.norm() for row in z]
        rows += sorted(z, key=lambda row: -abs(float(row @ facts["directions"][k])))[:SAMPLES]
    return torch.stack(rows)


def by_hand(first: Numbers, tasks: list[tuple[Tensor, Tensor]]) -> tuple[Numbers, dict[int, dict[str, Tensor]]]:
    w, step, facts = first, 0, dict[int, dict[str, Tensor]]()
    for images, labels in tasks:
        old, x = w, images.double() / 255
        kept = torch.cat([torch.zeros(0, LATENT), *(drawn(facts[j], j) for j in facts)])
        kept_y = torch.tensor([j for j in facts for _ in range(DIRECTIONS * SAMPLES)], dtype=torch.int64)
        for round in range(ROUNDS):
            step += 1
            generator = torch.Generator().manual_seed(seed_of(0, 0, step))
            rows = order(len(x), STEPS * BATCH, generator).view(STEPS, BATCH)
            chosen = (
                order(len(kept), STEPS * KEPT, generator).view(STEPS, KEPT)
                if len(kept)
                else torch.zeros(STEPS, 0).long()
            )
            speed: Numbers = {}
            for s in range(STEPS):
                g = slopes(w, old, x[rows[s]], labels[rows[s]], kept[chosen[s]], kept_y[chosen[s]])
                norm = math.sqrt(sum(float(slope.square().sum()) for slope in g.values()))
                lr = LR * 0.5 * (1 + math.cos(math.pi * (round + s / STEPS) / ROUNDS))
                push = {n: min(1.0, CLIP / (norm + 1e-6)) * g[n] + DECAY * w[n] for n in w}
                speed = {n: push[n] + (MOMENTUM * speed[n] if speed else 0) for n in w}
                w = {n: w[n] - lr * speed[n] for n in w}
        step += 1  # the clients are asked to measure
        for j in facts:
            facts[j] |= spanned(drawn(facts[j], j))
        facts |= {j: learned(encode(w, x[labels == j])) for j in sorted(set(labels.tolist()))}
    return w, facts


# -- both, side by side ------------------------------------------------------------------------------------------------


@cache
def alone(**settings: Any) -> tuple[Parts, Numbers, list[tuple[Tensor, Tensor]]]:
    parts = assemble(plan("ictrl", ALONE, settings={**SETTINGS, **settings}), "cpu", workers=1)
    first = {n: t.clone() for n, t in parts.server.state.weights.items()}
    data = []
    for task in parts.scenario.tasks:
        parts.scenario.begin(task)
        local = parts.scenario.local(0, task)
        data.append((local.images, local.labels))
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        pass
    return parts, first, data


def gap(one: Numbers, other: Numbers) -> float:
    assert one.keys() == other.keys()
    return max((one[n] - other[n]).abs().max().item() for n in one)


@pytest.mark.usefixtures("in_double")
def test_one_client_is_the_centralised_algorithm() -> None:
    parts, first, data = alone()
    weights, facts = by_hand(first, data)
    state = parts.server.state
    assert gap(state.weights, weights) < 1e-9
    assert gap(weights, first) > 1e-2, "nothing was learned, so nothing was compared"
    for j, own in facts.items():
        for name in ("directions", "centres", "spreads", "means"):
            assert torch.allclose(getattr(state, name)[j], own[name], atol=1e-7), (name, j)
        ours, theirs = state.bases[j], own["bases"]
        assert torch.allclose(ours.T @ ours, theirs.T @ theirs, atol=1e-6), j  # either side of a direction will do
    for knobs in ({"keep": 0.0}, {"closed_loop": 0.0}, {"ascent": 1.0}):
        assert gap(alone(**knobs)[0].server.state.weights, weights) > 1e-5, knobs


# -- the two players ---------------------------------------------------------------------------------------------------


def rows_of(parts: Parts, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    kept = F.normalize(torch.randn(10, LATENT, generator=g))
    return torch.rand(9, 1, 8, 8, generator=g), torch.tensor([2, 3, 4] * 3), kept, torch.tensor([0, 1] * 5)


def ours(parts: Parts, x: Tensor, y: Tensor, kept: Tensor, kept_y: Tensor, **knobs: Any) -> tuple[Tensor, Numbers]:
    """The one number of the loss, and its slopes."""
    client = METHOD.client(replace(parts.engine.client.config, **knobs), parts.setting)
    nets: dict[str, Any] = client.networks()
    torch.manual_seed(1)
    for p in [*nets["net"].parameters(), *nets["old"].parameters()]:
        p.data = p.data + 0.1 * torch.randn_like(p)
    nets["old"].requires_grad_(False)
    g = torch.Generator()
    beside = {"kept": Batch(kept, kept_y, g)} if len(kept) else {}
    value = client.loss(nets, Batch(x, y, g, {}, beside), mask((2, 3), 5))  # type: ignore[attr-defined]
    names, parameters = zip(*nets["net"].named_parameters(), strict=True)
    weights = {n: p.detach() for n, p in nets["net"].named_parameters()}
    old = {f"decoder.{n}": p.detach() for n, p in nets["old"].named_parameters()}
    ours.at = weights, old  # type: ignore[attr-defined]
    return value.detach(), dict(zip(names, torch.autograd.grad(value, parameters), strict=True))


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("quirk", [False, True])
@pytest.mark.parametrize("ascent", [ASCENT, 1.0])
def test_one_number_has_the_slopes_of_both_players_losses(kept: bool, quirk: bool, ascent: float) -> None:
    parts = alone()[0]
    x, y, z, labels = rows_of(parts)
    rows = (x, y, z, labels) if kept else (x, y, z[:0], labels[:0])
    _, found = ours(parts, *rows, code_quirk=quirk, ascent=ascent)
    expected = slopes(*ours.at, *rows, quirk=quirk, ascent=ascent)  # type: ignore[attr-defined]
    for part in ("encoder", "decoder"):
        own = {n: g for n, g in expected.items() if n.startswith(part)}
        assert max(g.abs().max().item() for g in own.values()) > 1e-4
        assert gap({n: found[n] for n in own}, own) < 1e-10, part


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize(
    "knobs", [{"closed_loop": 0.0}, {"keep": 0.0}, {"ascent": 0.1}, {"eps": 1.0}, {"code_quirk": True}]
)
def test_every_part_counts(knobs: dict[str, Any]) -> None:
    parts = alone()[0]
    (value, found), (other, others) = ours(parts, *rows_of(parts)), ours(parts, *rows_of(parts), **knobs)
    assert abs(value - other) > 1e-6 and gap(found, others) > 1e-6


@pytest.mark.usefixtures("in_double")
def test_the_quirk_holds_the_encoder_alone() -> None:
    parts = alone()[0]
    plain, odd = (ours(parts, *rows_of(parts), code_quirk=quirk)[1] for quirk in (False, True))
    assert (
        gap({n: g for n, g in plain.items() if "decoder" in n}, {n: g for n, g in odd.items() if "decoder" in n})
        < 1e-12
    )
    assert gap(plain, odd) > 1e-6


# -- moments, memory, subspaces ----------------------------------------------------------------------------------------


@cache
def many() -> tuple[Parts, list[dict[str, Tensor]]]:
    """Three tasks of four clients, with the broadcast after every line."""
    parts = assemble(tiny_plan("ictrl", rounds=2), "cpu")
    after = []
    for line in learn(parts.scenario, parts.server, parts.door, parts.engine):
        if line["kind"] == "task" or line["round"] == 0:
            after.append({n: t.clone() for n, t in flatten(parts.server.broadcast()).items()})
    return parts, after


def test_summed_moments_are_those_of_all_features() -> None:
    parts, _ = many()
    task, client, state = parts.scenario.tasks[-1], parts.engine.client, parts.server.state
    held = [parts.scenario.local(c, task) for c in range(4)]
    for j in task.new:
        z = client.encoded(torch.cat([data.of(j) for data in held])).double()  # type: ignore[attr-defined]
        assert torch.allclose(state.means[j].double(), z.mean(0), atol=1e-6)
        covariance = torch.cov(z.T, correction=0)
        inside = state.bases[j].double() @ covariance @ state.bases[j].double().T
        top = torch.linalg.eigvalsh(covariance).flip(0)[: len(inside)]
        assert torch.allclose(inside, torch.diag(top), atol=1e-6)
        second = z.T @ z / len(z)
        along = state.directions[j].double() @ second @ state.directions[j].double().T
        assert torch.allclose(along, torch.diag(torch.linalg.eigvalsh(second).flip(0)[: len(along)]), atol=1e-6)


def test_clients_keep_nothing_and_send_statistics_only() -> None:
    parts, _ = many()
    data = parts.scenario.local(0, parts.scenario.tasks[-1])
    assert all(flatten(memory) == {} for memory in parts.transport.memories.values())
    reply = parts.engine.client.measure(None, data, parts.server.broadcast())  # type: ignore[attr-defined]
    width = parts.server.state.means.shape[1]
    shapes = {name.split("/")[0]: tuple(t.shape) for name, t in flatten(reply).items()}
    assert shapes == {"counts": (), "sums": (width,), "products": (width, width)}


def test_what_is_kept_of_old_classes_and_the_old_decoder_do_not_change() -> None:
    _, after = many()  # in turns: the first round of a task, and its end
    for begun, ended, task in zip(after[::2], after[1::2], range(3), strict=True):
        own = [name for name in begun if name.startswith("old_decoder/")]
        assert own and all(torch.equal(begun[n], ended[n]) for n in own)
        if task:
            before = after[2 * task - 1]
            decoder = {n.replace("weights/decoder.", "old_decoder/"): t for n, t in before.items() if "/decoder." in n}
            assert all(torch.equal(begun[n], decoder[n]) for n in own), "it is that of the last task's end"
            assert any(not torch.equal(ended[n.replace("old_decoder/", "weights/decoder.")], begun[n]) for n in own)
            for name in ("directions", "centres", "spreads"):
                assert torch.equal(before[name][: 2 * task], ended[name][: 2 * task])
    assert after[-1]["known"].tolist() == [True] * 6 + [False] * (len(after[-1]["known"]) - 6)


def test_old_subspaces_are_those_of_the_features_kept() -> None:
    parts, after = many()
    state, samples = parts.server.state, parts.engine.client.config.samples
    for j in range(4):
        z = recalled(state, j, samples, 0).double()
        assert torch.allclose(state.means[j].double(), z.mean(0), atol=1e-5)
        off = z - z.mean(0)
        assert (off - off @ state.bases[j].double().T @ state.bases[j].double()).norm(dim=1).max() < 1e-3
    assert not torch.allclose(after[1]["means"][0], after[-1]["means"][0], atol=1e-3), (
        "in its own task it was the data's"
    )


def a_class(images: int, latent: int = 8, directions: int = 3, seed: int = 0) -> tuple[Model, Tensor]:
    scale = torch.tensor([3.0, 2.0, 1.0] + [0.05] * (latent - 3))
    z = F.normalize(torch.randn(images, latent, generator=torch.Generator().manual_seed(seed)) * scale + 0.5).double()
    found = gaussians(z.mean(0), z.T @ z / images, directions)
    tables = [t[None].float() for t in (*found, *subspace(z.mean(0), z.T @ z / images, directions))]
    return Model({}, {}, *tables, known=mask((0,), 1), but_last=mask((), 1)), z


def test_features_are_drawn_by_directions() -> None:
    model, z = a_class(200)
    kept = recalled(model, 0, 20, 0)
    assert kept.shape == (60, 8) and torch.allclose(kept.norm(dim=1), torch.ones(60), atol=1e-5)
    assert torch.equal(kept, recalled(model, 0, 20, 0)), "everyone draws the same"
    assert not torch.equal(kept, recalled(model, 0, 20, 1)), "but not in every run"
    v = model.directions[0]
    assert torch.allclose(v @ v.T, torch.eye(3), atol=1e-5) and (kept - kept @ v.T @ v).norm(dim=1).max() < 1e-5
    assert torch.allclose((z.float() @ v.T).std(0, correction=0), model.spreads[0], atol=1e-5)
    along = (kept @ v.T).abs().view(3, 20, 3).mean(1)
    for k in range(3):
        assert along[k].argmax() == k or along[k, k] > 1.5 * (z.float() @ v[k]).abs().mean()
        assert along[k, k] > along[[i for i in range(3) if i != k], k].max()
    assert len(kept.unique(dim=0)) == 60


def test_a_class_of_one_image_is_its_feature() -> None:
    model, z = a_class(1)
    assert torch.allclose(recalled(model, 0, 5, 0), z.float().expand(15, -1), atol=1e-4)
    assert model.bases.abs().max() == 0 and model.spreads.max() < 1e-4


def test_server_and_clients_draw_by_the_runs_seed() -> None:
    setting = replace(a_setting(), seed=3)
    client, server = METHOD.client(Config(samples=2), setting), METHOD.server(Config(samples=2), setting)
    model = server.state
    model.directions[:2, :3], model.spreads[:2, :3], model.known[0] = torch.eye(len(model.means[0]))[:3], 0.5, True
    expected = recalled(model, 0, 2, 3)
    assert torch.equal(client.recalled(model, 0), expected)  # type: ignore[attr-defined]
    server.learn_classes(Task(1, ((0,), (1,))), {}, {}, {})  # type: ignore[attr-defined]
    assert torch.allclose(server.state.means[0], expected.mean(0), atol=1e-6)
    assert not torch.allclose(server.state.means[0], recalled(model, 0, 2, 0).mean(0), atol=1e-3)


@pytest.mark.parametrize("classifier", ["nearest_subspace", "nearest_mean"])
def test_an_image_is_of_the_nearest(classifier: str) -> None:
    parts, _ = many()
    images, _ = parts.scenario.test(parts.scenario.tasks[0])
    state, config = parts.server.state, replace(parts.engine.client.config, classifier=classifier)
    client = METHOD.client(config, parts.setting)
    with torch.no_grad():
        scores = client.predict(state, images)
        z = parts.engine.client.encoded(images)  # type: ignore[attr-defined]
    for j in range(6):
        off = z - state.means[j]
        if classifier == "nearest_subspace":
            off = off @ (torch.eye(z.shape[1]) - state.bases[j].T @ state.bases[j])
        assert torch.allclose(-off.square().sum(1), scores[:, j], atol=1e-4)


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("benchmark", "images", "latent", "batch", "steps"),
    [
        ("digits", 28, 32, 32, 10), ("cifar100-5x4", 200, 128, 32, 10), ("cifar100-10x10", 100, 512, 128, 8),
        ("tinyimagenet-10x5", 8, 128, 64, 15),
    ],
)  # fmt: skip
def test_features_grow_with_the_classes_and_batches_with_the_features(
    benchmark: str, images: int, latent: int, batch: int, steps: int
) -> None:
    client: Any = METHOD.client(Config(), of(benchmark))
    assert client.net.encoder.mean.out_features == latent and client.batch == batch
    fit = described(client, images)
    assert fit.steps == steps and fit.pool.batch_size == batch and "kept" not in fit.load
    assert client.eps == max(1.0, latent / batch)
    epochs = replace(of(benchmark), protocol=protocol("paper"))
    assert described(METHOD.client(Config(), epochs), images).steps == 0


def test_a_step_has_several_features_of_every_old_class() -> None:
    client: Any = METHOD.client(Config(), of("cifar100-5x4"))
    for old, least in ((1, 32), (4, 32), (16, 128)):
        fit = described(client, 200, old)
        assert fit.beside["kept"].batch_size == least and len(fit.beside["kept"]) == 200 * old
    asked = METHOD.client(Config(memory_batch=7, batch=9), of("cifar100-5x4"))
    fit = described(asked, 200, 16)
    assert fit.beside["kept"].batch_size == 7 and fit.pool.batch_size == 9


def of(benchmark: str) -> Setting:
    b = BENCHMARKS[benchmark]
    shape = {"digits": (1, 8, 8), "cifar100": (3, 32, 32), "tiny-imagenet": (3, 64, 64)}[b.dataset]
    return replace(a_setting(), capacity=b.tasks * b.classes_per_task, shape=shape, protocol=protocol(b.protocol))


def described(client: Any, images: int, old: int = 0) -> Fit:
    """What a client with so many images would train, once there are so many old classes."""
    state = METHOD.server(client.config, client.setting).state
    state.known[:old] = True
    task = Task(1, (tuple(range(old)), (old,)))
    shown = torch.zeros(images, *client.setting.shape, dtype=torch.uint8)
    data = LocalData(task, shown, torch.full((images,), old))
    return next(client.train(None, data, state))


def a_setting() -> Setting:
    return assemble(tiny_plan("ictrl"), "cpu").setting


def test_no_network_keeps_statistics_of_batches() -> None:
    for norm in ("batch", "group"):
        net = METHOD.client(Config(), replace(a_setting(), norm=norm)).networks()["net"]
        assert not any("running" in name for name in net.state_dict())


def test_pictures_are_made_of_every_class_known() -> None:
    parts, _ = many()
    data = parts.scenario.local(0, parts.scenario.tasks[-1])
    shown = parts.engine.client.look(None, data, parts.server.broadcast(), (0, 5))  # type: ignore[attr-defined]
    assert shown.made.keys() == {0, 5} and shown.kept == {} and shown.made[0].shape == (1, 8, 8)
    assert shown.made[0].dtype == torch.uint8
