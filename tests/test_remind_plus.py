"""REMIND+ (our reading): its autoencoder, what is trained when; and one client is the centralised algorithm."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks.quantizer import code_bytes, coded, decoded, no_codebooks
from fcil.blocks.training import loaded
from fcil.errors import UserError
from fcil.federation.engine import threads
from fcil.method import Batch
from fcil.methods.remind_plus import Client, Config, Given
from fcil.networks.map_autoencoder import MapAutoEncoder
from fcil.parts import assemble
from fcil.records import flatten
from fcil.scenario.tasks import mask
from tests import test_reference as reference
from tests.conftest import tiny_plan
from tests.test_reference import order
from tests.test_remind import (
    BATCH,
    EXCHANGES,
    ROUNDS,
    STEPS,
    Numbers,
    Run,
    by_fcil,
    codebooks_by_hand,
    descended,
    distinct,
    draws,
    kept_by_hand,
    later_tasks,
    layer,
    normalised,
    ran,
    step_generator,
)

UNIT = 16  # bytes of a digit's code: 16 places, 1 codebook


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with threads(1):
        yield


# -- the autoencoder --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(
    ("shape", "channels", "between"),
    [((256, 8, 8), 64, (64, 4, 4)), ((16, 8, 8), 4, (4, 4, 4)), ((8, 5, 7), 3, (3, 3, 4)), ((8, 1, 1), 2, (2, 1, 1))],
)
def test_maps_pass_a_small_bottleneck_and_come_back_in_their_shape(
    shape: tuple[int, int, int], channels: int, between: tuple[int, int, int], norm: str
) -> None:
    net = MapAutoEncoder(shape, channels, 6, norm).eval()
    codes = net.encode(torch.rand(2, *shape, generator=draws()))
    assert codes.shape == (2, *between) == (2, *net.bottleneck)
    assert net.decode(codes).shape == (2, *shape) and net.classify(codes).shape == (2, 6)


def test_a_cifar_image_takes_256_bytes_and_a_digit_16() -> None:
    config = Config()
    for shape, size in (((256, 8, 8), 256), ((16, 8, 8), 16)):
        net = MapAutoEncoder(shape, shape[0] // 4, 10)
        codebooks = no_codebooks(net.bottleneck[0], config.part, config.centres)
        assert code_bytes(codebooks, net.bottleneck) == size


# -- its loss ---------------------------------------------------------------------------------------------------------


def client(**settings: Any) -> Client:
    torch.manual_seed(0)
    return assemble(tiny_plan("remind-plus", **settings), "cpu", workers=1).engine.client  # type: ignore[return-value]


def autoencoder_loss(**settings: Any) -> Tensor:
    own = client(**settings)
    batch = Batch(torch.rand(8, 1, 8, 8, generator=draws()), torch.arange(8) % 2, draws())
    return own.autoencoder_loss(own.networks(), batch, mask((0, 1), 6))  # type: ignore[return-value]


def test_its_loss_is_an_error_and_two_cross_entropies() -> None:
    own = client()
    net, between = own.net.eval(), own.autoencoder.eval()
    images, labels = torch.rand(8, 1, 8, 8, generator=draws()), torch.arange(8) % 2
    with torch.no_grad():
        maps = net.lower(images)
        codes = between.encode(maps)
        there = between.decode(codes)
        passed_on = float(F.cross_entropy(net.upper(there)[:, :2], labels))
        looked_at = float(F.cross_entropy(between.classify(codes)[:, :2], labels))
    error = sum(float(((there[i] - maps[i]) ** 2).sum()) for i in range(8)) / maps.numel()
    weights = {"reconstruct": 2.0, "auxiliary": 0.5, "classify": 3.0}
    wanted = 2 * error + 0.5 * looked_at + 3 * passed_on
    found = own.__class__(Config(**weights), own.setting).autoencoder_loss(
        {"net": net, "autoencoder": between}, Batch(images, labels, draws()), mask((0, 1), 6)
    )
    assert found.item() == pytest.approx(wanted, rel=1e-5)
    assert min(error, looked_at, passed_on) > 1e-3, "each part of it counts"


@pytest.mark.parametrize("part", ["reconstruct", "auxiliary", "classify"])
def test_leaving_out_any_part_changes_the_loss(part: str) -> None:
    assert (autoencoder_loss() - autoencoder_loss(**{part: 0.0})).item() > 1e-3


def test_it_teaches_the_autoencoder_alone() -> None:
    fits = [fit for task, _, fit in ran("remind-plus").fits if "autoencoder" in fit.trains]
    assert fits and all(fit.trains == ("autoencoder",) and set(fit.load) == {"net", "autoencoder"} for fit in fits)


# -- a run ------------------------------------------------------------------------------------------------------------


def test_the_autoencoder_learns_in_rounds_of_its_own_in_the_first_task() -> None:
    seen = ran("remind-plus", autoencoder_rounds=5, exchanges=2)
    stages = [(line["task"], line["stage"]) for line in seen.lines if line["kind"] == "round"]
    assert stages[:10] == [(0, "train")] * 3 + [(0, "autoencoder")] * 5 + [(0, "codebooks")] * 2
    assert stages[10:] == [(1, "train")] * 3 + [(2, "train")] * 3


def test_the_autoencoder_learns() -> None:
    seen = ran("remind-plus", tasks=1, rounds=6, steps=10)
    losses = [line["loss"] for line in seen.lines if line.get("stage") == "autoencoder"]
    assert losses[-1] < 0.7 * losses[0]


def test_after_the_first_task_all_but_the_upper_part_is_frozen() -> None:
    seen = ran("remind-plus")
    before, (first, *later) = flatten(assemble(tiny_plan("remind-plus"), "cpu", workers=1).server.state), seen.states
    learned = [n for n in first if n.startswith(("weights/", "autoencoder/"))]
    assert all(not torch.equal(before[n], first[n]) for n in learned), "all of it learns in the first"
    for name in first:
        if name.startswith(("weights/lower.", "autoencoder/")) or name == "codebooks":
            assert all(torch.equal(first[name], state[name]) for state in later), name
        elif name.startswith("weights/upper."):
            assert not torch.equal(first[name], later[-1][name]), name


def test_what_is_sent_and_kept() -> None:
    seen = ran("remind-plus")
    for task, name, reply in seen.replies:
        if name == "train":
            assert {n.split(".")[0] for n in reply.weights} == ({"lower", "upper"} if task == 0 else {"upper"})
        if name == "tune":
            assert task == 0 and reply.autoencoder.keys() == seen.parts.server.state.autoencoder.keys()
    for memories in seen.memories:
        for codes in memories.values():
            assert all(rows.dtype == torch.uint8 and rows.shape[1] == UNIT for rows in codes.values())
            assert sum(rows.nbytes for rows in codes.values()) <= seen.parts.setting.budget.per_client


def test_images_are_classified_by_decoded_maps_of_quantised_bottlenecks() -> None:
    parts = ran("remind-plus").parts
    state, (images, _) = parts.server.state, parts.scenario.test(parts.scenario.tasks[0])
    own: Any = parts.engine.client
    net, between = loaded(own.net, state.weights), loaded(own.autoencoder, state.autoencoder)
    with torch.inference_mode():
        maps = net.lower(images)  # type: ignore[operator]
        codes = coded(state.codebooks, between.encode(maps))  # type: ignore[operator]
        there = between.decode(decoded(state.codebooks, codes, (4, 4, 4)))  # type: ignore[operator]
        said = parts.engine.client.predict(state, images)[:, :6]
        assert torch.allclose(said, net.upper(there)[:, :6], atol=1e-6)  # type: ignore[operator]
        assert not torch.allclose(said, net.upper(maps)[:, :6], atol=1e-3)  # type: ignore[operator]


def test_replayed_maps_are_decoded_by_the_frozen_autoencoder() -> None:
    own = client()
    codes, labels = torch.randint(0, 256, (5, UNIT), generator=draws()).to(torch.uint8), torch.arange(5) % 2
    codebooks = torch.randn(1, 256, 4, generator=draws(1))
    batch = Batch(torch.zeros(5, 0), labels, draws(), {"codes": codes})
    config = Config(crop=0.0)
    plain = own.__class__(config, own.setting)
    own.net.eval(), own.autoencoder.eval()
    nets = {"net": own.net, "autoencoder": own.autoencoder}
    found = plain.loss(nets, batch, Given(codebooks, mask((0, 1), 6)))
    maps = own.autoencoder.decode(decoded(codebooks, codes, (4, 4, 4)))
    assert found.item() == pytest.approx(F.cross_entropy(own.net.upper(maps)[:, :2], labels).item(), rel=1e-5)
    found.backward()
    assert all(p.grad is None for p in own.autoencoder.parameters())
    assert all(p.grad is not None for p in own.net.upper.parameters())


def test_a_single_pass_learns_each_image_at_most_once() -> None:
    seen = ran("remind-plus", single_pass=True, tasks=2)
    fits = [fit for t, _, fit in seen.fits if t == 1 and len(fit.pool)]
    assert fits and all(fit.pool.batch_size == 1 and fit.steps == len(fit.pool) for fit in fits)
    assert 0 < sum(len(fit.pool) for fit in fits) <= sum(seen.held[1])


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"bottleneck": 6}, "6 channels cannot be cut into parts of 4"), ({"memory": 0.1}, "an exemplar takes 16")],
)
def test_what_cannot_be_is_refused_in_a_sentence(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        client(**settings)


# -- one client is the centralised algorithm --------------------------------------------------------------------------


def lower(w: Numbers, images: Tensor, training: bool) -> Tensor:
    return layer(w, "lower.1", images / 127.5 - 1, 1, training)


def upper(w: Numbers, maps: Tensor, training: bool) -> Tensor:
    x = layer(w, "upper.body.1", layer(w, "upper.body.0", maps, 2, training), 2, training)
    return x.mean((2, 3)) @ w["upper.head.weight"].T + w["upper.head.bias"]


def encode(w: Numbers, maps: Tensor, training: bool) -> Tensor:
    x = torch.einsum("nchw,dc->ndhw", maps, w["autoencoder.narrow.weight"][:, :, 0, 0])
    x = normalised(w, "autoencoder.norms.0", x, training).relu()
    return F.conv2d(x, w["autoencoder.shrink.weight"], w["autoencoder.shrink.bias"], stride=2, padding=1)


def decode(w: Numbers, codes: Tensor, training: bool) -> Tensor:
    x = codes.repeat_interleave(2, 2).repeat_interleave(2, 3)
    x = F.conv2d(x, w["autoencoder.spread.weight"], padding=1)
    x = normalised(w, "autoencoder.norms.1", x, training).relu()
    x = torch.einsum("nchw,dc->ndhw", x, w["autoencoder.widen.weight"][:, :, 0, 0])
    return x + w["autoencoder.widen.bias"].view(-1, 1, 1)


def by_hand(
    given: Run, auxiliary: float = 1.0, classify: float = 1.0
) -> tuple[list[Numbers], Tensor, list[list[list[int]]]]:
    w, step = given.first, 0
    images, labels = given.data[0]

    def first(v: Numbers, x: Tensor, y: Tensor) -> Tensor:
        return reference.likelihood(upper(v, lower(v, x, True), True), y, [0, 1])

    def between(v: Numbers, x: Tensor, y: Tensor) -> Tensor:
        maps = lower(v, x, False)
        codes = encode(v, maps, True)
        there = decode(v, codes, True)
        looked_at = codes.mean((2, 3)) @ v["autoencoder.head.weight"].T + v["autoencoder.head.bias"]
        total = ((there - maps) ** 2).mean() + auxiliary * reference.likelihood(looked_at, y, [0, 1])
        return total + classify * reference.likelihood(upper(v, there, False), y, [0, 1])

    for loss, learns in ((first, ("lower.", "upper.")), (between, ("autoencoder.",))):
        for round in range(ROUNDS):
            step += 1
            rows = order(len(labels), STEPS * BATCH, step_generator(step)).view(STEPS, BATCH)
            w = descended(w, lambda v, s, f=loss, r=rows: f(v, images[r[s]], labels[r[s]]), learns, round)
    step += EXCHANGES + 1

    @torch.no_grad()
    def shrunk(x: Tensor, first: Numbers = w) -> Tensor:
        return encode(first, lower(first, x, False), False)

    @torch.no_grad()
    def grown(codes: Tensor, first: Numbers = w) -> Tensor:
        return decode(first, codes, False)

    books = codebooks_by_hand(shrunk(images), 4)
    return (
        [w, *later_tasks(given, w, step, books, shrunk, grown, upper, 0.25)],
        books,
        kept_by_hand(given, books, shrunk),
    )


@cache
def ours() -> Run:
    return by_fcil("remind-plus")


@pytest.mark.usefixtures("in_double")
def test_with_one_client_it_is_the_centralised_algorithm() -> None:
    results, books, kept = by_hand(ours())
    assert (books - ours().codebooks).abs().max() < 1e-9 and books.std() > 0.05
    assert kept == [distinct(torch.cat([labels[:, None], codes.long()], 1)) for codes, labels in ours().kept]
    for one, other in zip(ours().weights, results, strict=True):
        assert reference.gap(one, other) < 1e-9
    assert reference.gap(ours().weights[1], ours().weights[0]) > 1e-2, "something was learned"


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("without", ["auxiliary", "classify"])
def test_leaving_a_part_out_changes_the_result(without: str) -> None:
    results, _, _ = by_hand(ours(), **{without: 0.0})
    assert reference.gap(ours().weights[2], results[2]) > 1e-4
