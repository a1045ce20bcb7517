"""The same runs on a GPU: deterministic there, resumable there, captured there, and as good as on the CPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fcil.blocks.inversion import LeNet, descended, gradients
from fcil.blocks.training import weights_of
from fcil.experiment import execute
from fcil.federation.calls import Call, Question
from fcil.federation.engine import Engine
from fcil.federation.loop import learn
from fcil.method import Batch, Fit, Method, Nets, Pool, Setting, Training, remote
from fcil.methods import METHODS
from fcil.networks.norm import kernels_work
from fcil.parts import Parts, assemble
from fcil.records import Nothing, Update, Weights, flatten, read_tensors, record
from fcil.results.runs import read_result
from fcil.scenario.benchmarks import Protocol
from fcil.scenario.memory import Budget
from fcil.scenario.tasks import LocalData, Task
from tests.conftest import tiny_plan

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("method", METHODS)
def test_a_run_on_the_gpu_is_deterministic_and_resumes(method: str, tmp_path: Path) -> None:
    wanted = tiny_plan(method)
    list(execute(wanted, tmp_path / "one", "cuda"))
    for number, _ in enumerate(lines := execute(wanted, tmp_path / "other", "cuda", every=0.0)):
        if number == 5:
            lines.close()
    list(execute(wanted, tmp_path / "other", "cuda"))
    one, other = (read_tensors(tmp_path / name / "model.safetensors")[0] for name in ("one", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_whole_run_lives_on_the_gpu() -> None:
    parts = assemble(tiny_plan("joint"), "cuda")
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        assert all(t.is_cuda for t in parts.server.state.weights.values())
    assert all(t.is_cuda for memory in parts.transport.memories.values() for t in memory.images.values())


def test_joint_training_is_as_good_as_on_the_cpu(tmp_path: Path) -> None:
    finals = []
    for device in ("cpu", "cuda"):
        list(execute(tiny_plan("joint", rounds=15, steps=10), tmp_path / device, device))
        finals.append(read_result(tmp_path / device)["final"])
    assert min(finals) > 90 and abs(finals[0] - finals[1]) < 5


# -- the captured way and the plain one -------------------------------------------------------------------------------


def learned(method: str, workers: int, eager: bool, **settings: object) -> tuple[Parts, Weights]:
    """Learn every task and return the server's state, as it is sent."""
    parts = assemble(tiny_plan(method, **settings), "cuda", workers=workers, eager=eager)
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        pass
    return parts, flatten(parts.server.state)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_and_overlapped_equals_the_plain_loop_to_the_bit(method: str, precision: str) -> None:
    """Five clients at a time; with epochs, so that clients of different sizes share a graph."""
    how = {"precision": precision, "steps": 0, "epochs": 2, "active": 4, "augment": "crop-flip"}
    way = METHODS[method].on_a_gpu  # of one that cannot be captured the first task is, which has no old model
    plain, expected = learned(method, 1, True, **how)
    for workers in (1, 3):
        parts, found = learned(method, workers, False, **how)
        assert parts.engine.described().partition("; ")[0] == f"{way}, {workers} at a time, {precision}"
        assert any(slot.graphs for slot in parts.engine.slots) and not plain.engine.slots[0].graphs
        different = [name for name in expected if not torch.equal(expected[name], found[name])]
        assert different == []


@pytest.mark.parametrize("method", ["joint", "hr-literal"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_group_normalisation_is_captured_to_the_bit_too(method: str, precision: str) -> None:
    how = {"norm": "group", "precision": precision, "steps": 0, "epochs": 2, "active": 4}
    _, expected = learned(method, 1, True, **how)
    parts, found = learned(method, 3, False, **how)
    assert parts.engine.described() == f"captured, 3 at a time, {precision}"
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.parametrize(
    "settings",
    [{"codec": "autoencoder", "codec_rounds": 2}, {"contrast": 0.0}, {"lifelike": 0.0}],
    ids=str,
)
def test_the_choices_of_hr_are_captured_to_the_bit_too(settings: dict[str, object]) -> None:
    how = {"precision": "bf16", "steps": 0, "epochs": 2, "active": 4, **settings}
    _, expected = learned("hr", 1, True, **how)
    parts, found = learned("hr", 3, False, **how)
    assert parts.engine.described().partition("; ")[0] == "captured, 3 at a time, bf16"
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert any(name.startswith("lifelike/") for name in found)


def test_a_server_that_replays_its_steps_computes_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, replayed = learned("fedftg", 1, False, iterations=4)
    assert any(step.graph is not None for step in parts.server.bench.recorded.values())  # type: ignore[attr-defined]
    monkeypatch.setattr("fcil.blocks.recorded.WARM_UP", 10**9)
    other, plain = learned("fedftg", 1, False, iterations=4)
    assert all(step.graph is None for step in other.server.bench.recorded.values())  # type: ignore[attr-defined]
    assert [name for name in plain if not torch.equal(plain[name], replayed[name])] == []


def test_a_search_that_is_recorded_goes_the_same_way() -> None:
    net = LeNet((3, 32, 32), 10).cuda()
    images, labels = torch.randn(3, 3, 32, 32, device="cuda"), torch.arange(3, device="cuda")
    sent, start = gradients(net, images, labels), torch.randn(3, 3, 32, 32, device="cuda").flatten(1)

    def off(flat: Tensor) -> Tensor:
        return (gradients(net, flat.view_as(images), labels) - sent).square().sum(1)

    nothing = torch.zeros(3, device="cuda")
    plain, recorded = (descended(off, start, nothing, 12, 20, 0.1, 3, record=record) for record in (False, True))
    assert torch.equal(plain, recorded) and (off(plain[-1]) < 0.5 * off(start)).all()


def test_a_graph_serves_all_rounds_and_clients_of_its_kind() -> None:
    parts, _ = learned("finetune", 2, False, rounds=6)
    assert [len(slot.graphs) for slot in parts.engine.slots] == [1, 1]


@record
class Sent:
    weights: Weights
    anchor: Tensor
    factor: float


class Pupil:
    """A client whose loss is what a test says."""

    loss: Any = None
    anew = False

    def __init__(self, config: object, setting: Setting):
        self.net = setting.classifier()

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net}

    def predict(self, message: Sent, images: Tensor) -> Tensor:
        raise NotImplementedError

    @remote
    def train(self, memory: Nothing, data: LocalData, message: Sent) -> Training[Update]:
        given, loss = Sent({}, message.anchor, message.factor), type(self).loss
        pool = Pool(data.images, data.labels, extra={"number": torch.arange(len(data.labels), device="cuda")})
        trained = yield Fit(
            (lambda *args: loss(*args)) if self.anew else loss, {"net": message.weights}, ("net",), pool, 0.1, given
        )
        return Update(trained.weights, trained.count)


def anchored(nets: Nets, batch: Batch, given: Sent) -> Tensor:
    penalty = (nets["net"].head.bias - given.anchor).square().sum() * given.factor
    return nn.functional.cross_entropy(nets["net"](batch.images), batch.labels) + penalty


def reading(nets: Nets, batch: Batch, given: Sent) -> Tensor:
    loss = anchored(nets, batch, given)
    return loss * 2 if loss.item() > 1e9 else loss


def waiting(nets: Nets, batch: Batch, given: Sent) -> Tensor:
    return anchored(nets, batch, given) + 0.0 * sum(batch.labels.tolist())


def masking(nets: Nets, batch: Batch, given: Sent) -> Tensor:
    return anchored(nets, batch, given) + nets["net"].head.bias[given.anchor > -1].sum()


def drawing(nets: Nets, batch: Batch, given: Sent) -> Tensor:
    return nn.functional.dropout(nets["net"](batch.images), 0.5).square().mean()


def trained(
    loss: Any, sizes: tuple[int, ...] = (40, 7), rounds: int = 1, eager: bool = False, anew: bool = False, **given: Any
) -> tuple[Engine, list[Weights]]:
    """Train clients that hold so many random images, in the slots of one engine."""
    kind = type("Pupil", (Pupil,), {"loss": staticmethod(loss), "anew": anew})
    setting = Setting(6, (1, 8, 8), Protocol(steps=0, epochs=2, batch_size=8), Budget(10**9, "fixed", 6), "small")
    engine = Engine(Method(object, object, kind, Nothing), None, setting, "cuda", 2, eager)  # type: ignore[arg-type]
    torch.manual_seed(0)
    start = {name: w.cuda() for name, w in weights_of(setting.classifier()).items()}
    found = []
    for number in range(rounds):
        questions = []
        for who, size in enumerate(sizes):
            generator = torch.Generator().manual_seed(who)
            images = torch.randint(0, 256, (size * (number + 1), 1, 8, 8), dtype=torch.uint8, generator=generator)
            labels = torch.randint(0, 6, (len(images),), generator=generator)
            data = LocalData(Task(0, ((0, 1, 2, 3, 4, 5),)), images.cuda(), labels.cuda())
            questions.append(Question(who, Nothing(), lambda data=data: data))
        anchor, factor = torch.full((6,), 1.0 + number), given.get("factor", 0.5) * (1 + number % 2)  # on the CPU
        message = Sent(start, anchor, factor)
        for answered in engine.answers(questions, kind.train, message, Call(0, 0, number + 1, number, rounds)):
            found.append(answered.reply.weights)
    return engine, found


def same(one: list[Weights], other: list[Weights]) -> bool:
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


def test_clients_of_any_size_and_what_a_message_brings_are_not_captured() -> None:
    """Buffers grow with the clients; `given` and its numbers are those of the message."""
    captured, found = trained(anchored, (40, 7, 1, 0), rounds=4)
    _, expected = trained(anchored, (40, 7, 1, 0), rounds=4, eager=True)
    assert same(found, expected) and not captured.why_eager
    _, other = trained(anchored, (40, 7, 1, 0), rounds=4, factor=2.0)
    assert not same(found, other)


@pytest.mark.parametrize(
    ("loss", "anew", "why"),
    [
        (reading, False, "reads a value"),
        (waiting, False, "reads a value|wait for the GPU"),
        (masking, False, "shape of a result depends on values"),
        (drawing, False, "without the batch's generator"),
        (anchored, True, "another one for every Fit"),
    ],
)
def test_a_loss_that_cannot_be_captured_runs_in_a_loop_and_the_engine_says_why(loss: Any, anew: bool, why: str) -> None:
    engine, found = trained(loss, rounds=2, anew=anew)
    again, once_more = trained(loss, rounds=2, anew=anew)
    assert re.search(why, engine.why_eager) and engine.described().startswith("eager")
    assert not any(slot.graphs for slot in engine.slots) and same(found, once_more)
    if loss is not drawing:
        assert same(found, trained(loss, rounds=2, eager=True, anew=anew)[1])
    assert again.why_eager == engine.why_eager


# -- kernels ----------------------------------------------------------------------------------------------------------


def test_the_kernels_work_here() -> None:
    pytest.importorskip("triton")
    assert kernels_work()


@pytest.mark.parametrize("shape", [(4, 16, 8), (3, 24, 5), (64, 64, 32), (64, 512, 4), (5, 70, 4)], ids=str)
@pytest.mark.parametrize(("slope", "beside"), [(0.0, False), (0.0, True), (0.2, False), (1.0, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_normalisation_equals_pytorchs(
    shape: tuple[int, int, int], slope: float, beside: bool, dtype: torch.dtype
) -> None:
    count, channels, side = shape
    fused = pytest.importorskip("fcil.networks.fused")
    norms = [nn.BatchNorm2d(channels).cuda() for _ in range(2)]
    generator = torch.Generator("cuda").manual_seed(0)
    x, residual, back = (
        torch.randn(count, channels, side, side, generator=generator, device="cuda").to(dtype) for _ in range(3)
    )
    x = 2 * x + 3
    found, expected = [], []
    for norm, results in zip(norms, (found, expected), strict=True):
        own, other = x.clone().requires_grad_(), residual.clone().requires_grad_()
        if results is found:
            y = fused.norm_act(norm, own, other if beside else None, slope)
        else:
            y = norm(own.float()) + (other.float() if beside else 0)
            y = torch.where(y > 0, y, slope * y).to(dtype)
        y.backward(back)
        norm.eval()
        with torch.no_grad():
            later = fused.norm_act(norm, x, None, slope) if results is found else norm(x.float())
        later = torch.where(later > 0, later, slope * later) if results is expected else later
        results += [y, later, own.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]
        results += [norm.num_batches_tracked, *([other.grad] if beside else [])]
    for one, other in zip(found, expected, strict=True):
        close = 1e-5 if dtype == torch.float32 else 2e-2
        assert torch.allclose(one.float(), other.float(), rtol=close, atol=close * float(other.detach().abs().max()))
