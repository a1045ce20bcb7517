"""PODNet: its losses against known answers, its classifier against loops, and that every part really happens."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks.pooled_outputs import flat, spatial
from fcil.blocks.proxies import Proposal, clustered, imprinted, nca, nca_as_printed, nca_of_the_code
from fcil.federation.engine import threads
from fcil.method import Batch
from fcil.methods.podnet import PROXIES, Client, Given
from fcil.methods.podnet import given as given_by
from fcil.networks import build, build_with_proxies
from fcil.networks.heads import Proxies
from fcil.parts import Parts
from fcil.records import Weights, size_in_bytes
from tests.conftest import TINY, tiny_plan
from tests.test_every_method import Seen, Watching, lines_of, parts_of

SCORES = torch.tensor([[-0.5, -0.2, -1.0], [-0.1, -0.9, -0.4]])
LABELS, ALL = torch.tensor([1, 0]), torch.ones(3, dtype=torch.bool)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- the classification loss ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("eta", "paper", "code"), [(1.0, 0.774077, 0.783969), (3.0, 1.101413, 0.403655)])
def test_both_forms_of_the_loss_have_the_known_values(eta: float, paper: float, code: float) -> None:
    for form in (nca, nca_as_printed):
        assert form(SCORES, LABELS, ALL, torch.tensor(eta), 0.6).item() == pytest.approx(paper, abs=1e-6)
    assert nca_of_the_code(SCORES, LABELS, ALL, torch.tensor(eta), 0.6).item() == pytest.approx(code, abs=1e-6)


@pytest.mark.parametrize("form", [nca, nca_as_printed, nca_of_the_code])
def test_classes_that_were_not_seen_do_not_count(form: Any) -> None:
    more = torch.cat([SCORES, torch.tensor([[5.0], [7.0]])], 1).requires_grad_()
    seen, eta = torch.tensor([True, True, True, False]), torch.tensor(2.0)
    found = form(more, LABELS, seen, eta, 0.6)
    found.backward()
    assert found.item() == pytest.approx(form(SCORES, LABELS, ALL, eta, 0.6).item(), abs=1e-6)
    assert (more.grad[:, 3] == 0).all() and (more.grad[:, :3] != 0).any()


def test_an_image_beyond_the_margin_adds_nothing() -> None:
    scores = torch.tensor([[0.0, -3.0, -3.0], [-1.0, 0.0, -1.0]], requires_grad=True)
    found = nca(scores, torch.tensor([0, 0]), ALL, torch.tensor(1.0), 0.6)
    found.backward()
    assert found.item() == pytest.approx((0 + 1.6 + math.log(1 + math.exp(-1))) / 2)
    assert (scores.grad[0] == 0).all() and (scores.grad[1] != 0).any()


def test_the_margin_does_not_turn_the_loss_around() -> None:
    alike, eta = torch.full((2, 3), -1.0), torch.tensor(1.0, requires_grad=True)
    nca(alike, LABELS, ALL, eta, 0.6).backward()
    assert eta.grad.item() == pytest.approx(0, abs=1e-6)  # nothing is known yet: eta stays
    apart, eta.grad = alike.clone(), None
    apart[torch.arange(2), LABELS] += 0.3  # right, but by less than the margin
    nca(apart, LABELS, ALL, eta, 0.6).backward()
    assert eta.grad.item() == pytest.approx(-0.3, abs=1e-6)  # what is right is to be said louder


def test_as_printed_the_margin_teaches_eta_and_nothing_else_is_different() -> None:
    grads = []
    for form in (nca, nca_as_printed):
        scores, eta = SCORES.clone().requires_grad_(), torch.tensor(1.5, requires_grad=True)
        value = form(scores, LABELS, ALL, eta, 0.6)
        grads.append(torch.autograd.grad(value, (scores, eta)))
    assert value > 0 and torch.equal(grads[0][0], grads[1][0])
    assert grads[1][1].item() == pytest.approx(grads[0][1].item() + 0.6, abs=1e-6)
    eta = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    s = SCORES.double()
    each = [-(eta * (row[y] - 0.6)).exp() .log() + sum((eta * row[i]).exp() for i in range(3) if i != y).log()
            for row, y in zip(s, LABELS.tolist(), strict=True)]  # fmt: skip
    (by_hand,) = torch.autograd.grad(sum(each) / 2, eta)
    assert grads[1][1].item() == pytest.approx(by_hand.item(), abs=1e-6)


def test_only_the_margin_of_the_paper_is_felt() -> None:
    eta = torch.tensor(2.0)
    one, other = (nca(SCORES, LABELS, ALL, eta, margin).item() for margin in (0.6, 0.7))
    assert other - one == pytest.approx(0.2, abs=1e-6)
    one, other = (nca_of_the_code(SCORES, LABELS, ALL, eta, margin).item() for margin in (0.6, 0.7))
    assert one == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize("form", [nca, nca_as_printed, nca_of_the_code])
def test_a_class_alone_has_nothing_to_learn_and_nothing_breaks(form: Any) -> None:
    scores = SCORES.clone().requires_grad_()
    alone, eta = torch.tensor([False, True, False]), torch.tensor(1.0, requires_grad=True)
    found = form(scores, torch.tensor([1, 1]), alone, eta, 0.6)
    found.backward()
    assert found.item() == pytest.approx(0.0, abs=1e-6)
    assert (scores.grad == 0).all() and eta.grad.isfinite()


# -- distillation -----------------------------------------------------------------------------------------------------


def test_spatial_pod_has_the_known_value() -> None:
    one = torch.arange(8.0).view(1, 2, 2, 2)
    other = one.clone()
    other[0, 0, 0, 0] = 2
    assert spatial([one], [other]).item() == pytest.approx(0.0428248, abs=1e-7)
    assert spatial([one], [one]).item() == 0
    assert spatial([one], [3 * one]).item() == pytest.approx(0, abs=1e-6), "only directions count"
    assert spatial([one, one], [other, one]).item() == pytest.approx(0.0428248 / 2, abs=1e-7)


def by_loops(one: Tensor, other: Tensor) -> float:
    """Spatial POD of one stage, entry by entry."""
    total = 0.0
    for a, b in zip(one.tolist(), other.tolist(), strict=True):
        rows = []
        for image in (a, b):
            sums = [sum(x**2 for x in line) for plane in image for line in plane]
            sums += [sum(line[i] ** 2 for line in plane) for plane in image for i in range(len(plane[0]))]
            length = math.sqrt(sum(x**2 for x in sums))
            rows.append([x / length for x in sums])
        total += math.sqrt(sum((x - y) ** 2 for x, y in zip(*rows, strict=True)))
    return total / len(one)


def test_spatial_pod_is_that_of_loops_averaged_over_stages() -> None:
    one, other = ([drawn(3, 4, 5, 2, seed=s), drawn(3, 2, 3, 3, seed=s + 1)] for s in (0, 2))
    expected = sum(by_loops(a, b) for a, b in zip(one, other, strict=True)) / 2
    assert spatial(one, other).item() == pytest.approx(expected, rel=1e-12)


def test_flat_pod_by_hand() -> None:
    one, other = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[6.0, 8.0], [0.0, 5.0]])
    assert flat(one, other).item() == pytest.approx((0 + 1) / 2)
    assert flat(one, -one).item() == pytest.approx(2)


def test_distillation_has_no_gradient_that_is_not_a_number_where_nothing_differs() -> None:
    maps = drawn(2, 3, 4, 4).requires_grad_()
    (spatial([maps], [maps.detach()]) + flat(maps.flatten(1), maps.detach().flatten(1))).backward()
    assert maps.grad.abs().max() < 1e-9


# -- the network ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", ["small", "resnet8", "resnet18"])
def test_raw_maps_are_those_before_the_activation_to_the_bit(name: str, norm: str) -> None:
    found = []
    for raw in (False, True):
        torch.manual_seed(0)
        net = build(name, (3, 8, 8), 5, norm).train()
        images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        maps = net.body.stages(net.normalise(images), raw) if raw else net.stages(images)
        if raw:
            assert all((m < 0).any() for m in maps)
            maps = [m.relu() for m in maps]
        sum(m.square().mean() for m in maps).backward()
        found.append([[*maps, *net.buffers()], [images.grad, *(p.grad for p in net.body.parameters())]])
    assert all(torch.equal(one, other) for one, other in zip(found[0][0], found[1][0], strict=True))
    for one, other in zip(found[0][1], found[1][1], strict=True):  # sums of gradients are taken in another order
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5 * float(one.abs().max()))


def test_features_are_the_mean_of_the_last_raw_maps() -> None:
    net, images = build_with_proxies("small", (1, 8, 8), 6, 10).eval(), torch.rand(3, 1, 8, 8)
    assert (net.features(images) < 0).any() and len(net.stages(images)) == 3
    assert torch.allclose(net.features(images), net.stages(images)[-1].flatten(2).mean(2))
    assert torch.equal(net(images), net.head(net.features(images)))


@pytest.mark.parametrize("cosine", [True, False])
def test_a_class_is_scored_by_its_own_proxies_as_by_loops(cosine: bool) -> None:
    head, features = Proxies(4, classes=3, proxies=5, cosine=cosine).double(), drawn(2, 4, seed=1)
    weight = head.weight.detach()
    for n, row in enumerate(head(features).tolist()):
        f = features[n] / features[n].norm()
        for c, score in enumerate(row):
            near = [float(f @ w / w.norm() if cosine else -((f - w / w.norm()) ** 2).sum()) for w in weight[c]]
            weights = [math.exp(x) for x in near]
            assert score == pytest.approx(sum(w * x for w, x in zip(weights, near, strict=True)) / sum(weights))


def test_frozen_proxies_score_as_others_and_get_no_gradient() -> None:
    head, features, frozen = Proxies(4, 3, 2), torch.randn(5, 4), torch.tensor([True, False, True])
    assert torch.equal(head(features, frozen), head(features))
    head(features, frozen).square().sum().backward()
    assert (head.weight.grad[frozen] == 0).all() and (head.weight.grad[~frozen] != 0).any()


# -- where new proxies come from --------------------------------------------------------------------------------------


def test_clusters_far_apart_are_found_with_the_weights_of_their_rows() -> None:
    corners, spread = 100 * drawn(4, 6), drawn(40, 6, seed=1)
    rows, weights = corners.repeat(10, 1) + spread, torch.rand(40, generator=torch.Generator().manual_seed(2)) + 0.1
    centres, gathered = clustered(rows, weights, 4, seed=3)
    for c in range(4):
        own = slice(c, None, 4)
        mean = (weights[own, None] * rows[own]).sum(0) / weights[own].sum()
        best = (centres - mean).norm(dim=1).argmin()
        assert torch.allclose(centres[best], mean) and gathered[best].item() == pytest.approx(weights[own].sum().item())


def test_few_rows_are_their_own_centres_and_equal_rows_make_one() -> None:
    rows = drawn(3, 4)
    centres, gathered = clustered(rows, torch.tensor([1.0, 2.0, 5.0]), 10, seed=0)
    assert torch.equal(centres, rows) and gathered.tolist() == [1, 2, 5]
    centres, gathered = clustered(rows[:1].repeat(12, 1), torch.ones(12), 10, seed=0)
    assert torch.allclose(centres, rows[:1]) and gathered.tolist() == [12]


def test_equal_seeds_give_equal_bits() -> None:
    rows = drawn(60, 8).float()
    one, again, other = (clustered(rows, torch.ones(60), 10, seed)[0] for seed in (5, 5, 6))
    assert one.dtype == torch.float32 and torch.equal(one, again) and not torch.equal(one, other)


# -- a run ------------------------------------------------------------------------------------------------------------


@cache
def run(**settings: Any) -> tuple[Parts, list[list[Weights]]]:
    """A short run; of each task the server's weights after every round."""
    parts, states = parts_of(tiny_plan("podnet", **settings), Watching), []
    for task in parts.scenario.tasks:
        parts.door.begin(task)
        states.append([])
        for _ in parts.server.learn_task(task, parts.door):
            states[-1].append(dict(parts.server.state.weights))
        parts.door.finish()
    return parts, states


def seen(parts: Parts, handler: str, task: int) -> list[Seen]:
    return [s for s in parts.transport.seen if (s.handler, s.task) == (handler, task)]


def test_the_server_asks_what_the_method_says_and_in_that_order() -> None:
    parts, states = run(tune_share=0.5)
    asked = {task: [s.handler for s in parts.transport.seen if s.task == task] for task in range(3)}
    assert asked[0] == ["train"] * 6 + ["remember"] * 4
    for task in (1, 2):
        assert asked[task] == ["propose"] * 4 + ["train"] * 6 + ["remember"] * 4 + ["tune"] * 4
    assert [len(rounds) for rounds in states] == [3, 5, 5]


def test_without_a_share_there_is_no_fine_tuning() -> None:
    parts, states = run(tune_share=0.0)
    assert [len(rounds) for rounds in states] == [3, 3, 3]
    assert not seen(parts, "tune", 2) and seen(parts, "remember", 2)


def test_old_proxies_are_frozen_to_the_bit_in_the_main_rounds_and_all_learn_in_the_fine_tuning() -> None:
    _, states = run(tune_share=0.5, lr=0.1, weight_decay=0.1)
    for task in (1, 2):
        old, new = slice(0, 2 * task), slice(2 * task, 2 * task + 2)
        before, *rounds = states[task - 1][-1], *states[task]
        for then in rounds[:3]:
            assert torch.equal(then[PROXIES][old], before[PROXIES][old])
        assert not torch.equal(rounds[2][PROXIES][new], rounds[0][PROXIES][new])
        for one, other in zip(rounds[2:], rounds[3:], strict=False):
            moved = (one[PROXIES] != other[PROXIES]).flatten(1).any(1)
            assert moved[: 2 * task + 2].all()


def test_fine_tuning_changes_nothing_but_the_proxies() -> None:
    _, states = run(tune_share=0.5)
    main, tuned = states[2][2], states[2][-1]
    assert {name for name in main if not torch.equal(main[name], tuned[name])} == {PROXIES}
    first = states[0][0]
    assert first["scale"] != main["scale"], "eta is learned"


def test_fine_tuning_sees_exemplars_of_all_classes_new_ones_included_and_nothing_else() -> None:
    parts, _ = run(tune_share=0.5)
    client: Any = parts.engine.client
    tuned = seen(parts, "tune", 2)
    for one in tuned:
        data = parts.scenario.local(one.client, parts.scenario.tasks[2])
        pool = next(client.tune(one.memory, data, one.message)).pool
        kept = {j: len(codes) for j, codes in one.memory.exemplars.items()}
        assert {j: int((pool.labels == j).sum()) for j in kept} == kept and len(pool) == sum(kept.values())
        assert set(kept) & {4, 5} and set(kept) & {0, 1, 2, 3}
        assert max(kept.values()) - min(kept.values()) <= 1, "every client has enough of every class here"
        assert one.reply.count == len(pool) and one.reply.weights.keys() == {PROXIES}
        for j, codes in one.memory.exemplars.items():
            assert torch.equal(pool.images[pool.labels == j].flatten(1), codes.flatten(1))


def test_new_images_stand_beside_exemplars_of_other_classes_in_the_main_rounds() -> None:
    parts, _ = run(tune_share=0.5)
    for one in seen(parts, "train", 2):
        old = sum(len(codes) for j, codes in one.memory.exemplars.items() if j < 4)
        assert one.reply.count == len(one.images) + old > len(one.images)


def test_imprinting_takes_centres_of_the_clients_centres_as_long_as_old_proxies() -> None:
    parts, _ = run(tune_share=0.5)
    old = 3 * parts.server.state.weights[PROXIES]
    task = parts.scenario.tasks[1]
    corners = 10 * torch.eye(64)[:10]
    near = corners + 0.01 * torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    one, other = Proposal({2: corners}, {2: torch.full((10,), 9.0)}), Proposal({2: near}, {2: torch.ones(10)})
    found, length = imprinted(old, task, [one, other, Proposal({}, {})], 0), old[:2].norm(dim=2).mean()
    assert torch.allclose(found[2].norm(dim=1), length) and length > 2
    expected = F.normalize(0.9 * corners + 0.1 * near)
    assert torch.allclose((found[2] / length @ expected.T).amax(0), torch.ones(10), atol=1e-6)
    rest = torch.tensor([j for j in range(len(old)) if j != 2])
    assert torch.equal(found[rest], old[rest]), "old ones stay, and so does a class that nobody has"


def test_where_a_class_has_few_images_some_proxies_stand_twice() -> None:
    parts, _ = run(tune_share=0.5)
    few = torch.eye(64)[:3]
    proposals = [Proposal({3: few}, {3: torch.ones(3)})]
    found = F.normalize(imprinted(parts.server.state.weights[PROXIES], parts.scenario.tasks[1], proposals, 0)[3])
    assert torch.allclose(found, few[torch.arange(10) % 3], atol=1e-6)


def test_clients_propose_at_most_ten_centres_of_their_new_classes() -> None:
    parts, _ = run(tune_share=0.5)
    for one in seen(parts, "propose", 2):
        data = parts.scenario.local(one.client, parts.scenario.tasks[2])
        assert set(one.reply.centres) == set(data.classes()) <= {4, 5}
        for j, centres in one.reply.centres.items():
            assert 1 <= len(centres) <= 10 and one.reply.counts[j].sum() == len(data.of(j))
            net: Any = parts.engine.client.net  # type: ignore[attr-defined]
            net.load_state_dict(one.message.weights)
            with torch.no_grad():
                mean = F.normalize(net.eval().features(data.of(j))).mean(0)
            assert torch.allclose((one.reply.counts[j][:, None] * centres).sum(0) / len(data.of(j)), mean, atol=1e-5)


def test_the_imprinted_proxies_are_what_training_starts_from() -> None:
    parts, states = run(tune_share=0.5)
    last, sent = states[0][-1][PROXIES], seen(parts, "train", 1)[0].message.weights[PROXIES]
    assert torch.equal(sent[:2], last[:2]) and torch.equal(sent[4:], last[4:])
    assert not torch.equal(sent[2:4], last[2:4])
    assert torch.allclose(sent[2:4].norm(dim=2), last[:2].norm(dim=2).mean().expand(2, 10))


def test_every_term_of_the_loss_counts_and_only_the_first_task_does_without_distillation() -> None:
    parts, states = run(tune_share=0.5)
    client: Any = parts.engine.client
    old, new = torch.tensor([1, 1, 0, 0, 0, 0]).bool(), torch.tensor([0, 0, 1, 1, 0, 0]).bool()
    given = Given(old | new, old, torch.tensor(math.sqrt(2)))
    client.net.load_state_dict(states[1][2]), client.old.load_state_dict(states[0][-1])
    nets = {"net": client.net.eval(), "old": client.old.eval()}
    images, labels = parts.scenario.test(parts.scenario.tasks[1])
    batch = Batch(images / 255, labels, torch.Generator())

    def value(with_old: bool = True, **knobs: Any) -> float:
        other = Client(replace(client.config, **knobs), parts.setting)
        return other.loss(nets if with_old else {"net": nets["net"]}, batch, given).item()

    maps, past = nets["net"].stages(batch.images), nets["old"].stages(batch.images)
    held = [spatial(maps, past), flat(maps[-1].mean((2, 3)), past[-1].mean((2, 3)))]
    one, other = (math.sqrt(2) * float(term) for term in held)
    assert min(one, other) > 1e-3
    assert value() == pytest.approx(value(with_old=False) + 3 * one + 1 * other, rel=1e-4)
    assert value(spatial=0.0) == pytest.approx(value() - 3 * one, rel=1e-4)
    assert value(flat=0.0) == pytest.approx(value() - other, rel=1e-4)
    assert abs(value(nca="code") - value()) > 1e-3 and abs(value(margin=0.5) - value()) > 1e-3
    assert all("old_weights" not in s.sent and not s.message.old_weights for s in seen(parts, "train", 0))
    assert all(torch.equal(s.message.old_weights[PROXIES], states[0][-1][PROXIES]) for s in seen(parts, "train", 1))
    asked = [s for handler in ("propose", "remember", "tune") for s in seen(parts, handler, 1)]
    assert len(asked) == 12 and not any(s.message.old_weights for s in asked), "nobody else needs the old model"


def test_the_factor_is_that_of_the_classes_of_all_clients() -> None:
    parts, _ = run(tune_share=0.5)
    factors = [given_by(seen(parts, "train", task)[0].message).factor.item() for task in range(3)]
    assert factors == pytest.approx([1, math.sqrt(2), math.sqrt(3)])


@pytest.mark.parametrize(("codec", "size"), [("raw", 64), ("klt:12", 12)])
def test_exemplars_are_kept_raw_or_by_a_codec_within_the_benchmarks_bytes(codec: str, size: int) -> None:
    parts, _ = run(exemplar_codec=codec, rounds=1)
    room = parts.scenario.budget.at(parts.scenario.tasks[2])
    for memory in parts.transport.memories.values():
        count = sum(len(codes) for codes in memory.exemplars.values())
        assert room - 8 * size < size_in_bytes(memory) == count * size <= room
    for line in seen(parts, "tune", 2):
        assert line.reply.count == sum(len(codes) for codes in line.memory.exemplars.values())


def test_with_a_codec_new_images_pass_it_too() -> None:
    parts, _ = run(exemplar_codec="klt:12", rounds=1)
    client: Any = parts.engine.client
    for one in seen(parts, "train", 2):
        data, fitted = parts.scenario.local(one.client, parts.scenario.tasks[2]), one.message.codec
        pool = next(client.train(one.memory, data, one.message)).pool
        decoded, own = client.codec.decode(fitted, client.codec.encode(fitted, data.images)), len(data.labels)
        assert torch.equal(pool.images[:own], decoded) and not torch.equal(decoded, data.images)
        assert own < len(pool) and torch.equal(pool.labels[:own], data.labels)


def test_a_new_class_with_one_image_at_each_client_does_no_harm() -> None:
    few = replace(TINY, clients=4, active=4, train_limit=3, tasks=2)
    parts = parts_of(tiny_plan("podnet", benchmark=few), Watching)
    lines = lines_of(parts)
    assert lines[-1]["kind"] == "task"
    assert all(t.isfinite().all() for t in parts.server.state.weights.values())
