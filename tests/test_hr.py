"""Hybrid Replay made to work: its codec, what its clients replay, keep and learn, and what its runs come to.

Three tasks of two digits each on four clients that hold little of most classes; what an answer saw and did is
recomputed by hand wherever it can be.
"""

import copy
import math
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fcil.blocks import made_up as making
from fcil.blocks.centroids import nearest
from fcil.blocks.codec import Fitted, LearnedCodec, TransformCodec, build
from fcil.blocks.transform_codec import square
from fcil.errors import UserError
from fcil.experiment import execute
from fcil.federation import engine
from fcil.federation.calls import Call
from fcil.federation.loop import Line, learn
from fcil.method import Batch, Fit, Pictures
from fcil.methods import METHODS, hr
from fcil.methods.hr import Client, Config, Given, Memory, Model, Proposal
from fcil.parts import Parts, assemble
from fcil.plan import Plan, plan
from fcil.records import Done, Weights, flatten, read_tensors, size_in_bytes, unflatten
from fcil.results.ledger import read
from fcil.scenario.benchmarks import BENCHMARKS, Benchmark
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import LocalData
from fcil.seeds import seed_of
from tests.conftest import TINY, tiny_plan

ABLATIONS = [name for name, entry in METHODS.items() if entry.module == hr.__name__ and entry.preset]
SKEWED = replace(TINY, alpha=0.05, train_limit=40, test_limit=20)  # most clients miss a class
FEW = replace(SKEWED, clients=12, active=4, train_limit=4, alpha=1.0)  # eight images of a task for twelve clients
QUICK = {"rounds": 2, "steps": 2, "align_steps": 300, "lifelike": 0.0}  # so short a run knows no image
REST = 2 ** (1 / 6)
SIZE = 12  # bytes of a code of an 8x8 image
NOT_HERE = {  # lines of Algorithm 2 that hr may say it has not
    21: "there is no decoder that could be taught: the codec is fixed",
    26: "codes of a fixed codec are never encoded again",
}


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
    message: Any
    reply: Any = None
    fit: Fit | None = None

    @property
    def pool(self) -> Any:
        assert self.fit is not None
        return self.fit.pool

    @property
    def made(self) -> Tensor:
        return self.pool.extra["made"]


@dataclass
class Run:
    """A whole run under observation."""

    parts: Parts
    asked: list[Asked] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    models: list[Model] = field(default_factory=list)  # broadcast when a task has ended
    memories: list[dict[int, Memory]] = field(default_factory=list)

    def of(self, handler: str, task: int | None = None) -> list[Asked]:
        return [asked for asked in self.asked if asked.handler == handler and task in (None, asked.task)]

    def later(self) -> list[Asked]:
        """The trainings of all tasks but the first."""
        return [asked for asked in self.of("train") if asked.task > 0]

    @property
    def task_lines(self) -> list[Line]:
        return [line for line in self.lines if line["kind"] == "task"]

    @property
    def codec(self) -> Any:
        """The client's codec, to use with what was fitted."""
        return self.parts.engine.client.codec  # type: ignore[attr-defined]


Loses = Callable[[int, int, str], bool]  # client, task, question -> whether the message never arrives


@cache
def scenario(benchmark: Benchmark) -> Scenario:
    return Scenario(benchmark, 0)


@cache
def run(method: str = "hr", benchmark: Benchmark = SKEWED, loses: Loses | None = None, **settings: Any) -> Run:
    wanted = tiny_plan(method, benchmark, **{**QUICK, **settings})
    watched = Run(assemble(wanted, "cpu", scenario(wanted.benchmark), workers=1))
    parts = watched.parts
    answer, fit = parts.engine.answer, parts.engine.fit

    def answering(
        who: int, handler: Callable[..., Any], memory: Memory, data: LocalData, message: Any, call: Call
    ) -> Any:
        seen = Asked(call.task, handler.__name__, call.round, who, data, copy.copy(memory), message)
        watched.asked.append(seen)
        answered = answer(who, handler, memory, data, message, call)
        seen.reply = answered.reply
        return answered

    def fitting(wanted: Fit, call: Call, generator: torch.Generator) -> Any:
        watched.asked[-1].fit = wanted
        return fit(wanted, call, generator)

    def losing(who: int, where: str, _: int) -> bool:
        assert loses is not None
        return loses(who, parts.door.task.index, where.split("/")[-1])

    parts.engine.answer, parts.engine.fit = answering, fitting  # type: ignore[method-assign, assignment]
    if loses is not None:
        parts.door._is_lost = losing  # type: ignore[method-assign]
    for line in learn(parts.scenario, parts.server, parts.door, parts.engine):
        watched.lines.append(line)
        if line["kind"] == "task":
            watched.models.append(copy.copy(parts.server.broadcast()))
            watched.memories.append({c: copy.copy(memory) for c, memory in parts.transport.memories.items()})
    assert len(watched.models) == wanted.benchmark.tasks
    return watched


def client(**settings: Any) -> Client:
    """A client with these knobs, in the setting of `run()`."""
    return Client(Config(**settings), run().parts.setting)


def encoder(of: Run, weights: Weights) -> Any:
    net = of.parts.setting.encoder(len(of.models[0].centroids[0]))
    net.load_state_dict(weights)
    return net.eval()


@torch.no_grad()
def codes_of(net: Any, images: Tensor) -> Tensor:
    return net(images.float() / 255)[0]


def through(of: Run, images: Tensor) -> Tensor:
    """Images as the run's codec gives them back."""
    return of.codec.decode(of.models[0].codec, of.codec.encode(of.models[0].codec, images))


def how_many(memory: Memory) -> dict[int, int]:
    return {j: len(codes) for j, codes in memory.codes.items()}


def distances(points: Tensor, others: Tensor) -> Tensor:
    return (points[:, None] - others[None]).square().sum(2).sqrt()


def apart_from_each_other(points: Tensor) -> Tensor:
    return distances(points, points)[~torch.eye(len(points), dtype=torch.bool)]


def everything(of: Run) -> Weights:
    memories = {f"{c}/{n}": t for c, memory in of.memories[-1].items() for n, t in flatten(memory).items()}
    return flatten(of.models[-1]) | memories


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one
    )


def among(rows: Tensor, others: Tensor) -> Tensor:
    """Tell which of `others` each row is: (rows, others)."""
    return (rows[:, None] == others[None]).flatten(2).all(2)


# -- the paper's lines ------------------------------------------------------------------------------------------------


def claimed(first: str, last: str | None) -> tuple[list[int], list[int]]:
    """The numbers at line ends between the lines that begin so; those with a colon and a reason by themselves."""
    found: list[int] = []
    excused: list[int] = []
    inside = False
    with tokenize.open(hr.__file__) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.line.startswith(first):
                inside = True
            elif last and token.line.startswith(last):
                inside = False
            if not inside or token.type != tokenize.COMMENT:
                continue
            comment = token.string.removeprefix("# fmt: skip").strip()
            if match := re.fullmatch(r"# (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)(: .+)?", comment):
                for part in match[1].split(", "):
                    begin, _, end = part.partition("-")
                    (excused if match[2] else found).extend(range(int(begin), int(end or begin) + 1))
    return found, excused


def test_every_line_of_algorithm_1_is_claimed_once() -> None:
    found, excused = claimed("class Server", "class Client")
    assert sorted(found) == list(range(1, 18)) and excused == []


def test_every_line_of_algorithm_2_is_claimed_once_or_excused() -> None:
    found, excused = claimed("class Client", None)
    assert sorted(found + excused) == list(range(1, 30))
    assert set(excused) <= NOT_HERE.keys()


# -- the six ablations ------------------------------------------------------------------------------------------------


def test_there_are_six_ablations() -> None:
    kinds = ["mini", "no-latents", "perfect", "no-kd", "no-global", "rfa"]
    assert [name.removeprefix("hr-") for name in ABLATIONS] == kinds


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_ends_elsewhere(name: str) -> None:
    assert equal(everything(run()), everything(run("hr"))), "and hr is what it is compared with"
    assert not equal(everything(run(name)), everything(run()))
    assert not equal(run(name).models[-1].weights, run().models[-1].weights)
    assert run(name).models[-1].weights.keys() == run().models[-1].weights.keys()


def test_mini_keeps_a_tenth_of_the_bytes() -> None:
    mini, whole = run("hr-mini"), run()
    for task in mini.parts.scenario.tasks:
        tenth = mini.parts.scenario.budget.at(task) / 10
        kept = [size_in_bytes(memory) for memory in mini.memories[task.index].values()]
        assert len(kept) == 4 and all(tenth - SIZE < size <= tenth for size in kept)
        assert all(size_in_bytes(memory) > tenth for memory in whole.memories[task.index].values())


def test_without_latents_nothing_is_kept_and_every_old_class_is_made_up() -> None:
    without = run("hr-no-latents")
    assert all(flatten(memory) == {} for after in without.memories for memory in after.values())
    assert without.later()
    for asked in without.later():
        is_old = torch.isin(asked.pool.labels, torch.tensor(asked.data.task.old))
        assert torch.equal(asked.made, is_old)
        assert set(asked.pool.labels[is_old].tolist()) == set(asked.data.task.old)


def test_perfect_keeps_real_images_where_codes_would_be() -> None:
    perfect, whole = run("hr-perfect"), run()
    held = {(a.client, a.task): a.data for a in perfect.of("remember")}
    for task, after in enumerate(perfect.memories):
        assert {c: how_many(m) for c, m in after.items()} == {c: how_many(m) for c, m in whole.memories[task].items()}
        for who, memory in after.items():
            assert memory.codes
            for j, kept in memory.codes.items():
                assert kept.dtype == torch.uint8 and kept.shape[1:] == (1, 8, 8)
                assert among(kept, held[who, j // 2].of(j)).any(1).all()


def test_perfect_keeps_as_many_where_memory_is_scarce() -> None:
    perfect, whole = run("hr-perfect", memory=1), run(memory=1)
    counts = [[{c: how_many(m) for c, m in after.items()} for after in of.memories] for of in (perfect, whole)]
    assert counts[0] == counts[1] and sum(counts[0][-1][0].values()) == 96 // SIZE
    assert perfect.task_lines[-1]["kept_max"] == 64 * (96 // SIZE) > perfect.parts.scenario.budget.per_client


def test_perfect_replays_its_images_as_they_are() -> None:
    replayed = 0
    for asked in run("hr-perfect").later():
        for j, kept in asked.memory.codes.items():
            assert torch.equal(asked.pool.images[asked.pool.labels == j], kept)
            replayed += len(kept)
    assert replayed > 0


def test_without_distillation_no_old_weights_are_sent_or_loaded() -> None:
    without = run("hr-no-kd")
    assert len(without.of("train")) == 12 and all(model.old_weights == {} for model in without.models)
    for asked in without.of("train"):
        assert asked.message.old_weights == {} and asked.fit is not None and asked.fit.load.keys() == {"net"}


def test_without_global_replay_no_image_is_made_up() -> None:
    without, missed = run("hr-no-global"), 0
    for asked in without.later():
        assert not asked.made.any()
        assert set(asked.pool.labels.tolist()) == {*asked.data.classes(), *asked.memory.codes}
        missed += len(set(asked.data.task.old) - set(asked.memory.codes))
    assert missed > 0 and any(asked.made.any() for asked in run().later())


def test_repulsion_places_the_centroids_elsewhere_and_no_nearer() -> None:
    rfa, whole = run("hr-rfa").models, run().models
    for task in range(3):
        assert not torch.isclose(rfa[task].centroids[2 * task :][:2], whole[task].centroids[2 * task :][:2]).all()
    assert apart_from_each_other(rfa[-1].centroids).min() >= REST * 5.0 * (1 - 1e-5)


# -- the codec --------------------------------------------------------------------------------------------------------


def test_the_codec_is_fitted_once_by_everyone_before_anything_else() -> None:
    assert [a.client for a in run().of("measure")] == [0, 1, 2, 3] and {a.task for a in run().of("measure")} == {0}
    assert [a.handler for a in run().asked[:5]] == ["measure"] * 4 + ["propose"]


@pytest.mark.parametrize("kind", ["klt", "dct"])
def test_the_codec_is_to_the_bit_that_of_all_images_pooled(kind: str) -> None:
    fitted = run(codec=kind, tasks=2)
    own, images = build(kind, (1, 8, 8), SIZE), [a.data.images for a in fitted.of("measure")]
    assert isinstance(own, TransformCodec) and sum(map(len, images)) == 80
    for pooled in (torch.cat(images), torch.cat(images[::-1]).flip(0)):
        assert equal(fitted.models[0].codec, own.fitted(own.statistics(pooled)))
    assert not equal(fitted.models[0].codec, own.fitted(own.statistics(torch.cat(images[1:])))), "all of them count"


def codec_in(message: Model | Fitted) -> Weights:
    return message.weights if isinstance(message, Fitted) else message.codec


def test_the_codec_is_not_touched_later() -> None:
    first, *others = [codec_in(a.message) for a in run().asked if a.handler != "measure"]
    assert first and all(equal(first, other) for other in others)
    assert all(equal(first, model.codec) for model in run().models)


def test_messages_hold_no_more_than_their_answers_need() -> None:
    sent = {a.handler: type(a.message) for a in [*run().asked, *learned().asked]}
    assert sent == {"measure": Done, "train_codec": Fitted, "propose": Model, "train": Model, "remember": Fitted}
    assert {size_in_bytes(a.message) for a in run().of("measure")} == {0}
    for asked in run().of("remember"):
        assert flatten(asked.message).keys() == {f"weights/{name}" for name in run().models[0].codec}


def test_codes_are_bytes_and_really_so_many() -> None:
    seen = 0
    for memories in run().memories:
        for memory in memories.values():
            for codes in memory.codes.values():
                assert codes.dtype == torch.uint8 and codes.shape[1:] == (SIZE,) and len(codes) > 0
                assert codes.untyped_storage().nbytes() == SIZE * len(codes), "a piece of something larger"
                seen += len(codes)
            assert size_in_bytes(memory) == SIZE * sum(how_many(memory).values())
    assert seen > 0


@pytest.mark.parametrize("size", [5, 64])
def test_codes_are_as_long_as_they_are_set(size: int) -> None:
    long = run(code_bytes=size, tasks=2)
    kept = [codes for memory in long.memories[-1].values() for codes in memory.codes.values()]
    assert kept and all(codes.shape[1] == size for codes in kept)


def test_codes_take_a_tenth_of_an_image_and_at_least_twelve_bytes_unless_set() -> None:
    setting = run().parts.setting
    large = replace(setting, budget=replace(setting.budget, per_client=122_880))
    sizes = [hr.codec_of(Config(), replace(large, shape=shape)).size for shape in ((3, 32, 32), (1, 8, 8), (1, 3, 3))]
    assert sizes == [307, 12, 9] and hr.codec_of(Config(code_bytes=40), large).size == 40


def test_encoders_have_room_for_a_simplex_unless_set() -> None:
    assert run().models[-1].centroids.shape == (6, 12)
    assert run(latent=5, tasks=2).models[-1].centroids.shape == (4, 5)


@pytest.mark.parametrize("rule", ["fixed", "growing"])
def test_memory_stays_within_the_budget_at_every_task(rule: str) -> None:
    tight = run(memory=2, memory_rule=rule)
    allowed = [tight.parts.scenario.budget.at(task) for task in tight.parts.scenario.tasks]
    assert allowed == ([192] * 3 if rule == "fixed" else [64, 128, 192])
    for room, after, line in zip(allowed, tight.memories, tight.task_lines, strict=True):
        kept = [size_in_bytes(memory) for memory in after.values()]
        assert len(kept) == 4 and line["kept_max"] == max(kept) and line["kept"] == sum(kept)
        assert all(room - SIZE < size <= room for size in kept), "all of it is used, and no more"


def test_memory_is_shared_fairly_by_class() -> None:
    tight = run(memory=2)
    most = [max(max(how_many(memory).values()) for memory in after.values()) for after in tight.memories]
    assert most[0] > most[-1] > 0
    short = 0
    for asked in tight.of("remember"):
        kept = how_many(tight.memories[asked.task][asked.client])
        assert sum(kept.values()) == 192 // SIZE
        for j in {*asked.memory.codes, *asked.data.classes()}:
            if kept.get(j, 0) < max(kept.values()) - 1:
                had = len(asked.memory.codes.get(j, ())) + len(asked.data.of(j))
                assert kept.get(j, 0) == had, "there are no more of it"
                short += 1
    assert short > 0


def test_codes_of_old_classes_stay_to_the_bit_and_only_their_number_falls() -> None:
    tight, survived, dropped = run(memory=1), 0, 0
    for task in (1, 2):
        for who, after in tight.memories[task].items():
            before = tight.memories[task - 1][who]
            for j, codes in before.codes.items():
                kept = after.codes.get(j, codes[:0])
                assert torch.equal(kept, codes[: len(kept)])
                survived, dropped = survived + len(kept), dropped + len(codes) - len(kept)
    assert survived > 0 and dropped > 0


def test_new_codes_are_those_of_images_drawn_at_random_each_once() -> None:
    drawn = []
    for asked in run(memory=1).of("remember"):
        after = run(memory=1).memories[asked.task][asked.client]
        for j in set(asked.data.classes()) & after.codes.keys():
            own = run(memory=1).codec.encode(codec_in(asked.message), asked.data.of(j))
            match = among(after.codes[j], own)
            assert match.any(1).all() and match.any(0).sum() == len(after.codes[j].unique(dim=0))
            drawn += match.int().argmax(1).tolist()
    assert drawn != sorted(drawn) and max(drawn) > 8, "not the first ones"


# -- one domain -------------------------------------------------------------------------------------------------------


def test_new_images_pass_the_codec() -> None:
    for asked in run().of("train"):
        own = len(asked.data.labels)
        assert own > 0 and torch.equal(asked.pool.images[:own], through(run(), asked.data.images))
        assert torch.equal(asked.pool.labels[:own], asked.data.labels)
        assert not torch.equal(asked.pool.images[:own], asked.data.images) and not asked.made[:own].any()


@pytest.mark.parametrize("settings", [{"one_domain": False}, {"exemplars": "raw"}])
def test_new_images_stay_as_they_are(settings: dict[str, Any]) -> None:
    assert_new_images_stay(run(**settings))


def test_new_images_stay_as_they_are_beside_perfect_ones() -> None:
    assert_new_images_stay(run("hr-perfect"))


def assert_new_images_stay(of: Run) -> None:
    assert len(of.of("train")) == 12
    for asked in of.of("train"):
        own = len(asked.data.labels)
        assert own > 0 and torch.equal(asked.pool.images[:own], asked.data.images)
        assert torch.equal(asked.pool.labels[:own], asked.data.labels)


def test_where_all_that_is_replayed_is_made_up_so_are_new_images() -> None:
    without, model = run("hr-no-latents"), run("hr-no-latents").models[-1]
    for asked in without.of("train"):
        own = len(asked.data.labels)
        shown, decoded = asked.pool.images[:own], through(run(), asked.data.images)
        assert own > 0 and torch.equal(asked.pool.labels[:own], asked.data.labels) and not asked.made[:own].any()
        if asked.task == 0:
            assert torch.equal(shown, decoded)
        else:
            assert not among(shown, decoded).any() and not among(shown, asked.data.images).any()
    numbers = {j: [] for j in model.means}
    for asked in without.later():
        for j in asked.data.classes():
            rows = asked.pool.images[: len(asked.data.labels)][asked.data.labels == j]
            numbers[j].append(without.codec.numbers(model.codec, rows))
    for j in (2, 3, 4, 5):
        mean = torch.cat(numbers[j]).mean(0)
        off = [(mean - other[:-1]).norm().item() for other in model.means.values()]  # the last is of contrast
        assert off.index(min(off)) == j, "they are made up of their own class"


def test_a_memory_of_nothing_is_no_memory() -> None:
    none = run(memory=0.0)
    assert all(memory.codes == {} for memories in none.memories for memory in memories.values())
    assert equal(none.models[-1].weights, run("hr-no-latents").models[-1].weights)


@pytest.mark.parametrize("settings", [{"one_domain": False}, {"global_replay": False}, {"codec": "webp"}], ids=str)
def test_new_images_are_not_made_up_where_they_need_not_or_cannot_be(settings: dict[str, Any]) -> None:
    own = run("hr-no-latents", **settings)
    for asked in own.later():
        count = len(asked.data.labels)
        real = asked.data.images if settings == {"one_domain": False} else through(own, asked.data.images)
        assert torch.equal(asked.pool.images[:count], real)


def test_raw_images_are_kept_as_far_as_they_fit() -> None:
    raw = run(exemplars="raw")
    for memories in raw.memories:
        for memory in memories.values():
            assert 0 < size_in_bytes(memory) <= 960 and size_in_bytes(memory) % 64 == 0
            assert all(kept.dtype == torch.uint8 and kept.shape[1:] == (1, 8, 8) for kept in memory.codes.values())
    kept = sum(sum(how_many(memory).values()) for memory in raw.memories[-1].values())
    assert kept == 4 * (960 // 64) < sum(sum(how_many(memory).values()) for memory in run().memories[-1].values())


# -- what is replayed -------------------------------------------------------------------------------------------------


def test_every_old_class_is_replayed_and_none_else() -> None:
    for asked in run().of("train"):
        assert set(asked.pool.labels.tolist()) == {*asked.data.classes(), *asked.data.task.old}


@pytest.mark.parametrize("settings", [{}, {"made_up": 3}, {"memory": 1}, {"exemplars": "none"}])
def test_classes_with_codes_are_decoded_and_all_others_made_up_as_often_as_is_usual(settings: dict[str, Any]) -> None:
    of, seen = run(**settings), set()
    for asked in of.later():
        own = how_many(asked.memory) or {j: len(asked.data.of(j)) for j in asked.data.classes()}
        usual = settings.get("made_up") or round(sum(own.values()) / len(own))
        for j in asked.data.task.old:
            replayed = asked.pool.labels == j
            if j in asked.memory.codes:
                decoded = of.codec.decode(asked.message.codec, asked.memory.codes[j])
                assert torch.equal(asked.pool.images[replayed], decoded) and not asked.made[replayed].any()
            else:
                assert asked.made[replayed].tolist() == [True] * usual
                assert len(asked.pool.images[replayed].unique(dim=0)) == usual, "each is drawn by itself"
            seen.add(j in asked.memory.codes)
    assert seen == ({False} if settings.get("exemplars") == "none" else {False, True})


def test_the_moments_are_those_of_all_images_of_a_class() -> None:
    alone = run(tied=0)
    for task, model in enumerate(alone.models):
        images = {j: torch.cat([a.data.of(j) for a in alone.of("propose")]) for j in range(6)}
        assert model.means.keys() == model.deviations.keys() == set(range(2 * task + 2))
        for j in model.means:
            numbers = alone.codec.numbers(model.codec, images[j]).double()
            assert len(numbers) == 40 and model.means[j].shape == (len(model.codec["bits"]),)
            assert torch.allclose(model.means[j].double(), numbers.mean(0), atol=1e-5)
            assert torch.allclose(model.deviations[j].double(), numbers.std(0, correction=0), atol=1e-4)


def test_moments_of_old_classes_stay() -> None:
    first, last = run().models[0], run().models[-1]
    assert all(torch.equal(first.means[j], last.means[j]) for j in (0, 1))
    assert all(torch.equal(first.deviations[j], last.deviations[j]) for j in (0, 1))


def test_what_leads_is_known_as_it_varies_together_in_all_images_of_a_class() -> None:
    tied, many = run("hr-no-latents", tied=6), 6
    images = {j: torch.cat([a.data.of(j) for a in tied.of("propose")]) for j in range(6)}
    for task, model in enumerate(tied.models):
        first = model.codec["deviation"].argsort(descending=True, stable=True)[:many]
        assert model.roots.keys() == set(range(2 * task + 2))
        for j, root in model.roots.items():
            covariance = torch.cov(tied.codec.numbers(model.codec, images[j])[:, first].T, correction=0)
            shrunk = torch.where(torch.eye(many, dtype=torch.bool), covariance, 0.9 * covariance)
            full = square(root, many)
            assert torch.allclose(full @ full, shrunk, atol=1e-3)


def test_what_leads_adds_few_numbers_to_a_proposal_and_to_the_broadcast() -> None:
    tied, alone = (run("hr-no-latents", tied=many) for many in (6, 0))
    numbers = len(alone.models[0].codec["bits"])
    for asked in tied.of("propose"):
        assert {len(own) for own in asked.reply.firsts.values()} <= {numbers + 1}
        assert {len(own) for own in asked.reply.seconds.values()} <= {numbers + 1 + 6 * 5 // 2}
    more = size_in_bytes(tied.models[-1]) - size_in_bytes(alone.models[-1])
    assert more == 6 * 4 * (2 + 6 * 7 // 2), "of each class a mean and a deviation of contrast, and a root"
    assert all(model.roots == {} for model in alone.models)


def test_made_up_images_are_others_where_numbers_are_tied_and_just_as_many() -> None:
    how: dict[str, Any] = {"one_domain": False}
    tied, alone = (run("hr-no-latents", tied=many, **how).later() for many in (6, 0))
    for one, other in zip(tied, alone, strict=True):
        assert torch.equal(one.pool.labels, other.pool.labels) and torch.equal(one.made, other.made)
        assert torch.equal(one.pool.images[~one.made], other.pool.images[~one.made])
        assert not torch.equal(one.pool.images[one.made], other.pool.images[one.made])


def test_proposals_are_sums_over_new_classes() -> None:
    proposals: list[Proposal] = [asked.reply for asked in run().of("propose", 0)]
    net = encoder(run(), run().of("propose")[0].message.weights)
    images = {j: torch.cat([a.data.of(j) for a in run().of("propose", 0)]) for j in (0, 1)}
    assert [p.count for p in proposals] == [20] * 4
    for j in (0, 1):
        assert sum(int(p.counts[j]) for p in proposals if j in p.counts) == 40
        assert torch.allclose(sum(p.sums[j] for p in proposals if j in p.sums) / 40, codes_of(net, images[j]).mean(0))


@cache
def drawn(j: int, number: int = 4000) -> tuple[Tensor, Tensor]:
    """What is drawn for made-up images of a class, and what these images come to as numbers."""
    own, model, seen = client(tied=0), run(tied=0).models[-1], []
    pictures = own.codec.pictures
    own.codec.pictures = lambda fitted, numbers: seen.append(numbers) or pictures(fitted, numbers)  # type: ignore
    made = own.made_up([j], number, model, torch.Generator().manual_seed(3))
    assert made.keys() == {j} and made[j].shape == (number, 1, 8, 8) and made[j].dtype == torch.uint8
    return seen[0], own.codec.numbers(model.codec, made[j])


@pytest.mark.parametrize("j", range(6))
def test_made_up_images_have_the_moments_of_their_class(j: int) -> None:
    model, (numbers, again) = run(tied=0).models[-1], drawn(j)
    spread = model.deviations[j]
    assert ((numbers.mean(0) - model.means[j]).abs() <= 5 * spread / 4000**0.5 + 1e-6).all()
    assert torch.allclose(numbers.std(0), spread, rtol=0.08, atol=1e-6)
    off = [(again.mean(0) - mean).norm().item() for mean in model.means.values()]
    assert off.index(min(off)) == j and min(off) < 0.5 * sorted(off)[1], "rounding and clipping move them a little"


def test_clients_make_up_images_of_their_own() -> None:
    made = defaultdict(list)
    for asked in run("hr-no-latents").later():
        if asked.round == 0:
            made[asked.task].append(asked.pool.images[asked.made])
    assert all(len(both) == 2 for both in made.values())
    assert all(not among(one, other).any() for one, other in made.values())


def test_the_pool_is_the_same_in_all_rounds_of_a_task() -> None:
    pools = defaultdict(list)
    for asked in run(rounds=3, steps=1).of("train"):
        pools[asked.task, asked.client].append((asked.pool.images, asked.pool.labels, asked.made))
    assert max(map(len, pools.values())) > 1
    for first, *rest in pools.values():
        assert all(torch.equal(one, other) for pool in rest for one, other in zip(first, pool, strict=True))


# -- which made-up images stand beside codes --------------------------------------------------------------------------


def replayed_where(lifelike: float, known: dict[int, float], memory: Memory | None = None) -> set[int]:
    """The classes of the pool of `mixed()` where the encoder knew such shares of what was made up of them."""
    asked = mixed()
    message = copy.copy(asked.message)
    message.lifelike = {j: torch.tensor(share) for j, share in known.items()}
    pool = client(lifelike=lifelike).interleaved(
        asked.memory if memory is None else memory, replace(asked.data, cache={}), message, torch.Generator()
    )
    return set(pool.labels.tolist())


def test_beside_codes_classes_are_made_up_only_if_their_images_were_known() -> None:
    asked = mixed()
    absent = set(asked.data.task.old) - set(asked.memory.codes)
    present = {*asked.data.classes(), *asked.memory.codes}
    assert absent and present
    for j in absent:
        assert replayed_where(0.8, {j: 0.8}) == present | {j}
        assert replayed_where(0.8, {j: 0.79}) == present
    assert replayed_where(0.0, {}) == present | absent


def test_where_no_code_is_kept_everything_is_made_up_however_little_of_it_was_known() -> None:
    assert replayed_where(1.0, {}, Memory()) == {*mixed().data.classes(), *mixed().data.task.old}


def test_the_server_counts_what_the_encoder_knows_of_what_it_makes_up() -> None:
    parts, _ = on_digits("hr")
    server = parts.server
    assert isinstance(server, hr.Server)
    model, task = server.state, parts.scenario.tasks[-1]
    moments = (model.means, model.deviations, model.roots)
    draws = torch.Generator().manual_seed(seed_of("judged", task.index))
    made = making.made(server.codec, model.codec, moments, 32, task.new, 64, draws)
    net = parts.setting.encoder(model.centroids.shape[1])
    net.load_state_dict(model.weights)
    for j in task.new:
        known = nearest(codes_of(net.eval(), made[j]), model.centroids, model.seen).argmax(1) == j
        assert model.lifelike[j] == known.float().mean() > 0.5
    assert not torch.equal(made[task.new[0]], made[task.new[1]])


def test_classes_are_judged_once_when_they_have_been_learned() -> None:
    for task, model in enumerate(run().models):
        assert model.lifelike.keys() == set(range(2 * task + 2))
        assert all(model.lifelike[j] is run().models[-1].lifelike[j] for j in model.lifelike)
        shares = torch.stack(list(model.lifelike.values()))
        measured = run().task_lines[task]["measured"]
        assert measured["lifelike"] == pytest.approx(shares.mean().item())
        assert measured["least_lifelike"] == pytest.approx(shares.min().item())


def test_on_digits_made_up_images_are_known() -> None:
    parts, last = on_digits("hr")
    assert last["measured"]["lifelike"] > 0.8 and last["measured"]["least_lifelike"] > 0.5
    assert parts.server.state.lifelike.keys() == set(range(10))


@pytest.mark.parametrize("settings", [{"global_replay": False}, {"codec": "webp", "code_bytes": 64}], ids=str)
def test_where_nothing_is_made_up_nothing_is_counted(settings: dict[str, Any]) -> None:
    of = run(**settings, tasks=2)
    assert [line["measured"]["lifelike"] for line in of.task_lines] == [None] * 2
    assert of.models[-1].lifelike == {}


def test_a_run_from_before_images_were_judged_is_read_all_the_same() -> None:
    before = {name: tensor for name, tensor in flatten(run().models[-1]).items() if not name.startswith("lifelike")}
    assert unflatten(Model, before).lifelike == {}


def test_a_run_with_a_knob_that_is_gone_is_refused_with_what_to_do() -> None:
    text = plan("hr").to_toml().replace("contrast = 0.1", 'loss = "pull"')
    with pytest.raises(UserError, match=r"no setting 'loss'.*start the run again in another folder \(--out\)"):
        Plan.parse(text, Path("runs/digits/hr/0/config.toml"))


# -- the loss ---------------------------------------------------------------------------------------------------------


@cache
def mixed() -> Asked:
    """A training with new images, decoded ones and made-up ones, more of one class than of another."""
    found = (a for a in run().later() if a.made.any() and a.memory.codes and len(a.data.labels))
    return next(a for a in found if len(a.pool.labels.bincount().unique()) > 2)


def mixed_batch(only_old: bool | None = None, made_weight: float = 1.0) -> Batch:
    """Some images of each kind; or those of old classes only, or of new ones."""
    pool, old = mixed().pool, torch.isin(mixed().pool.labels, torch.tensor(mixed().data.task.old))
    kinds = [~old, old & ~pool.extra["made"], pool.extra["made"]]
    index = torch.cat([kind.nonzero()[:6, 0] for kind in kinds])
    index = index if only_old is None else index[old[index] == only_old]
    assert len(index) >= 6
    made = pool.extra["made"][index]
    extra = {"made": made, "weight": torch.where(made, made_weight, 1.0)}
    return Batch(pool.images[index].float() / 255, pool.labels[index], torch.Generator(), extra)


def together() -> dict[str, nn.Module]:
    """Student and teacher as they are when a task begins."""
    first = next(asked for asked in run().later() if asked.round == 0)
    assert equal(first.message.weights, first.message.old_weights)
    return {"net": encoder(run(), first.message.weights), "old": encoder(run(), first.message.old_weights)}


def apart() -> dict[str, nn.Module]:
    """Student and teacher when the student has moved."""
    nets, generator = together(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in nets["net"].parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return nets


def given(**settings: Any) -> Given:
    return client(**settings).given(mixed().pool, mixed().data.task, mixed().message)


def loss(nets: dict[str, nn.Module], batch: Batch, **settings: Any) -> Tensor:
    return client(**settings).loss(nets, batch, given(**settings)).detach()


def drawn_to_centroids(
    z: Tensor, batch: Batch, pull: float, contrast: float, temperature: float, prior: Tensor
) -> Tensor:
    p, held = mixed().message.centroids, sorted(set(mixed().pool.labels.tolist()))
    pulled = torch.stack([((code - p[j]) ** 2).sum() for code, j in zip(z, batch.labels, strict=True)])
    scores = prior[held] - (distances(z, p[held]) ** 2) / temperature
    own = torch.tensor([held.index(j) for j in batch.labels.tolist()])
    return pull * pulled - contrast * scores.log_softmax(1)[torch.arange(len(own)), own]


@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("contrast", "calibrate", "new_share"), [(0.0, 0.0, 0.0), (0.7, 0.0, 0.0), (0.7, 0.6, 0.0), (0.7, 0.6, 0.8)]
)
def test_the_loss_by_hand(contrast: float, calibrate: float, new_share: float, balance: float) -> None:
    batch, nets = mixed_batch(made_weight=0.25), apart()
    knobs = {"pull": 0.3, "temperature": 1.7, "distill": 0.6, "contrast": contrast, "balance": balance}
    knobs |= {"calibrate": calibrate, "new_share": new_share}
    counts = torch.bincount(mixed().pool.labels, minlength=6).double()
    raw = torch.where(counts > 0, counts**-balance, 0.0)
    weight = raw * counts.sum() / (raw * counts).sum()
    new = torch.tensor([j in mixed().data.task.new for j in range(6)])
    own = counts[new].sum() / counts.sum()
    share = new_share or own
    often = counts * torch.where(new, share / counts[new].sum(), (1 - share) / counts[~new].sum())
    with torch.no_grad():
        z, taught = (nets[name](batch.images)[0].double() for name in ("net", "old"))
        each = drawn_to_centroids(z, batch, 0.3, contrast, 1.7, calibrate * (often * weight).log())
        old = torch.tensor([j in mixed().data.task.old for j in batch.labels.tolist()])
        each = each + torch.where(old, 0.6 * 0.3 * ((z - taught) ** 2).sum(1), 0.0)
        each = each * weight[batch.labels] * torch.where(batch.extra["made"], 0.25, 1.0)
    assert loss(nets, batch, **knobs).item() == pytest.approx(each.mean().item(), rel=1e-5)
    assert old.any() and not old.all() and batch.extra["made"].any()
    assert own < new_share or not new_share, "drawn more often than they come"


def test_distillation_is_nothing_at_the_first_step_and_something_after() -> None:
    batch = mixed_batch()
    assert torch.equal(loss(together(), batch), loss(together(), batch, distill=0.0))
    assert loss(apart(), batch) > loss(apart(), batch, distill=0.0)


def test_distillation_leaves_new_classes_alone() -> None:
    new, old = mixed_batch(only_old=False), mixed_batch(only_old=True)
    assert torch.equal(loss(apart(), new, distill=9.0), loss(apart(), new, distill=0.0))
    assert loss(apart(), old, distill=9.0) > loss(apart(), old, distill=0.0)


def test_the_teacher_learns_nothing() -> None:
    nets = apart()
    client().loss(nets, mixed_batch(), given()).backward()
    assert all(p.grad is None for p in nets["old"].parameters())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in nets["net"].parameters())


def test_there_is_no_teacher_in_the_first_task() -> None:
    for asked in run().of("train"):
        assert asked.fit is not None and asked.fit.trains == ("net",)
        assert asked.fit.load.keys() == ({"net", "old"} if asked.task else {"net"})
        assert (asked.message.old_weights == {}) == (asked.task == 0)


def test_the_teacher_is_the_network_of_the_last_task() -> None:
    for asked in run().later():
        assert asked.fit is not None
        assert equal(dict(asked.fit.load["old"]), run().models[asked.task - 1].weights)


def test_images_weigh_one_on_average() -> None:
    labels = mixed().pool.labels
    assert given().weight.tolist() == [1.0] * 6
    for balance in (0.3, 1.0):
        weight = given(balance=balance).weight
        assert weight[labels].mean().item() == pytest.approx(1.0, rel=1e-5)
        assert len(weight[labels].unique()) > 1


def test_with_full_balance_all_classes_at_hand_weigh_alike() -> None:
    counts = torch.bincount(mixed().pool.labels, minlength=6)
    weight = (given(balance=1.0).weight * counts)[counts > 0]
    assert torch.allclose(weight, weight[0].expand_as(weight)) and len(counts[counts > 0].unique()) > 1


def test_the_loss_is_told_what_is_old_and_what_is_held() -> None:
    for asked in run().of("train"):
        assert asked.fit is not None
        told: Given = asked.fit.given
        assert told.old.tolist() == [j in asked.data.task.old for j in range(6)]
        assert told.held.tolist() == [j in asked.pool.labels.tolist() for j in range(6)]
        assert torch.equal(told.centroids, asked.message.centroids)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_weightless_made_up_images_change_nothing(weight: float) -> None:
    batch, nets = mixed_batch(made_weight=weight), apart()
    dark = torch.where(batch.extra["made"][:, None, None, None], 0.0, batch.images)
    changed = replace(batch, images=dark)
    assert torch.equal(loss(nets, batch), loss(nets, changed)) == (weight == 0.0)


def test_made_up_images_weigh_what_is_set_or_as_much_as_there_is_to_make_up() -> None:
    shares = set()
    for weight in (0.3, 0.0):
        for asked in run(made_weight=weight).later():
            share = len(set(asked.pool.labels[asked.made].tolist())) / len(asked.data.task.old)
            expected = torch.where(asked.made, weight or share, 1.0)
            assert torch.equal(asked.pool.extra["weight"], expected)
            shares.add(share)
    assert len(shares) > 1 and all(0.0 < share < 1.0 for share in shares)


@pytest.mark.parametrize(
    "settings",
    [{"contrast": 0.0}, {"calibrate": 1.0}, {"balance": 1.0}, {"made_weight": 0.1}, {"lifelike": 1.0}],
    ids=str,
)
def test_these_knobs_move_a_run(settings: dict[str, Any]) -> None:
    other = run(**settings, tasks=2)
    assert all(tensor.isfinite().all() for tensor in flatten(other.models[-1]).values())
    assert not equal(other.models[-1].weights, run(tasks=2).models[-1].weights)


# -- centroids and classification -------------------------------------------------------------------------------------


def test_old_centroids_stay_to_the_bit_and_new_ones_are_placed_apart() -> None:
    models = run().models
    for task, model in enumerate(models):
        seen = 2 * task + 2
        assert model.seen.tolist() == [j < seen for j in range(6)]
        assert (model.centroids[:seen].norm(dim=1) > 0).all() and (model.centroids[seen:] == 0).all()
        assert apart_from_each_other(model.centroids[:seen]).min() >= 0.9 * REST * 5.0
        for later in models[task:]:
            assert torch.equal(later.centroids[:seen], model.centroids[:seen])


def test_classification_is_by_the_nearest_centroid_of_the_classes_seen() -> None:
    parts, votes = run().parts, set()
    images = torch.cat([parts.scenario.test(t)[0] for t in parts.scenario.tasks])
    for task, model in enumerate(run().models):
        codes = codes_of(encoder(run(), model.weights), images)
        found = parts.engine.classify(model, images)
        assert torch.equal(found, nearest(codes, model.centroids, model.seen).argmax(1))
        assert torch.equal(found, distances(codes, model.centroids[: 2 * task + 2]).argmin(1))
        votes |= set(found.tolist())
    assert len(votes) > 1


# -- other codecs -----------------------------------------------------------------------------------------------------


def test_cosines_alone_run_through_two_tasks() -> None:
    plain, rotated = run(codec="dct", tasks=2), run(tasks=2)
    assert plain.models[0].codec.keys() < rotated.models[0].codec.keys(), "it has no rotations"
    assert all(tensor.isfinite().all() for tensor in flatten(plain.models[-1]).values())
    one, other = plain.task_lines[0]["measured"]["psnr"], rotated.task_lines[0]["measured"]["psnr"]
    assert 10 < one < other, "rotations are worth their while"
    kept = [codes for memory in plain.memories[-1].values() for codes in memory.codes.values()]
    assert kept and all(codes.shape[1:] == (SIZE,) for codes in kept)


def test_files_need_no_fit_and_make_nothing_up() -> None:
    files = run(codec="webp", code_bytes=64, tasks=2)
    assert files.of("measure") == [] and all(model.codec == model.means == {} for model in files.models)
    assert not any(asked.made.any() for asked in files.of("train"))
    decoded = 0
    for asked in files.later():
        assert set(asked.pool.labels.tolist()) == {*asked.data.classes(), *asked.memory.codes}
        for j, codes in asked.memory.codes.items():
            assert codes.shape[1:] == (64,)
            assert torch.equal(asked.pool.images[asked.pool.labels == j], files.codec.decode({}, codes))
            decoded += len(codes)
    assert decoded > 0 and look(files, 0, (0, 1, 2, 3)).made == {}


LEARNING = {"codec": "autoencoder", "codec_rounds": 6, "steps": 16, "tasks": 2}


def learned() -> Run:
    return run(**LEARNING)


def test_a_learned_codec_learns_in_rounds_of_its_own_before_the_first_task() -> None:
    rounds = [line for line in learned().lines if line["kind"] == "round"]
    stages = [(line["task"], line["stage"]) for line in rounds]
    assert stages == [(0, "codec")] * 6 + [(0, "train")] * 2 + [(1, "train")] * 2
    losses = [line["loss"] for line in rounds[:6]]
    assert max(losses[-2:]) < 0.7 * losses[0] and losses[0] == max(losses)
    assert learned().of("measure") == [] and len(learned().of("train_codec")) == 6 * 2


@pytest.mark.parametrize("how", [{"benchmark": replace(SKEWED, lost=1.0)}, {"benchmark": FEW, "active": 1}])
def test_a_learned_codec_survives_rounds_in_which_nobody_has_an_image(how: dict[str, Any]) -> None:
    assert len(run(codec="autoencoder", codec_rounds=6, tasks=2, **how).task_lines) == 2


def test_old_weights_are_sent_only_where_they_teach() -> None:
    for asked in run().asked:
        if isinstance(asked.message, Model):
            assert bool(asked.message.old_weights) == (asked.handler == "train" and asked.task > 0)


def test_a_learned_codec_is_averaged_and_then_fixed() -> None:
    trained = learned().of("train_codec")
    for earlier, later in ((r, r + 1) for r in range(5)):
        replies = [a.reply.weights for a in trained if a.round == earlier]
        sent = codec_in(next(a for a in trained if a.round == later).message)
        assert len(replies) == 2 and sent.keys() == replies[0].keys()
        assert all(torch.equal(sent[n], (replies[0][n] + replies[1][n]) / 2) for n in sent)
    first, *others = [codec_in(a.message) for a in learned().asked if a.handler != "train_codec"]
    assert not equal(first, codec_in(trained[-1].message))
    assert all(equal(first, other) for other in others) and equal(first, learned().models[-1].codec)


def test_the_loss_of_a_learned_codec_is_the_error_of_a_pixel() -> None:
    batch, net = mixed_batch(), learned().codec.net
    with torch.no_grad():
        by_hand = (net(batch.images) - batch.images).square().mean().item()
        assert hr.codec_loss({"codec": net}, batch, None).item() == pytest.approx(by_hand, rel=1e-5)


def test_a_learned_codec_codes_and_recalls() -> None:
    assert isinstance(learned().codec, LearnedCodec)
    compared = 0
    for asked in learned().later():
        for j, codes in asked.memory.codes.items():
            assert codes.dtype == torch.uint8 and codes.shape[1:] == (SIZE,)
            decoded = learned().codec.decode(asked.message.codec, codes)
            assert torch.equal(asked.pool.images[asked.pool.labels == j], decoded)
            compared += len(codes)
        own = len(asked.data.labels)
        assert torch.equal(asked.pool.images[:own], through(learned(), asked.data.images))
    assert compared > 0
    assert all(tensor.isfinite().all() for tensor in flatten(learned().models[-1]).values())


def outcome(folder: Path) -> tuple[list[Line], Weights]:
    lines = [{**line, "seconds": None} for line in read(folder / "ledger.jsonl")]
    return lines, read_tensors(folder / "model.safetensors")[0]


@pytest.mark.parametrize(
    ("settings", "stops"),
    [
        ({"codec": "autoencoder", "codec_rounds": 3, "tasks": 1}, (1, 2, 3)),  # amid its rounds and right after them
        ({"tasks": 1}, (1,)),  # the codec is not fitted a second time
    ],
    ids=["autoencoder", "klt"],
)
def test_a_run_stopped_while_the_codec_is_young_ends_the_same(
    settings: dict[str, Any], stops: tuple[int, ...], tmp_path: Path
) -> None:
    wanted = tiny_plan("hr", SKEWED, **{**QUICK, **settings})
    list(execute(wanted, tmp_path / "whole", "cpu", workers=1))
    lines, model = outcome(tmp_path / "whole")
    for stop in stops:
        folder = tmp_path / str(stop)
        begun = execute(wanted, folder, "cpu", every=0.0, workers=1)
        for _ in range(stop):
            next(begun)
        begun.close()  # type: ignore[attr-defined]
        left = list(execute(wanted, folder, "cpu", workers=1))
        assert len(left) < len(lines) - 1, "it started over"
        assert outcome(folder)[0] == lines and equal(outcome(folder)[1], model)


# -- adversity --------------------------------------------------------------------------------------------------------


def statistics_lost(who: int, task: int, question: str) -> bool:
    return question == "measure"


def one_client_unmeasured(who: int, task: int, question: str) -> bool:
    return question == "measure" and who == 1


def first_proposals_lost(who: int, task: int, question: str) -> bool:
    return question == "propose" and task == 0


def memory_unanswered(who: int, task: int, question: str) -> bool:
    return question == "remember" and task == 0


def test_where_all_statistics_are_lost_the_codec_is_that_of_images_in_general() -> None:
    blind = run(loses=statistics_lost, tasks=2)
    own = build("klt", (1, 8, 8), SIZE)
    assert isinstance(own, TransformCodec) and blind.of("measure") == []
    assert equal(blind.models[-1].codec, own.fitted(None)) and not equal(own.fitted(None), run().models[0].codec)
    assert all(memory.codes for memory in blind.memories[-1].values()) and len(blind.memories[-1]) == 4
    assert all(tensor.isfinite().all() for tensor in flatten(blind.models[-1]).values())
    assert 5 < blind.task_lines[0]["measured"]["psnr"] < run().task_lines[0]["measured"]["psnr"]


def test_a_client_that_was_not_measured_codes_all_the_same() -> None:
    partial = run(loses=one_client_unmeasured, tasks=2)
    own, asked = build("klt", (1, 8, 8), SIZE), partial.of("measure")
    assert isinstance(own, TransformCodec) and [a.client for a in asked] == [0, 2, 3]
    assert equal(partial.models[0].codec, own.fitted(own.statistics(torch.cat([a.data.images for a in asked]))))
    assert sum(how_many(partial.memories[0][1]).values()) == 20


def test_a_class_that_nobody_proposes_is_placed_and_learned_but_never_made_up() -> None:
    orphaned = run(loses=first_proposals_lost)
    for task, model in enumerate(orphaned.models):
        seen = model.centroids[: 2 * task + 2]
        assert seen.isfinite().all() and apart_from_each_other(seen).min() >= 0.9 * REST * 5.0
        assert model.means.keys() == model.deviations.keys() == set(range(2, 2 * task + 2))
    assert len(orphaned.of("train", 0)) == 4
    decoded, made = 0, 0
    for asked in orphaned.later():
        orphans = torch.isin(asked.pool.labels, torch.tensor([0, 1]))
        assert set(asked.pool.labels[orphans].tolist()) == set(asked.memory.codes) & {0, 1}
        assert not asked.made[orphans].any()
        decoded, made = decoded + int(orphans.sum()), made + int(asked.made.sum())
    assert decoded > 0 and made > 0


@cache
def few() -> Run:
    return run(benchmark=FEW)


def test_clients_with_no_image_or_one_take_part() -> None:
    sizes = {len(a.data.labels) for a in few().of("remember", 0)}
    assert {0, 1} <= sizes
    for asked in few().of("remember", 0):
        kept = few().memories[0].get(asked.client, Memory())
        assert sum(how_many(kept).values()) == len(asked.data.labels)
    for asked in few().of("train", 0):
        assert asked.reply.count == len(asked.data.labels)
    assert {a.reply.count for a in few().of("train", 0)} >= {0, 1}
    assert all(tensor.isfinite().all() for tensor in flatten(few().models[-1]).values())


def test_a_client_without_images_measures_nothing() -> None:
    empty = [a for a in few().of("measure") if len(a.data.labels) == 0]
    assert empty and all((total == 0).all() for a in empty for total in a.reply.sums.values())
    images = torch.cat([a.data.images for a in few().of("measure")])
    own = build("klt", (1, 8, 8), SIZE)
    assert isinstance(own, TransformCodec) and equal(few().models[0].codec, own.fitted(own.statistics(images)))


def holders_unmeasured(who: int, task: int, question: str) -> bool:
    return question == "measure" and bool(scenario(FEW).share(scenario(FEW).tasks[0])[who].sum())


def test_where_nobody_measured_has_an_image_the_codec_is_that_of_images_in_general() -> None:
    blind = run(benchmark=FEW, loses=holders_unmeasured, rounds=1, steps=1)
    own = build("klt", (1, 8, 8), SIZE)
    assert isinstance(own, TransformCodec) and blind.of("measure")
    assert equal(blind.models[-1].codec, own.fitted(None))


def test_a_memory_smaller_than_a_code_is_refused() -> None:
    sentence = "a client may keep 9 bytes and an exemplar takes 12; set a larger memory, or a smaller code_bytes"
    with pytest.raises(UserError, match=f"^{sentence}$"):
        assemble(tiny_plan("hr", SKEWED, memory=0.1), "cpu", scenario(SKEWED))
    for way_out in ({"memory": 0.2}, {"memory": 0.1, "code_bytes": 9}, {"memory": 0.1, "exemplars": "none"}):
        assert assemble(tiny_plan("hr", SKEWED, **way_out), "cpu", scenario(SKEWED)).server.state.codec == {}


def test_without_memory_nothing_is_kept_and_the_run_goes_on() -> None:
    bare = run(memory=0)
    assert all(memory.codes == {} for after in bare.memories for memory in after.values())
    assert [line["kept"] for line in bare.task_lines] == [0, 0, 0]
    assert all(set(a.pool.labels[a.made].tolist()) == set(a.data.task.old) for a in bare.later())


def test_a_code_larger_than_an_image_is_refused() -> None:
    sentence = "code_bytes=65 is not allowed; a code of an image of 1 channel and 8x8 pixels takes 1 to 64"
    with pytest.raises(UserError, match=f"^{sentence}"):
        assemble(tiny_plan("hr", SKEWED, code_bytes=65), "cpu", scenario(SKEWED))


def test_a_client_that_stays_behind_keeps_each_image_once() -> None:
    stayed = run(benchmark=replace(SKEWED, staying=1.0), memory_scope="client")
    task = stayed.parts.scenario.tasks[-1]
    for who, memory in stayed.memories[-1].items():
        held = stayed.parts.scenario.held(who, task)
        assert how_many(memory) == {j: n for j, n in enumerate(held) if n}
    for asked in stayed.later():
        replayed = asked.pool.labels[len(asked.data.labels) :].tolist()
        assert set(replayed).isdisjoint(asked.data.classes()), "what is at hand is not replayed beside itself"


# -- what the ledger says of the codec --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["klt", "autoencoder"])
def test_the_ledger_has_the_signal_to_noise_ratio_of_codes(kind: str) -> None:
    of = run() if kind == "klt" else learned()
    for task, line in enumerate(of.task_lines):
        images = torch.cat([a.data.images for a in of.of("remember", task)])
        off = (through(of, images).double() - images.double()).square().mean().item()
        assert len(images) == 80 and line["measured"].keys() == {"psnr", "lifelike", "least_lifelike"}
        assert line["measured"]["psnr"] == pytest.approx(20 * math.log10(255) - 10 * math.log10(off), abs=1e-3)
        assert of.models[task].error[1] == images.numel()


def test_there_is_nothing_to_measure_where_nobody_answers() -> None:
    silent = run(loses=memory_unanswered, tasks=2)
    first, second = (line["measured"]["psnr"] for line in silent.task_lines)
    assert first is None and second > 10 and silent.memories[0] == {}


def test_the_ledger_says_what_codes_lose_though_new_images_do_not_pass_the_codec() -> None:
    raw, decoded = (of.task_lines[0]["measured"]["psnr"] for of in (run(one_domain=False), run()))
    assert raw == decoded is not None


def test_there_is_no_noise_where_images_are_kept_as_they_are() -> None:
    assert [line["measured"]["psnr"] for line in run("hr-perfect").task_lines] == [None] * 3


# -- what it is for ---------------------------------------------------------------------------------------------------


@cache
def on_digits(method: str) -> tuple[Parts, Line]:
    settings = {"rounds": 5, "steps": 5}
    parts = assemble(plan(method, "digits", settings=settings), "cpu", scenario(BENCHMARKS["digits"]), workers=1)
    return parts, list(learn(parts.scenario, parts.server, parts.door, parts.engine))[-1]


def accuracy(line: Line) -> float:
    return 100 * sum(line["correct"]) / sum(line["total"])


def test_on_digits_it_remembers_what_fine_tuning_forgets_with_a_fifth_of_the_bytes_of_images() -> None:
    parts, line = on_digits("hr")
    assert accuracy(line) > 80 and accuracy(on_digits("finetune")[1]) < 35
    assert line["old"] > 80, "and old classes are not paid for by new ones"
    codes = [codes for memory in parts.transport.memories.values() for codes in memory.codes.values()]
    assert codes and all(code.shape[1] * 4 <= 64 for code in codes)
    assert line["kept_max"] <= parts.scenario.budget.per_client == 640


# -- pictures ---------------------------------------------------------------------------------------------------------


def look(of: Run, who: int, classes: tuple[int, ...], memory: Memory | None = None) -> Pictures:
    """What a client shows after the last task."""
    parts, task = of.parts, of.parts.scenario.tasks[-1]
    parts.scenario.begin(task)
    call = Call(0, task.index, parts.door.cursor.step, 0, 1)
    kept = of.memories[-1][who] if memory is None else memory
    return parts.engine.look(who, kept, parts.scenario.local(who, task), of.models[-1], call, classes)


@pytest.mark.parametrize("who", range(4))
def test_a_client_shows_decoded_codes_and_made_up_images(who: int) -> None:
    shown, memory, fitted = look(run(), who, tuple(range(6))), run().memories[-1][who], run().models[-1].codec
    data = run().parts.scenario.local(who, run().parts.scenario.tasks[-1])
    assert shown.kept.keys() == memory.codes.keys() and shown.real.keys() == set(data.classes())
    for j, image in shown.kept.items():
        assert torch.equal(image, run().codec.decode(fitted, memory.codes[j][:1])[0])
    for j, image in shown.real.items():
        assert torch.equal(image[None], data.of(j)[among(image[None], data.of(j))[0]])
        assert torch.equal(shown.kept[j], through(run(), image[None])[0]), "the kept image is the one shown"
    assert shown.made.keys() == set(range(6))
    every = [*shown.real.values(), *shown.kept.values(), *shown.made.values()]
    assert all(image.shape == (1, 8, 8) and image.dtype == torch.uint8 for image in every)


def test_a_client_shows_only_what_it_was_asked_for() -> None:
    shown = look(run(), 0, (0,))
    assert shown.made.keys() == {0} and shown.kept.keys() <= {0} and shown.real == {}


def test_perfect_exemplars_are_shown_as_they_are() -> None:
    perfect = run("hr-perfect")
    for who, memory in perfect.memories[-1].items():
        shown = look(perfect, who, tuple(range(6)))
        assert shown.kept and all(torch.equal(image, memory.codes[j][0]) for j, image in shown.kept.items())


def test_without_exemplars_only_made_up_images_are_shown() -> None:
    shown = look(run("hr-no-latents"), 0, tuple(range(6)), Memory())
    assert shown.kept == {} and shown.made.keys() == set(range(6))
    assert len(torch.stack(list(shown.made.values())).unique(dim=0)) == 6
