"""GeoDL: the kernel against its integral, the loss against a naive one, one client against a plain reference."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks.subspaces import Geodesic, geodesic, principal
from fcil.federation.calls import Call
from fcil.federation.loop import learn
from fcil.method import Batch, Fit
from fcil.methods.geodl import Client, Memory, geodesic_loss
from fcil.parts import Parts, assemble
from fcil.plan import plan
from fcil.scenario.tasks import mask
from tests import test_reference as reference
from tests.conftest import TINY, tiny_plan
from tests.test_icarl import means_of, naive


def doubles(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def basis(width: int, number: int, seed: int) -> Tensor:
    return torch.linalg.qr(doubles(width, number, seed=seed))[0]


def matrix(kernel: Geodesic) -> Tensor:
    """The kernel written out, entry by entry, through its products."""
    width = len(kernel.start)
    rows, columns = torch.eye(width, dtype=torch.float64), torch.eye(width, dtype=torch.float64)
    return torch.stack([kernel.product(rows[i].expand(width, -1), columns) for i in range(width)])


def flow(begin: Tensor, end: Tensor, share: float) -> Tensor:
    """Where the shortest way is after a share of it, by the logarithm and the exponential of the Grassmannian."""
    inside = begin.T @ end
    away, slopes, turned = torch.linalg.svd((end - begin @ inside) @ inside.inverse(), full_matrices=False)
    angles = slopes.atan() * share
    return begin @ turned.T * angles.cos() + away * angles.sin()


def integral(begin: Tensor, end: Tensor) -> Tensor:
    """The mean projection on that way, by quadrature."""
    places, weights = np.polynomial.legendre.leggauss(30)
    spans = [flow(begin, end, (place + 1) / 2) for place in places]
    return sum(weight / 2 * span @ span.T for weight, span in zip(weights, spans, strict=True))  # type: ignore[return-value]


# -- the kernel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("width", "number"), [(8, 3), (8, 5), (20, 7), (5, 1)])  # 8 and 5: some angles are 0
def test_the_closed_form_is_the_integral(width: int, number: int, seed: int) -> None:
    begin, end = basis(width, number, seed), basis(width, number, seed + 100)
    assert (flow(begin, end, 1.0) @ flow(begin, end, 1.0).T - end @ end.T).abs().max() < 1e-10
    assert (matrix(geodesic(begin, end)) - integral(begin, end)).abs().max() < 1e-10


def test_between_lines_in_a_plane_by_hand() -> None:
    """At an angle of 90 degrees the mean of cos^2 is 1/2, of cos sin 1/pi."""
    begin, end = torch.eye(2, dtype=torch.float64).split(1, 1)
    found = matrix(geodesic(begin, end))
    expected = torch.tensor([[0.5, 1 / math.pi], [1 / math.pi, 0.5]], dtype=torch.float64)
    assert torch.allclose(found, expected)


def test_equal_subspaces_give_their_projection() -> None:
    span, turned = basis(9, 4, 0), basis(4, 4, 1)
    assert torch.allclose(matrix(geodesic(span, span @ turned)), span @ span.T, atol=1e-12)
    moved = torch.linalg.qr(span + 1e-7 * doubles(9, 4, seed=2))[0]  # where cosines are 1 to all digits
    assert torch.allclose(matrix(geodesic(span, moved)), (span @ span.T + moved @ moved.T) / 2, atol=1e-12)


def test_the_kernel_knows_subspaces_and_not_their_bases() -> None:
    begin, end, turn = basis(9, 4, 0), basis(9, 4, 1), basis(4, 4, 2)
    assert torch.allclose(matrix(geodesic(begin @ turn, end @ turn.T)), matrix(geodesic(begin, end)), atol=1e-12)
    assert torch.allclose(matrix(geodesic(end, begin)), matrix(geodesic(begin, end)), atol=1e-12)


def test_directions_without_a_partner_count_half() -> None:
    begin, end = basis(9, 3, 0), basis(9, 3, 1)
    nothing = torch.zeros(9, 1, dtype=torch.float64)
    less = torch.cat([end[:, :2], nothing], 1)
    found = matrix(geodesic(begin, less))
    assert found.isfinite().all() and torch.allclose(found, found.T)
    partners = torch.linalg.svd(begin.T @ less)[0]
    spare = (begin @ partners)[:, 2:]
    with_partners = (begin @ partners)[:, :2]
    assert torch.allclose(found, integral(with_partners, end[:, :2]) + spare @ spare.T / 2, atol=1e-10)
    assert not matrix(geodesic(0 * begin, 0 * end)).any()


def test_principal_directions_are_those_of_the_largest_variance() -> None:
    features = doubles(12, 6) * torch.tensor([5.0, 4, 3, 2, 1, 0.1], dtype=torch.float64)
    found = principal(features, 4)
    assert torch.allclose(found.T @ found, torch.eye(4, dtype=torch.float64))
    _, vectors = torch.linalg.eigh(features.T @ features)
    expected = vectors[:, -4:]
    assert torch.allclose(found @ found.T, expected @ expected.T)


def test_where_features_do_not_vary_there_is_no_direction() -> None:
    features = doubles(2, 6)[[0, 1, 0, 0, 1, 1]]
    found = principal((features - features.mean(0)).float(), 4)
    assert found.dtype == torch.float64 and found[:, 0].norm() == pytest.approx(1) and not found[:, 1:].any()
    assert not principal(torch.zeros(5, 6), 3).any()
    lengths = torch.tensor([1.0, 1e-3, 1e-4, 1e-6], dtype=torch.float64)  # the last is noise
    assert torch.allclose(principal(lengths.diag(), 4).norm(dim=0), torch.tensor([1.0, 1, 1, 0], dtype=torch.float64))


# -- the loss ---------------------------------------------------------------------------------------------------------


def naive_loss(old: Tensor, new: Tensor, form: str = "cosine", centre: str = "images") -> Tensor:
    old, new = (own / own.norm(dim=1, keepdim=True) for own in (old, new))
    spans = []
    for own in (old.detach().numpy(), new.detach().numpy()):
        middle = own.mean(0) if centre == "images" else own.mean(1)[:, None]
        spans.append(torch.tensor(np.linalg.svd((own - middle).T, full_matrices=False)[0][:, : min(own.shape) - 2]))
    kernel = integral(*spans)
    total = torch.zeros((), dtype=torch.float64)
    for o, n in zip(old, new, strict=True):
        if form == "cosine":
            total = total + 1 - o @ kernel @ n / ((o @ kernel @ o).sqrt() * (n @ kernel @ n).sqrt())
        else:
            total = total + (o - n) @ kernel @ (o - n)
    return total / len(old)


@pytest.mark.parametrize("shape", [(6, 20), (12, 7), (4, 4)])
@pytest.mark.parametrize("form", ["cosine", "distance"])
@pytest.mark.parametrize("centre", ["images", "numbers"])
def test_the_loss_and_its_gradient_are_those_with_a_kernel_that_stands_still(
    shape: tuple[int, int], form: str, centre: str
) -> None:
    old, new = doubles(*shape).add(0.5), (doubles(*shape) + doubles(*shape, seed=1)).requires_grad_()
    ours, theirs = geodesic_loss(old, new, form, centre), naive_loss(old, new, form, centre)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-9)
    gradients = [torch.autograd.grad(value, new)[0] for value in (ours, theirs)]
    assert torch.allclose(*gradients, atol=1e-9) and gradients[0].abs().max() > 1e-3


def test_it_is_not_plain_cosine_distillation() -> None:
    old, new = doubles(8, 30).abs(), doubles(8, 30, seed=1).abs()
    plain = (1 - F.cosine_similarity(old, new)).mean()
    assert abs(geodesic_loss(old, new, "cosine", "images") - plain) > 0.05
    assert geodesic_loss(old, 3 * old, "cosine", "images").item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("form", ["cosine", "distance"])
def test_features_that_span_little_or_nothing_do_no_harm(form: str) -> None:
    for old, new in [
        (doubles(1, 9).expand(6, 9), doubles(1, 9, seed=1).expand(6, 9)),
        (torch.zeros(6, 9), torch.zeros(6, 9)),
        (doubles(6, 9), torch.zeros(6, 9)),
        (doubles(2, 9)[[0, 1, 0, 1, 0, 0]], doubles(6, 9, seed=1)),
    ]:
        learned = new.double().clone().requires_grad_()
        value = geodesic_loss(old.double(), learned, form, "images")
        value.backward()
        assert value.isfinite() and learned.grad is not None and learned.grad.isfinite().all()


# -- a client ---------------------------------------------------------------------------------------------------------


@cache
def learned(**how: Any) -> Parts:
    parts = assemble(tiny_plan("geodl", **{"rounds": 1, "steps": 1, **how}), "cpu", workers=1)
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        pass
    return parts


def client_of(parts: Parts) -> Client:
    return parts.engine.client  # type: ignore[return-value]


def fit_of(parts: Parts, task: int) -> Fit:
    for now in parts.scenario.tasks[: task + 1]:
        parts.scenario.begin(now)
    state = replace(parts.server.state, new=mask(now.new, 6), old=mask(now.old, 6))
    state.old_weights = state.weights if task else {}
    return next(client_of(parts).train(Memory(), parts.scenario.local(0, now), state))


@pytest.mark.parametrize("task", [0, 1, 2])
def test_the_term_weighs_as_the_root_of_old_to_new_classes_of_all_clients(task: int) -> None:
    fit = fit_of(learned(), task)
    assert fit.given.weight.shape == () and fit.given.weight.item() == pytest.approx(5 * math.sqrt(task))
    assert ("old" in fit.load) == (task > 0) and fit.trains == ("net",)


def values(size: int = 8, task: int = 1, **knobs: Any) -> tuple[float, float]:
    """The loss of a batch, and the cross-entropy in it."""
    parts = assemble(tiny_plan("geodl", **knobs), "cpu", workers=1)
    fit = fit_of(parts, task)
    parts.engine.slots[0].networks.thaw(fit)
    nets = {name: parts.engine.nets[name] for name in fit.load}  # as they were made: they differ
    images, labels = fit.pool.images[:size].float() / 255, fit.pool.labels[:size]
    found = fit.loss(nets, Batch(images, labels, torch.Generator()), fit.given).item()
    logits = nets["net"](images)[:, fit.given.seen.nonzero()[:, 0]]
    return found, F.cross_entropy(logits, labels).item()


def test_the_loss_is_cross_entropy_and_the_term() -> None:
    (total, plain), (twice, _), (without, _) = values(), values(distill=10.0), values(distill=0.0)
    assert without == pytest.approx(plain, rel=1e-5) and total > plain + 0.01
    assert twice - plain == pytest.approx(2 * (total - plain), rel=1e-4)


def test_the_first_task_and_tiny_batches_have_no_term() -> None:
    for size, task in ((8, 0), (3, 1)):
        total, plain = values(size, task)
        assert total == pytest.approx(plain, rel=1e-5)
    total, plain = values(4)
    assert total > plain + 0.001


def test_every_choice_matters() -> None:
    found = [values(**how)[0] for how in ({}, {"form": "distance"}, {"centre": "numbers"}, {"grid": 1})]
    assert len({round(value, 5) for value in found}) == 4


def test_maps_are_averaged_to_a_grid() -> None:
    maps = torch.arange(32.0).view(1, 2, 4, 4)
    client = client_of(learned())
    assert client.flat([maps]).tolist() == [[2.5, 4.5, 10.5, 12.5, 18.5, 20.5, 26.5, 28.5]]


def test_clients_of_one_image_train_without_harm() -> None:
    parts = assemble(tiny_plan("geodl"), "cpu", workers=1)
    task = parts.scenario.tasks[1]
    parts.scenario.begin(task)
    data = parts.scenario.local(0, task)
    alone = replace(data, images=data.images[:1], labels=data.labels[:1], cache={})
    weights = parts.server.state.weights
    state = replace(parts.server.state, old_weights=weights, new=mask(task.new, 6), old=mask(task.old, 6))
    call = Call(task=1, step=0, round=0, rounds=1, seed=0)
    answered = parts.engine.answer(0, Client.train, Memory(), alone, state, call)
    assert answered.reply.count == 1
    assert all(t.isfinite().all() for t in answered.reply.weights.values())


def test_with_a_codec_new_images_pass_it_too() -> None:
    parts = learned(exemplar_codec="klt:6")
    fit, state = fit_of(parts, 0), parts.server.state
    data, codec = parts.scenario.local(0, parts.scenario.tasks[0]), client_of(parts).codec
    assert torch.equal(fit.pool.images, codec.decode(state.codec, codec.encode(state.codec, data.images)))
    assert not torch.equal(fit.pool.images, data.images)
    assert all(x.shape[1:] == (6,) for own in parts.transport.memories.values() for x in own.exemplars.values())  # type: ignore[attr-defined]


# -- the centralised algorithm ----------------------------------------------------------------------------------------


def last_map(w: dict[str, Tensor], images: Tensor, training: bool) -> tuple[Tensor, Tensor]:
    """Scores, and the map of 64 channels and 2x2 places whose mean the head sees, as a row."""
    found: list[Tensor] = []
    original = Tensor.mean

    def watch(self: Tensor, *args: Any, **how: Any) -> Tensor:
        if args == ((2, 3),):
            found.append(self)
        return original(self, *args, **how)

    Tensor.mean = watch  # type: ignore[method-assign, assignment]
    try:
        said = reference.scores(w, images, training)
    finally:
        Tensor.mean = original  # type: ignore[method-assign]
    return said, found[-1].flatten(1)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("form", ["cosine", "distance"])
def test_one_client_is_the_centralised_algorithm(form: str) -> None:
    """Weights, exemplars and class means of a plain reference in float64, twelve steps in three tasks."""
    alone = replace(TINY, clients=1, active=1, train_limit=30, test_limit=5)
    parts = assemble(plan("geodl", alone, settings={**reference.PROTOCOL, "form": form, "distill": 3.0}), "cpu")
    w, tasks = {n: t.clone() for n, t in parts.server.state.weights.items()}, []
    for task in parts.scenario.tasks:
        parts.scenario.begin(task)
        data = parts.scenario.local(0, task)
        tasks.append((data.images, data.labels))
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        pass

    step, kept, terms = 0, dict[int, Tensor](), list[float]()
    for task, (images, labels) in enumerate(tasks):
        old, seen = 2 * task, 2 * task + 2
        teacher = dict(w)

        def objective(
            v: dict[str, Tensor], x: Tensor, y: Tensor, t=teacher, old: int = old, seen: int = seen
        ) -> Tensor:
            said, features = last_map(v, x, True)
            total = reference.likelihood(said, y, list(range(seen)))
            if old:
                with torch.no_grad():
                    before = last_map(t, x, False)[1]
                terms.append(float(naive_loss(before, features.detach(), form)))
                total = total + 3.0 * math.sqrt(old / 2) * naive_loss(before, features, form)
            return total

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
    assert len(terms) == 8 and min(terms) > 1e-3
    assert max((ours.weights[n] - w[n]).abs().max().item() for n in w) < 1e-9
    for j, own in kept.items():
        unit = means_of(w, own)
        middle = (unit / unit.norm(dim=1, keepdim=True)).mean(0)
        assert (ours.means[j] - middle / middle.norm()).abs().max() < 1e-9
