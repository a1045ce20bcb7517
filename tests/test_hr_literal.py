"""Hybrid Replay as printed: what its clients replay, keep and learn, what its server places, what its runs show.

Three tasks of two digits each on four clients that hold little of most classes; what an answer saw and did is
recomputed by hand wherever it can be.
"""

import copy
import json
import math
import os
import re
import shutil
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fcil.blocks.centroids import side_by_side
from fcil.experiment import execute
from fcil.federation import engine
from fcil.federation.calls import Call
from fcil.federation.loop import Line, learn
from fcil.files import sha256
from fcil.method import Batch, Fit
from fcil.methods import METHODS, hr_literal
from fcil.methods.hr_literal import Client, Memory, Model, Proposal, Remembered
from fcil.parts import Parts, assemble
from fcil.records import Weights, flatten, read_tensors, size_in_bytes, write_tensors
from fcil.results import gallery
from fcil.results.ledger import read, result_of, verify
from fcil.results.runs import read_result
from fcil.scenario.benchmarks import Benchmark
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import LocalData
from tests.conftest import TINY, tiny_plan

ABLATIONS = [name for name, entry in METHODS.items() if entry.module == hr_literal.__name__ and entry.preset]
SKEWED = replace(TINY, alpha=0.05, train_limit=40, test_limit=20)  # most clients miss a class
QUICK = {"rounds": 2, "steps": 2, "align_steps": 300}
REST = 2 ** (1 / 6)
NUMBERS = 64  # of an image


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine, "cores", lambda: 1)  # evaluation takes all cores; others are at work here
    with engine.threads(1):
        yield


# -- running and watching ---------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """One question to one client: what it had and was sent, and what it did."""

    task: int
    handler: str
    round: int
    client: int
    data: LocalData
    memory: Memory  # as it was before
    message: Model
    reply: Any = None
    fit: Fit | None = None

    @property
    def kinds(self) -> Tensor:
        return self.pool.extra["kind"]

    @property
    def pool(self) -> Any:
        assert self.fit is not None
        return self.fit.pool


@dataclass
class Run:
    """A whole run under observation."""

    parts: Parts
    asked: list[Asked] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    models: list[Model] = field(default_factory=list)  # broadcast when a task has ended
    memories: list[dict[int, Memory]] = field(default_factory=list)

    def of(self, handler: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.handler == handler]

    def later(self) -> list[Asked]:
        """The trainings of all tasks but the first."""
        return [asked for asked in self.of("train") if asked.task > 0]

    @property
    def task_lines(self) -> list[Line]:
        return [line for line in self.lines if line["kind"] == "task"]


@cache
def scenario(benchmark: Benchmark) -> Scenario:
    return Scenario(benchmark, 0)


@cache
def run(method: str = "hr-literal", benchmark: Benchmark = SKEWED, **settings: Any) -> Run:
    wanted = tiny_plan(method, benchmark, **{**QUICK, **settings})
    watched = Run(assemble(wanted, "cpu", scenario(wanted.benchmark)))
    parts = watched.parts
    answer, fit = parts.engine.answer, parts.engine.fit

    def answering(
        who: int, handler: Callable[..., Any], memory: Memory, data: LocalData, message: Model, call: Call
    ) -> Any:
        seen = Asked(call.task, handler.__name__, call.round, who, data, copy.copy(memory), message)
        watched.asked.append(seen)
        answered = answer(who, handler, memory, data, message, call)
        seen.reply = answered.reply
        return answered

    def fitting(wanted: Fit, call: Call, generator: torch.Generator) -> Any:
        watched.asked[-1].fit = wanted
        return fit(wanted, call, generator)

    parts.engine.answer, parts.engine.fit = answering, fitting  # type: ignore[method-assign, assignment]
    for line in learn(parts.scenario, parts.server, parts.door, parts.engine):
        watched.lines.append(line)
        if line["kind"] == "task":
            watched.models.append(copy.copy(parts.server.broadcast()))
            watched.memories.append({c: copy.copy(memory) for c, memory in parts.transport.memories.items()})
    assert len(watched.models) == 3
    return watched


def client(**settings: Any) -> Client:
    """A client with these knobs, in the setting of `run()`."""
    return Client(hr_literal.Config(**settings), run().parts.setting)


def autoencoder(of: Run, weights: Weights) -> Any:
    net = of.parts.setting.autoencoder(of.parts.engine.client.latent, of.parts.engine.client.config.variational)
    net.load_state_dict(weights)
    return net.eval()


@torch.no_grad()
def codes_of(net: Any, images: Tensor) -> Tensor:
    return net.encode(images.float() / 255)[0]


@torch.no_grad()
def images_of(net: Any, codes: Tensor) -> Tensor:
    return (255 * net.decode(codes)).round().to(torch.uint8)


def numbers(memory: Memory, j: int, centroid: Tensor) -> Tensor:
    """Codes of 8 bits or 32, with what they were centred by put back."""
    stored = memory.codes[j]
    return centroid + (stored if stored.is_floating_point() else (stored / 255 * 2 - 1) * memory.scales[j])


def distances(points: Tensor, others: Tensor) -> Tensor:
    return (points[:, None] - others[None]).square().sum(2).sqrt()


def how_many(memory: Memory) -> dict[int, int]:
    return {j: len(codes) for j, codes in memory.codes.items()}


def everything(of: Run) -> Weights:
    memories = {f"{c}/{n}": t for c, memory in of.memories[-1].items() for n, t in flatten(memory).items()}
    return flatten(of.models[-1]) | memories


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# -- the paper's lines ------------------------------------------------------------------------------------------------


def claimed(first: str, last: str | None) -> list[int]:
    """The numbers that stand at line ends from the line that begins with `first` to the one that begins with `last`."""
    found, inside = [], False
    with tokenize.open(hr_literal.__file__) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.line.startswith(first):
                inside = True
            elif last and token.line.startswith(last):
                inside = False
            if not inside or token.type != tokenize.COMMENT:
                continue
            comment = token.string.removeprefix("# fmt: skip").strip()
            if re.fullmatch(r"# \d+(-\d+)?(, \d+(-\d+)?)*", comment):
                for part in comment[2:].split(", "):
                    begin, _, end = part.partition("-")
                    found += range(int(begin), int(end or begin) + 1)
    return found


def test_every_line_of_algorithm_1_is_claimed_once() -> None:
    assert sorted(claimed("class Server", "class Client")) == list(range(1, 18))


def test_every_line_of_algorithm_2_is_claimed_once() -> None:
    assert sorted(claimed("class Client", None)) == list(range(1, 30))


def test_the_papers_algorithms_have_so_many_lines() -> None:
    paper = Path(os.environ.get("FCIL_DATA", "nowhere/data")).parent / "paper.tex"
    if not paper.exists():
        pytest.skip("the paper's source is not beside FCIL_DATA")
    printed = re.findall(r"\\begin\{algorithmic\}\[1\](.*?)\\end\{algorithmic\}", paper.read_text(), re.DOTALL)
    line = re.compile(r"^\s*\\(State|For|EndFor|If|Else|EndIf)\b", re.MULTILINE)
    assert [len(line.findall(text)) for text in printed] == [17, 29]


# -- the six ablations ------------------------------------------------------------------------------------------------


def test_there_are_six_ablations() -> None:
    kinds = ["mini", "no-latents", "perfect", "no-kd", "no-global", "rfa"]
    assert [name.removeprefix("hr-literal-") for name in ABLATIONS] == kinds


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_ends_elsewhere(name: str) -> None:
    assert equal(everything(run()), everything(run("hr-literal")))
    assert not equal(everything(run(name)), everything(run()))
    assert run(name).models[-1].weights.keys() == run().models[-1].weights.keys()


def test_mini_keeps_a_tenth_of_the_bytes() -> None:
    mini, whole = run("hr-literal-mini"), run()
    for task in mini.parts.scenario.tasks:
        tenth = mini.parts.scenario.budget.at(task) / 10
        kept = [size_in_bytes(memory) for memory in mini.memories[task.index].values()]
        assert len(kept) == 4 and all(0 < size <= tenth for size in kept)
        assert all(size_in_bytes(memory) > tenth for memory in whole.memories[task.index].values())


def test_without_latents_nothing_is_kept_and_every_old_class_is_made_up() -> None:
    without = run("hr-literal-no-latents")
    assert all(flatten(memory) == {} for after in without.memories for memory in after.values())
    assert without.later()
    for asked in without.later():
        is_old = torch.isin(asked.pool.labels, torch.tensor(asked.data.task.old))
        assert torch.equal(asked.kinds, 2 * is_old.long())
        assert set(asked.pool.labels[is_old].tolist()) == set(asked.data.task.old)


def test_perfect_keeps_real_images_where_codes_would_be() -> None:
    perfect, whole = run("hr-literal-perfect"), run()
    held = {(a.client, a.task): a.data for a in perfect.of("remember")}
    for task, after in enumerate(perfect.memories):
        assert {c: how_many(m) for c, m in after.items()} == {c: how_many(m) for c, m in whole.memories[task].items()}
        for who, memory in after.items():
            assert memory.scales == {} and memory.codes
            for j, kept in memory.codes.items():
                own = held[who, j // 2].of(j)
                assert kept.dtype == torch.uint8 and kept.shape[1:] == (1, 8, 8)
                assert (kept[:, None] == own[None]).flatten(2).all(2).any(1).all()


def test_perfect_replays_its_images_as_they_are() -> None:
    for asked in run("hr-literal-perfect").later():
        for j, kept in asked.memory.codes.items():
            chosen = (asked.pool.labels == j) & (asked.kinds == 1)
            assert torch.equal(asked.pool.images[chosen], kept)


def test_without_distillation_no_teacher_is_loaded() -> None:
    fits = [asked.fit for asked in run("hr-literal-no-kd").of("train")]
    assert len(fits) == 12 and all(fit.load.keys() == {"net"} for fit in fits)


def test_without_distillation_the_rest_of_the_loss_stays() -> None:
    batch, nets = mixed_batch(), apart()
    ablated = run("hr-literal-no-kd").parts.engine.client
    alone = ablated.loss({"net": nets["net"]}, batch(), run().models[1].centroids)
    zero = client(distill_codes=0.0, distill_images=0.0).loss(nets, batch(), run().models[1].centroids)
    codes, pictures = distilled_by_hand(nets, batch())
    whole = client().loss(nets, batch(), run().models[1].centroids)
    assert torch.equal(alone, zero)
    assert whole.item() == pytest.approx((alone + (codes + pictures).mean() / NUMBERS).item(), rel=1e-5)
    assert codes.min() > 0 and pictures.min() > 0


def test_without_global_replay_absent_classes_stay_absent() -> None:
    without, missed = run("hr-literal-no-global"), 0
    for asked in without.later():
        assert set(asked.kinds.tolist()) == {0, 1}
        assert set(asked.pool.labels.tolist()) == {*asked.data.classes(), *asked.memory.codes}
        missed += len(set(asked.data.task.old) - set(asked.memory.codes))
    assert missed > 0 and any((asked.kinds == 2).any() for asked in run().later())


def test_repulsion_places_the_centroids_elsewhere_and_no_nearer() -> None:
    rfa, whole = run("hr-literal-rfa").models, run().models
    for task in range(3):
        assert not torch.isclose(rfa[task].centroids[2 * task :][:2], whole[task].centroids[2 * task :][:2]).all()
    seen = distances(rfa[-1].centroids, rfa[-1].centroids)
    assert seen[~torch.eye(6, dtype=torch.bool)].min() >= REST * 5.0 * (1 - 1e-5)


# -- what is replayed -------------------------------------------------------------------------------------------------


def test_the_tasks_own_images_come_first_and_unchanged() -> None:
    for asked in run().of("train"):
        own = len(asked.data.labels)
        assert own > 0 and set(asked.data.classes()) <= set(asked.data.task.new)
        assert torch.equal(asked.pool.images[:own], asked.data.images)
        assert torch.equal(asked.pool.labels[:own], asked.data.labels)
        assert (asked.kinds[:own] == 0).all() and (asked.kinds[own:] > 0).all()


def test_every_old_class_is_replayed_and_none_else() -> None:
    for asked in run().of("train"):
        assert set(asked.pool.labels.tolist()) == {*asked.data.classes(), *asked.data.task.old}


@pytest.mark.parametrize("settings", [{}, {"made_up": 3}, {"exemplars": "none"}])
def test_classes_with_codes_are_decoded_and_all_others_made_up_as_often_as_is_usual(settings: dict[str, Any]) -> None:
    seen = set()
    for asked in run(**settings).later():
        own = how_many(asked.memory) or {j: len(asked.data.of(j)) for j in asked.data.classes()}
        usual = settings.get("made_up") or round(sum(own.values()) / len(own))
        for j in asked.data.task.old:
            kinds = asked.kinds[asked.pool.labels == j].tolist()
            kept = how_many(asked.memory).get(j, 0)
            assert kinds == ([1] * kept if kept else [2] * usual)
            seen |= set(kinds)
    assert seen == ({2} if settings.get("exemplars") == "none" else {1, 2})


def test_what_is_replayed_comes_from_the_old_decoder() -> None:
    spread = []
    for asked in run().later():
        old, p = autoencoder(run(), asked.message.old_weights), asked.message.centroids
        for j in asked.data.task.old:
            replayed = asked.pool.images[asked.pool.labels == j]
            if j in asked.memory.codes:
                assert torch.equal(replayed, images_of(old, numbers(asked.memory, j, p[j])))
            else:
                spread.append((replayed.float() - images_of(old, p[j : j + 1]).float()).abs().max())
                assert len(replayed.unique(dim=0)) == len(replayed), "the noise differs from image to image"
    assert 0 < max(spread) < 128, "made-up images are like that of their centroid, and not it"


def test_the_noise_has_the_spread_of_codes_unless_set() -> None:
    pull = NUMBERS / 30
    assert client().noise == pytest.approx((1 + 2 * pull) ** -0.5)
    assert client(pull=100.0).noise == pytest.approx(0.0705, abs=1e-4)
    assert client(pull=100.0, kl=4.0).noise == pytest.approx((1 + 50) ** -0.5) and client(kl=0.0).noise == 0
    assert client(pull=100.0, noise=0.5).noise == 0.5 and client(pull=100.0).pull == 100.0


def test_the_pool_is_the_same_in_all_rounds_of_a_task() -> None:
    pools = defaultdict(list)
    for asked in run(rounds=3, steps=1).later():
        pools[asked.task, asked.client].append(asked.pool)
    assert max(map(len, pools.values())) > 1
    for first, *rest in pools.values():
        assert all(torch.equal(first.images, pool.images) for pool in rest)


# -- the loss ---------------------------------------------------------------------------------------------------------


def mixed_batch() -> Callable[..., Batch]:
    """A batch of a pool with all three kinds, made anew for each use: its generator is used up."""
    pool = next(asked.pool for asked in run().later() if set(asked.kinds.tolist()) == {0, 1, 2})
    index = torch.cat([(pool.extra["kind"] == kind).nonzero()[:5, 0] for kind in range(3)])
    images, labels, kinds = pool.images[index].float() / 255, pool.labels[index], pool.extra["kind"][index]

    def make(seed: int = 0, only: int | None = None) -> Batch:
        chosen = kinds == only if only is not None else kinds >= 0
        generator = torch.Generator().manual_seed(seed)
        return Batch(images[chosen], labels[chosen], generator, {"kind": kinds[chosen]})

    return make


def together() -> dict[str, nn.Module]:
    """Student and teacher as they are when a task begins."""
    first = next(asked for asked in run().later() if asked.round == 0)
    assert equal(first.message.weights, first.message.old_weights)
    return {"net": autoencoder(run(), first.message.weights), "old": autoencoder(run(), first.message.old_weights)}


def apart() -> dict[str, nn.Module]:
    """Student and teacher when the student has moved."""
    nets, generator = together(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in nets["net"].parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return nets


def loss(nets: dict[str, nn.Module], batch: Batch, **settings: Any) -> Tensor:
    return client(**settings).loss(nets, batch, run().models[1].centroids).detach()


@torch.no_grad()
def distilled_by_hand(nets: dict[str, Any], batch: Batch, power: int = 2) -> tuple[Tensor, Tensor]:
    """Norms of what lines 20 and 21 compare, to a power, of each image; both codes are off by the same draw."""
    (new, logvar), (old, _) = (nets[name].encode(batch.images) for name in ("net", "old"))
    off = logvar.exp().sqrt() * torch.randn(new.shape, generator=batch.generator)
    pictures = nets["net"].decode(new + off) - nets["old"].decode(old + off)
    return (new - old).norm(dim=1) ** power, pictures.flatten(1).norm(dim=1) ** power


def test_nothing_is_distilled_in_the_first_task() -> None:
    for asked in run().of("train"):
        assert asked.fit is not None
        assert asked.fit.load.keys() == ({"net", "old"} if asked.task else {"net"}) and asked.fit.trains == ("net",)


@pytest.mark.parametrize("term", ["distill_codes", "distill_images"])
def test_distillation_is_nothing_at_the_first_step_and_something_after(term: str) -> None:
    batch, off = mixed_batch(), {"distill_codes": 0.0, "distill_images": 0.0}
    assert torch.equal(loss(together(), batch(), **{**off, term: 1.0}), loss(together(), batch(), **off))
    assert loss(apart(), batch(), **{**off, term: 1.0}) > loss(apart(), batch(), **off)


def test_distillation_on_replay_leaves_new_images_alone() -> None:
    batch, off = mixed_batch(), {"distill_codes": 0.0, "distill_images": 0.0}
    assert torch.equal(loss(apart(), batch(only=0), distill_on="replay"), loss(apart(), batch(only=0), **off))
    assert loss(apart(), batch(only=0)) > loss(apart(), batch(only=0), **off)
    for kind in (1, 2):
        assert torch.equal(loss(apart(), batch(only=kind), distill_on="replay"), loss(apart(), batch(only=kind)))


def test_the_printed_norms_are_the_roots_of_the_squares() -> None:
    batch, off = mixed_batch(), {"distill_codes": 0.0, "distill_images": 0.0}
    for form, power in (("norm", 1), ("squared", 2)):
        for term, value in zip(off, distilled_by_hand(apart(), batch(), power), strict=True):
            there = loss(apart(), batch(), **{**off, term: 1.0}, distill_form=form)
            expected = loss(apart(), batch(), **off) + value.mean() / NUMBERS
            assert there.item() == pytest.approx(expected.item(), rel=1e-5) and value.min() > 0


def test_the_printed_norms_have_a_gradient_where_they_are_nothing() -> None:
    nets = together()
    client(distill_form="norm").loss(nets, mixed_batch()(), run().models[1].centroids).backward()
    assert all(p.grad.isfinite().all() for p in nets["net"].parameters())


def test_the_printed_scale_is_that_of_whole_images() -> None:
    batch = mixed_batch()
    assert torch.equal(loss(apart(), batch(), scale="printed"), NUMBERS * loss(apart(), batch()))
    assert loss(apart(), batch()) > 0


def test_the_loss_by_hand() -> None:
    batch, nets = mixed_batch()(seed=5), apart()
    knobs = {"pull": 3.0, "kl": 0.5, "distill_codes": 0.7, "distill_images": 0.2}
    with torch.no_grad():
        nets["net"].encoder.logvar.bias -= 1.5  # else variances are near one, which is its own root
        nets["net"].decoder.linear.weight *= 5
        mean, logvar = nets["net"].encode(batch.images)
        noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(5))
        decoded = nets["net"].decode(mean + logvar.exp().sqrt() * noise)
        each = 0.5 * (decoded - batch.images).square().sum((1, 2, 3))
        each += 0.5 * 0.5 * (mean**2 + logvar.exp() - logvar - 1).sum(1)
        each += 3.0 * ((mean - run().models[1].centroids[batch.labels]) ** 2 + logvar.exp()).sum(1)
        codes, pictures = distilled_by_hand(nets, mixed_batch()(seed=5))
        each += 0.7 * codes + 0.2 * pictures
    assert loss(nets, batch, **knobs).item() == pytest.approx(each.mean().item() / NUMBERS, rel=1e-5)


class Spy(nn.Module):
    """An autoencoder that notes what it is to encode."""

    def __init__(self, net: Any):
        super().__init__()
        self.net, self.decode = net, net.decode

    def encode(self, images: Tensor) -> Any:
        self.saw = images
        return self.net.encode(images)


def seen_by_the_student(seed: int, **settings: Any) -> Tensor:
    nets = apart()
    spied = {"net": Spy(nets["net"]), "old": nets["old"]}
    loss(spied, mixed_batch()(seed), **settings)
    return spied["net"].saw


def test_fresh_noise_makes_up_anew_what_was_made_up_and_nothing_else() -> None:
    batch = mixed_batch()()
    one, other = (seen_by_the_student(seed, fresh_noise=True) for seed in (1, 2))
    made = batch.extra["kind"] == 2
    assert (one[made] != other[made]).flatten(1).any(1).all() and (one[made] != batch.images[made]).any()
    assert torch.equal(one[~made], batch.images[~made]) and torch.equal(other[~made], batch.images[~made])


def test_without_fresh_noise_images_stay() -> None:
    assert torch.equal(seen_by_the_student(1), mixed_batch()().images)


def test_fresh_noise_needs_the_old_decoder_even_without_distillation() -> None:
    fits = {a.task: a.fit for a in run("hr-literal-no-kd", fresh_noise=True).of("train")}
    assert fits[0].load.keys() == {"net"} and fits[2].load.keys() == {"net", "old"}
    assert not equal(
        run("hr-literal-no-kd", fresh_noise=True).models[-1].weights, run("hr-literal-no-kd").models[-1].weights
    )


# -- centroids --------------------------------------------------------------------------------------------------------


def test_old_centroids_stay_to_the_bit_and_new_ones_are_placed() -> None:
    models = run().models
    for task, model in enumerate(models):
        seen = 2 * task + 2
        assert model.seen.tolist() == [j < seen for j in range(6)]
        assert (model.centroids[:seen].norm(dim=1) > 0).all() and (model.centroids[seen:] == 0).all()
        for later in models[task:]:
            assert torch.equal(later.centroids[:seen], model.centroids[:seen])


def test_centroids_keep_apart_after_each_task() -> None:
    for task, model in enumerate(run().models):
        seen = model.centroids[: 2 * task + 2]
        apart = distances(seen, seen)[~torch.eye(len(seen), dtype=torch.bool)]
        assert apart.min() >= 0.9 * REST * 5.0
        assert apart.max() <= 2 * REST * 5.0, "they keep together, too"


def test_spacing_scales_the_distances() -> None:
    wide = run(spacing=10.0).models[0].centroids[:2]
    assert distances(wide, wide)[0, 1].item() == pytest.approx(10.0 * REST, rel=1e-3)


def test_the_server_starts_from_the_mean_over_all_images() -> None:
    """Two points under a force between them keep their middle: that of the class means over all clients."""
    proposals: list[Proposal] = [asked.reply for asked in run().of("propose_centroids") if asked.task == 0]
    net = autoencoder(run(), run().of("propose_centroids")[0].message.weights)
    images = {j: torch.cat([a.data.of(j) for a in run().of("propose_centroids") if a.task == 0]) for j in (0, 1)}
    means = torch.stack([codes_of(net, images[j]).mean(0) for j in (0, 1)])
    sums = [sum(p.sums[j] for p in proposals if j in p.sums) for j in (0, 1)]
    counts = [sum(int(p.counts[j]) for p in proposals if j in p.counts) for j in (0, 1)]
    assert counts == [40, 40] and [p.count for p in proposals] == [20] * 4
    assert torch.allclose(torch.stack(sums) / 40, means, atol=1e-5)
    assert torch.allclose(run().models[0].centroids[:2].mean(0), means.mean(0), atol=0.03)  # jitter: 0.005 each


def test_classification_is_by_the_nearest_centroid_of_the_classes_seen() -> None:
    parts, votes = run().parts, set()
    for task, model in enumerate(run().models):
        images = torch.cat([parts.scenario.test(t)[0] for t in parts.scenario.tasks])
        seen = model.centroids[: 2 * task + 2]
        by_hand = distances(codes_of(autoencoder(run(), model.weights), images), seen).argmin(1)
        assert torch.equal(parts.engine.classify(model, images), by_hand)
        votes |= set(by_hand.tolist())
    assert len(votes) > 1


def test_the_printed_alignment_runs_and_stays_finite() -> None:
    printed = run(alignment="printed")
    assert all(t.isfinite().all() for model in printed.models for t in flatten(model).values())
    assert not torch.equal(printed.models[0].centroids, run().models[0].centroids)


@pytest.mark.parametrize("proposers", ["everyone", "selected"])
def test_who_proposes_centroids(proposers: str) -> None:
    watched = run(proposers=proposers)
    for task in watched.parts.scenario.tasks:
        who = [asked.client for asked in watched.of("propose_centroids") if asked.task == task.index]
        chosen = watched.parts.scenario.sample(task, "task", 0)
        assert who == ([0, 1, 2, 3] if proposers == "everyone" else chosen) and len(chosen) == 2


def test_a_class_that_nobody_proposed_is_placed_all_the_same() -> None:
    lonely = run(proposers="selected", active=1)
    orphans = 0
    for task, model in enumerate(lonely.models):
        (proposal,) = [asked.reply for asked in lonely.of("propose_centroids") if asked.task == task]
        seen = model.centroids[: 2 * task + 2]
        orphans += len({2 * task, 2 * task + 1} - set(proposal.sums))
        assert seen.isfinite().all()
        assert distances(seen, seen)[~torch.eye(len(seen), dtype=torch.bool)].min() >= 0.9 * REST * 5.0
    assert orphans > 0


def trainers(of: Run, task: int) -> list[list[int]]:
    rounds = max(asked.round for asked in of.of("train")) + 1
    return [[a.client for a in of.of("train") if (a.task, a.round) == (task, r)] for r in range(rounds)]


def test_clients_are_selected_once_a_task_if_so_asked() -> None:
    watched = run(selection="task", proposers="selected", rounds=3, steps=1)
    for task in range(3):
        first, *rest = trainers(watched, task)
        assert len(first) == 2 and all(others == first for others in rest)
        assert first == [asked.client for asked in watched.of("propose_centroids") if asked.task == task]


def test_clients_are_selected_anew_in_each_round() -> None:
    assert all(len(set(map(tuple, trainers(run(rounds=3, steps=1), task)))) > 1 for task in range(3))


# -- centroids of each client -----------------------------------------------------------------------------------------


def test_each_client_has_its_own_row_of_class_means() -> None:
    own = run(centroids="per_client")
    for task, model in enumerate(own.models):
        net, p = autoencoder(own, model.weights), model.centroids
        asked = [a for a in own.of("remember") if a.task == task]
        assert [a.client for a in asked] == [0, 1, 2, 3] and model.of_clients.shape == (4, 6, 6)
        for a in asked:
            old = autoencoder(own, a.message.old_weights)
            known = {j: codes_of(net, images_of(old, numbers(a.memory, j, p[j]))) for j in a.memory.codes}
            known |= {j: codes_of(net, a.data.of(j)) for j in a.data.classes()}
            row = model.of_clients[a.client]
            for j in range(2 * task + 2):
                if j in known:
                    assert torch.allclose(row[j], known[j].mean(0), atol=1e-4)
                else:
                    assert (row[j] == math.inf).all()
        assert model.of_clients[:, : 2 * task + 2].isinf().any() or task == 2


def test_with_own_centroids_the_nearest_of_any_client_and_class_decides() -> None:
    own = run(centroids="per_client")
    images = torch.cat([own.parts.scenario.test(t)[0] for t in own.parts.scenario.tasks])
    codes = codes_of(autoencoder(own, own.models[-1].weights), images)
    rows = own.models[-1].of_clients  # (clients, classes, latent)
    nearest = (codes[:, None] - rows.flatten(0, 1)).norm(dim=2).argmin(1) % 6
    assert torch.equal(own.parts.engine.classify(own.models[-1], images), nearest)
    assert not torch.equal(nearest, run().parts.engine.classify(run().models[-1], images)), (
        "the rule makes no difference"
    )


def test_a_class_that_no_client_has_keeps_its_aligned_centroid() -> None:
    aligned = torch.arange(6.0).view(3, 2)
    rows = side_by_side([{0: torch.ones(2)}, {0: torch.zeros(2), 1: torch.ones(2)}], aligned)
    assert rows[:, 0].tolist() == [[1, 1], [0, 0]] and rows[:, 1].tolist() == [[math.inf] * 2, [1, 1]]
    assert torch.equal(rows[:, 2], aligned[2].expand(2, 2))


# -- other autoencoders -----------------------------------------------------------------------------------------------


def test_a_deterministic_autoencoder_has_no_variance_no_divergence_and_no_noise() -> None:
    plain = run(variational=False)
    assert not any("logvar" in name for name in plain.models[-1].weights)
    assert any("logvar" in name for name in run().models[-1].weights)
    net, batch = autoencoder(plain, plain.models[1].weights), mixed_batch()
    given = plain.models[1].centroids

    def of(seed: int, **settings: Any) -> Tensor:
        return client(variational=False, **settings).loss({"net": net}, batch(seed), given)

    assert torch.equal(of(0), of(1)) and torch.equal(of(0, kl=0.0), of(0, kl=5.0))
    assert not torch.equal(loss(apart(), batch(0)), loss(apart(), batch(1)))
    with torch.no_grad():
        mean, images = net.encode(batch().images)[0], batch().images
        each = 0.5 * (net.decode(mean) - images).square().sum((1, 2, 3))
        each += NUMBERS / 30 * (mean - given[batch().labels]).square().sum(1)
    assert of(0).item() == pytest.approx(each.mean().item() / NUMBERS, rel=1e-5)


def test_codes_are_a_tenth_of_an_image_unless_set() -> None:
    assert run().models[-1].centroids.shape == (6, 6)
    long = run(latent=20)
    assert long.models[-1].centroids.shape == (6, 20)
    assert all(codes.shape[1] == 20 for memory in long.memories[-1].values() for codes in memory.codes.values())
    setting = replace(run().parts.setting, shape=(3, 32, 32))
    assert hr_literal.latent_size(hr_literal.Config(), setting) == 307


# -- memory -----------------------------------------------------------------------------------------------------------


def test_codes_are_re_encoded_after_each_task() -> None:
    """Line 26: what the old decoder makes of a code goes through the new encoder."""
    exact, compared = run(code_bits=32), 0
    for asked in (a for a in exact.of("remember") if a.task > 0):
        p = asked.message.centroids
        old, net = (autoencoder(exact, w) for w in (asked.message.old_weights, asked.message.weights))
        after = exact.memories[asked.task][asked.client]
        for j in asked.memory.codes:
            before = numbers(asked.memory, j, p[j])
            again = codes_of(net, images_of(old, before))[: len(after.codes[j])]
            assert torch.allclose(numbers(after, j, p[j]), again, atol=1e-5)
            assert not torch.allclose(again, before[: len(again)], atol=1e-3)
            compared += len(again)
    assert compared > 100


def test_new_exemplars_are_codes_of_the_tasks_own_images() -> None:
    exact = run(code_bits=32)
    for asked in exact.of("remember"):
        net, p = autoencoder(exact, asked.message.weights), asked.message.centroids
        for j in asked.data.classes():
            own, kept = codes_of(net, asked.data.of(j)), numbers(exact.memories[asked.task][asked.client], j, p[j])
            gaps = distances(kept, own)
            assert gaps.min(1).values.max() < 1e-4 and len(kept) == len(gaps.argmin(1).unique()) > 0


def test_frozen_codes_stay_to_the_bit() -> None:
    frozen, survived, dropped = run(memory_update="frozen", memory=1), 0, 0
    for task in (1, 2):
        for who, after in frozen.memories[task].items():
            before = frozen.memories[task - 1][who]
            for j in before.codes:
                kept = after.codes.get(j, before.codes[j][:0])
                assert torch.equal(kept, before.codes[j][: len(kept)])
                if len(kept):
                    assert torch.equal(after.scales[j], before.scales[j])
                survived, dropped = survived + len(kept), dropped + len(before.codes[j]) - len(kept)
    assert survived > 0 and dropped > 0


@cache
def all_kept(bits: int) -> int:
    tight = run(code_bits=bits, memory=1)
    for task, line in zip(tight.parts.scenario.tasks, tight.task_lines, strict=True):
        assert 0 < line["kept_max"] <= tight.parts.scenario.budget.at(task) == 96
    return sum(sum(how_many(memory).values()) for memory in tight.memories[-1].values())


@pytest.mark.parametrize(("more", "fewer"), [(32, 16), (16, 8), (8, 6), (6, 4)])
def test_fewer_bits_make_room_for_more_codes(more: int, fewer: int) -> None:
    assert 0 < all_kept(more) < all_kept(fewer)


def test_a_share_for_each_class_seen_keeps_less() -> None:
    held, seen = run(memory=1), run(memory=1, quota_over="seen")
    fewer = 0
    for one, other in zip(held.memories, seen.memories, strict=True):
        for who in one:
            assert size_in_bytes(other[who]) <= size_in_bytes(one[who])
            fewer += sum(how_many(other[who]).values()) < sum(how_many(one[who]).values())
    assert fewer > 0
    for task, after in zip(seen.parts.scenario.tasks, seen.memories, strict=True):
        for memory in after.values():
            assert size_in_bytes(memory) <= 96 * len(memory.codes) / len(task.seen)


def test_a_fixed_memory_is_shared_by_ever_more_classes() -> None:
    most = [max(max(how_many(memory).values()) for memory in after.values()) for after in run(memory=1).memories]
    assert most[0] > most[1] > most[2] > 0
    short = 0
    for asked in run(memory=1).of("remember"):
        kept = how_many(run(memory=1).memories[asked.task][asked.client])
        for j, number in kept.items():
            if number < max(kept.values()) - 1:
                assert number == len(asked.memory.codes.get(j, ())) + len(asked.data.of(j)), "there are no more of it"
                short += 1
    assert short > 0


# -- what the ledger says of forgetting -------------------------------------------------------------------------------


def test_the_ledger_has_the_accuracy_on_old_classes() -> None:
    first, *later = run().task_lines
    assert first["old"] is None and len(later) == 2
    for line in later:
        scenario_, model = run().parts.scenario, run().models[line["task"]]
        tests = [scenario_.test(task) for task in scenario_.tasks[: line["task"]]]
        images, labels = (torch.cat(parts) for parts in zip(*tests, strict=True))
        right = run().parts.engine.classify(model, images) == labels
        assert line["old"] == round(100 * sum(line["correct"][:-1]) / sum(line["total"][:-1]), 4)
        assert line["old"] == pytest.approx(100 * right.float().mean().item(), abs=1e-3)


def test_the_ledger_has_the_accuracy_on_old_exemplars() -> None:
    first, *later = run().task_lines
    assert first["measured"] == {"old_exemplars": None} and len(later) == 2
    for line in later:
        hits: list[Tensor] = []
        for asked in (a for a in run().of("remember") if a.task == line["task"]):
            p = asked.message.centroids
            old, net = (autoencoder(run(), w) for w in (asked.message.old_weights, asked.message.weights))
            for j in asked.memory.codes:
                again = codes_of(net, images_of(old, numbers(asked.memory, j, p[j])))
                hits.append(distances(again, p[: 2 * line["task"] + 2]).argmin(1) == j)
        by_hand = 100 * torch.cat(hits).double().mean().item()
        assert line["measured"]["old_exemplars"] == pytest.approx(by_hand, abs=1e-9) and len(torch.cat(hits)) > 50


def test_without_exemplars_there_is_nothing_to_measure() -> None:
    assert [line["measured"] for line in run("hr-literal-no-latents").task_lines] == [{"old_exemplars": None}] * 3


def test_what_one_client_says_of_its_exemplars_adds_up() -> None:
    for task, model in enumerate(run().models):
        replies: list[Remembered] = [asked.reply for asked in run().of("remember") if asked.task == task]
        before = [sum(how_many(a.memory).values()) for a in run().of("remember") if a.task == task]
        assert [int(reply.judged[0].sum()) for reply in replies] == before and (sum(before) > 0) == (task > 0)
        assert torch.equal(model.judged, sum(reply.judged for reply in replies))
        assert (model.judged[1] <= model.judged[0]).all()


def test_a_method_without_a_measure_has_none() -> None:
    parts = assemble(tiny_plan("finetune", SKEWED, rounds=1, steps=1), "cpu", scenario(SKEWED))
    lines = list(learn(parts.scenario, parts.server, parts.door, parts.engine))
    tasks = [line for line in lines if line["kind"] == "task"]
    assert [line["measured"] for line in tasks] == [{}] * 3
    assert [line["old"] is None for line in tasks] == [True, False, False]


# -- run folders ------------------------------------------------------------------------------------------------------

FOLDERS: dict[str, Path] = {}


@pytest.fixture
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give the folder of a finished run; each is done once."""

    def give(method: str) -> Path:
        if method not in FOLDERS:
            FOLDERS[method] = tmp_path_factory.mktemp(method) / "run"
            settings = QUICK if method in ("hr-literal", *ABLATIONS) else {"rounds": 1, "steps": 1}
            list(execute(tiny_plan(method, SKEWED, **settings), FOLDERS[method], "cpu"))
        return FOLDERS[method]

    return give


Folder = Callable[[str], Path]


def test_the_result_has_what_the_last_task_line_says_of_forgetting(folder_of: Folder) -> None:
    folder = folder_of("hr-literal")
    last, result = run().task_lines[-1], read_result(folder)
    assert result["old"] == last["old"] and result["measured"] == last["measured"]
    assert result["old"] is not None and result["measured"]["old_exemplars"] is not None
    computed = result_of(read(folder / "ledger.jsonl"))
    assert computed["old"] == last["old"] and computed["measured"] == last["measured"]
    assert verify(folder) == []


@pytest.mark.parametrize("key", ["old", "measured"])
def test_a_result_that_says_otherwise_is_found_out(key: str, folder_of: Folder, tmp_path: Path) -> None:
    copied(folder_of("hr-literal"), tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    result[key] = {"old_exemplars": 99.0} if key == "measured" else 99.0
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert len(verify(tmp_path)) == 1 and key in verify(tmp_path)[0]


def test_runs_from_before_these_measures_still_verify(folder_of: Folder, tmp_path: Path) -> None:
    copied(folder_of("hr-literal"), tmp_path)
    without = [
        {k: v for k, v in line.items() if k not in ("old", "measured")} for line in read(tmp_path / "ledger.jsonl")
    ]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in without))
    result = json.loads((tmp_path / "result.json").read_text())
    del result["old"], result["measured"]
    result["ledger_sha256"] = sha256(tmp_path / "ledger.jsonl")
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert verify(tmp_path) == [] and "old" not in result_of(without) and "measured" not in result_of(without)


def copied(folder: Path, to: Path) -> None:
    for name in ("config.toml", "ledger.jsonl", "result.json"):
        (to / name).write_bytes((folder / name).read_bytes())


def pictures_in(folder: Path) -> tuple[Weights, dict[int, int]]:
    pictures, facts = read_tensors(folder / "replay.safetensors")
    return pictures, {int(j): who for j, who in json.loads(facts["owners"]).items()}


def test_a_run_leaves_a_page_of_what_it_replays(folder_of: Folder) -> None:
    folder = folder_of("hr-literal")
    with Image.open(folder / "replay.png") as page:
        assert page.format == "PNG" and page.mode == "RGB"
        assert page.size == (120 + 5 * (48 + 4), 22 + 6 * (48 + 4)), "real, three tasks, centroid; six classes"
        drawn = gallery.Gallery(folder).page(scenario(SKEWED).class_names, 3)
        assert page.size == drawn.size and page.tobytes() == drawn.tobytes()


def test_the_page_shows_each_picture_in_its_place(folder_of: Folder) -> None:
    folder = folder_of("hr-literal")
    pictures, _ = pictures_in(folder)
    with Image.open(folder / "replay.png") as page:
        for j in range(6):
            names = [f"{j // 2}/real/{j}", *(f"{t}/kept/{j}" for t in range(3)), f"2/made/{j}"]
            for column, name in enumerate(names):
                left, top = 120 + column * 52, 22 + j * 52
                cell = torch.from_numpy(np.array(page.crop((left, top, left + 48, top + 48)))).view(8, 6, 8, 6, 3)
                wanted = pictures[name][0] if name in pictures else torch.full((8, 8), 235, dtype=torch.uint8)
                assert (cell == wanted.view(8, 1, 8, 1, 1)).all(), name


def test_the_gallery_has_a_picture_of_each_class_after_each_task(folder_of: Folder) -> None:
    pictures, owners = pictures_in(folder_of("hr-literal"))
    assert sorted(owners) == list(range(6))
    expected = {f"{j // 2}/real/{j}" for j in range(6)}
    expected |= {f"{t}/{kind}/{j}" for j in range(6) for t in range(j // 2, 3) for kind in ("kept", "made")}
    assert set(pictures) == expected
    assert all(p.shape == (1, 8, 8) and p.dtype == torch.uint8 for p in pictures.values())


def test_the_real_image_is_one_that_its_owner_trained_on(folder_of: Folder) -> None:
    pictures, owners = pictures_in(folder_of("hr-literal"))
    held = {(a.client, a.task): a.data for a in run().of("remember")}
    for j, who in owners.items():
        assert any(torch.equal(pictures[f"{j // 2}/real/{j}"], image) for image in held[who, j // 2].of(j))


def test_the_gallery_shows_what_the_memories_and_centroids_decode_to(folder_of: Folder) -> None:
    pictures, owners = pictures_in(folder_of("hr-literal"))
    for task, (model, memories) in enumerate(zip(run().models, run().memories, strict=True)):
        net = autoencoder(run(), model.weights)
        for j in range(2 * task + 2):
            p = model.centroids[j]
            assert torch.equal(pictures[f"{task}/made/{j}"], images_of(net, p[None])[0])
            code = numbers(memories[owners[j]], j, p)[:1]
            assert (pictures[f"{task}/kept/{j}"].int() - images_of(net, code)[0].int()).abs().max() <= 1


def test_perfect_exemplars_are_shown_as_they_were_taken(folder_of: Folder) -> None:
    pictures, _ = pictures_in(folder_of("hr-literal-perfect"))
    for j in range(6):
        for task in range(j // 2, 3):
            assert torch.equal(pictures[f"{task}/kept/{j}"], pictures[f"{j // 2}/real/{j}"])
    plain, _ = pictures_in(folder_of("hr-literal"))
    assert torch.equal(plain["0/real/0"], pictures["0/real/0"]) and not torch.equal(
        plain["0/kept/0"], plain["0/real/0"]
    )


@pytest.mark.parametrize("stop_after", [1, 2])
def test_a_stopped_run_goes_on_with_its_gallery(stop_after: int, folder_of: Folder, tmp_path: Path) -> None:
    lines, ended = execute(tiny_plan("hr-literal", SKEWED, **QUICK), tmp_path, "cpu"), 0
    for line in lines:
        ended += line["kind"] == "task"
        if ended == stop_after:
            lines.close()
    early, _ = pictures_in(tmp_path)
    assert {name.split("/")[0] for name in early} == {str(t) for t in range(stop_after)}
    left = list(execute(tiny_plan("hr-literal", SKEWED, **QUICK), tmp_path, "cpu"))
    assert {line["task"] for line in left} == set(range(stop_after, 3))
    (one, owners), (other, others) = pictures_in(folder_of("hr-literal")), pictures_in(tmp_path)
    assert equal(one, other) and owners == others
    assert (tmp_path / "replay.png").read_bytes() == (folder_of("hr-literal") / "replay.png").read_bytes()


def test_a_method_that_cannot_show_its_memory_leaves_no_page(folder_of: Folder) -> None:
    left = {path.name for path in folder_of("finetune").iterdir()}
    assert "result.json" in left and not any(name.startswith("replay") for name in left)


@pytest.mark.parametrize(("tasks", "size"), [(1, 100), (3, 2), (10, 10), (20, 5), (50, 2)])
def test_classes_of_every_task_are_shown(tasks: int, size: int) -> None:
    groups = [tuple(range(t * size, (t + 1) * size)) for t in range(tasks)]
    rows = [j for group in groups for j in gallery.shown(group, tasks)]
    assert all(set(rows) & set(group) for group in groups)
    assert len(rows) == len(set(rows)) <= max(gallery.ROWS, tasks)


def test_a_page_has_no_more_rows_than_it_has_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "ROWS", 3)
    list(execute(tiny_plan("hr-literal", SKEWED, rounds=1, steps=1, align_steps=1), tmp_path, "cpu"))
    pictures, owners = pictures_in(tmp_path)
    assert sorted(owners) == [0, 2, 4] == sorted({int(name.split("/")[2]) for name in pictures})


def test_raw_images_are_kept_as_far_as_they_fit() -> None:
    raw = run(exemplars="raw")
    for memories in raw.memories:
        assert memories and all(
            size_in_bytes(memory) <= raw.parts.scenario.budget.per_client for memory in memories.values()
        )
        for memory in memories.values():
            assert all(kept.dtype == torch.uint8 and kept.shape[1:] == (1, 8, 8) for kept in memory.codes.values())
    kept = sum(sum(how_many(memory).values()) for memory in raw.memories[-1].values())
    assert 0 < kept < sum(sum(how_many(memory).values()) for memory in run().memories[-1].values())


# -- clients that stay behind, leave, or begin again ------------------------------------------------------------------


@pytest.mark.parametrize("update", ["reencode", "frozen"])
def test_a_client_that_stays_behind_keeps_each_image_once(update: str) -> None:
    stayed = run(benchmark=replace(SKEWED, staying=1.0), memory_scope="client", memory_update=update)
    task = stayed.parts.scenario.tasks[-1]
    for client, memory in stayed.memories[-1].items():
        held = stayed.parts.scenario.held(client, task)
        assert {j: len(codes) for j, codes in memory.codes.items()} == {j: n for j, n in enumerate(held) if n}
    for asked in stayed.later():
        old = asked.pool.labels[asked.kinds > 0].tolist()
        assert set(old).isdisjoint(asked.data.classes()), "what is at hand is not replayed beside itself"


def test_own_centroids_know_the_new_classes_inside_a_task() -> None:
    mine = run(centroids="per_client", evaluate_every=1)
    for asked in (asked for asked in mine.later() if asked.round == 0):
        new = list(asked.data.task.new)
        assert torch.equal(asked.message.of_clients[:, new], asked.message.centroids[new].expand(4, -1, -1))


def test_the_gallery_does_not_follow_a_client_that_has_left(tmp_path: Path) -> None:
    wanted = tiny_plan("hr-literal", replace(SKEWED, leaving=1), **QUICK)
    list(execute(wanted, tmp_path, "cpu"))
    parts = assemble(wanted, "cpu")
    pictures, facts = read_tensors(tmp_path / "replay.safetensors")
    owners = {int(j): client for j, client in json.loads(facts["owners"]).items()}
    present = [parts.scenario.present(task) for task in parts.scenario.tasks]
    assert any(client not in present[-1] for client in owners.values()), "nobody who is shown has left"
    for name in pictures:
        task, _, j = name.split("/")
        assert owners[int(j)] in present[int(task)], name


def test_a_run_that_starts_over_starts_its_gallery_over(tmp_path: Path) -> None:
    wanted = tiny_plan("hr-literal", replace(SKEWED, tasks=2), **QUICK)
    list(execute(wanted, tmp_path, "cpu"))
    first, _ = read_tensors(tmp_path / "replay.safetensors")
    shutil.rmtree(tmp_path / "checkpoint")
    (tmp_path / "result.json").unlink()
    lines = execute(wanted, tmp_path, "cpu")
    while next(lines)["kind"] != "task":
        pass
    lines.close()  # type: ignore[attr-defined]
    begun, _ = read_tensors(tmp_path / "replay.safetensors")
    assert begun.keys() == {name for name in first if name.startswith("0/")}
    aside, _ = read_tensors(tmp_path / "replay.safetensors.lost")
    assert equal(aside, first) and (tmp_path / "replay.png.lost").exists(), "nothing is lost"


@pytest.mark.parametrize("damage", [b"", b"no tensors", None])
def test_a_damaged_gallery_does_not_stop_a_run(damage: bytes | None, folder_of: Folder, tmp_path: Path) -> None:
    lines = execute(tiny_plan("hr-literal", SKEWED, **QUICK), tmp_path, "cpu")
    while next(lines)["kind"] != "task":
        pass
    lines.close()  # type: ignore[attr-defined]
    if damage is None:
        write_tensors(tmp_path / "replay.safetensors", {"a": torch.zeros(1)})  # of no gallery: it names no owners
    else:
        (tmp_path / "replay.safetensors").write_bytes(damage)
    list(execute(tiny_plan("hr-literal", SKEWED, **QUICK), tmp_path, "cpu"))
    assert read_result(tmp_path)["matrix"] == read_result(folder_of("hr-literal"))["matrix"]
    assert {name.split("/")[0] for name in pictures_in(tmp_path)[0]} == {"1", "2"}
