"""The engine: runs a client's answers, and its trainings, on this machine.

On the CPU an answer computes with one thread and draws from generators seeded by (run, client, step), so its bits do
not depend on where or beside whom it runs. On a GPU several clients answer at a time, a slot each: their trainings are
captured as CUDA graphs and overlap. A training that cannot be captured runs as a loop there, too, and the engine says
why. No method knows of any of this.
"""

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fcil.errors import UserError
from fcil.federation.calls import Answered, Call, Question
from fcil.federation.capture import Graph, kind
from fcil.federation.fitting import Networks, plainly, work
from fcil.federation.privacy import said
from fcil.federation.purity import Impure
from fcil.method import Client, Fit, Method, Pictures, Setting, Trained
from fcil.networks.norm import kernels_work
from fcil.records import flatten, size_in_bytes, unflatten
from fcil.scenario.benchmarks import Protocol
from fcil.scenario.reach import at_work
from fcil.scenario.tasks import LocalData
from fcil.seeds import seed_of

MOST_GRAPHS = 16  # kinds of training that a slot has graphs of
OVERLAP = 5  # clients that a GPU trains at a time, unless set


class Slot:
    """A client object with its scratch networks, its generator and the graphs of its trainings."""

    def __init__(self, client: Client, device: torch.device, coloured: bool):
        self.client, self.generator = client, torch.Generator(device)
        nets = {name: net.to(device) for name, net in client.networks().items()}
        if coloured or device.type == "cuda":
            nets = {name: net.to(memory_format=torch.channels_last) for name, net in nets.items()}  # type: ignore[call-overload]
        self.networks = Networks(nets)
        self.graphs: dict[Any, Graph] = {}


class Engine:
    """Answers for clients on one device, one or several at a time."""

    def __init__(
        self, method: Method, config: Any, setting: Setting, device: str = "cpu", at_once: int = 0, eager: bool = False
    ):
        self.setting, self.device, self.eager = setting, torch.device(device), eager or device == "cpu"
        if self.device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
            kernels_work()  # tried now: while a step is captured nothing else can be
        self.at_once = 1 if self.eager else at_once or OVERLAP
        self.why_eager = ""  # what kept a training from being captured
        self._impure: set[Any] = set()  # kinds of training for which that is known
        self._client = lambda: method.client(config, setting)
        self.slots = [self._slot()]

    @property
    def client(self) -> Client:
        """The client object of the first slot."""
        return self.slots[0].client

    @property
    def nets(self) -> Mapping[str, nn.Module]:
        """The networks of the first slot."""
        return self.slots[0].networks.nets

    def receive(self, message: Any) -> Any:
        """Bring a record or a tensor onto the device; on the CPU it is passed on as it is."""
        if self.device.type == "cpu" or message is None:
            return message
        if isinstance(message, Tensor):
            return message.to(self.device)
        return unflatten(type(message), {name: tensor.to(self.device) for name, tensor in flatten(message).items()})

    def answers(
        self, questions: Sequence[Question], handler: Callable[..., Any], message: Any, call: Call
    ) -> Iterator[Answered]:
        """Let clients answer, as many at a time as there are slots; their order is that of the questions."""
        if self.eager:
            for asked in questions:
                yield self.answer(asked.who, handler, asked.memory, asked.data(), message, call)
            return
        for first in range(0, len(questions), self.at_once):
            yield from self._together(questions[first : first + self.at_once], handler, message, call)

    def answer(
        self, who: int, handler: Callable[..., Any], memory: Any, data: LocalData, message: Any, call: Call
    ) -> Answered:
        """Let one client answer; where it trains, do what it describes."""
        if not self.eager:
            return next(self._together([Question(who, memory, lambda: data)], handler, message, call))
        with threads(1), seeded(call.seed, who, call.step, "stray"):
            answer = Answer(self.slots[0], who, handler, memory, data, message, call)
            while answer.fit is not None:
                with at_work(f"client {who}"):
                    trained = self.fit(answer.fit, call, answer.generator)
                answer.go_on(trained)
        return answer.answered(self.setting.protocol)

    def fit(self, fit: Fit, call: Call, generator: torch.Generator, slot: Slot | None = None) -> Trained:
        """Do a local training as a loop."""
        networks = (slot or self.slots[0]).networks
        if len(fit.pool) == 0:
            networks.load(fit)
            return networks.untrained(fit)
        todo, given = work(fit, self.setting.protocol, call), self.receive(fit.given)
        return plainly(networks, todo, self.setting.augment, generator, given, self.precision)

    def precision(self) -> AbstractContextManager[Any]:
        """Return the arithmetic that trainings compute in."""
        if self.device.type == "cpu" or self.setting.protocol.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def described(self, at_once: int = 0) -> str:
        """Say in words how clients are trained here, `at_once` of them where others help."""
        arithmetic = "bf16" if isinstance(self.precision(), torch.autocast) else "fp32"
        how = "captured" if not self.eager and not self.why_eager else "eager"
        why = f"; {self.why_eager}" if self.why_eager else ""
        return f"{how}, {at_once or self.at_once} at a time, {arithmetic}{why}"

    def look(
        self, who: int, memory: Any, data: LocalData, message: Any, call: Call, classes: tuple[int, ...]
    ) -> Pictures:
        """Return what a client that can show its memory shows of some classes; nothing of it leaves the machine."""
        with threads(1), at_work(f"client {who}"):
            mine = seeded_data(data, self.slots[0].generator, who, call)
            seen: Pictures = self.client.look(memory, mine, message, classes)  # type: ignore[attr-defined]
        return seen

    def classify(self, message: Any, images: Tensor) -> Tensor:
        """Return the class of each image, from the broadcast alone."""
        return self.scores(message, images).argmax(1)

    def scores(self, message: Any, images: Tensor) -> Tensor:
        """Return the score of every class for each image, from the broadcast alone, with all cores."""
        message = self.receive(message)
        pixels = 2**17 if self.device.type == "cpu" else 2**20  # at once: keeps activations in hundreds of megabytes
        batch_size = min(1000, max(1, pixels // (images.shape[-1] * images.shape[-2])))
        with threads(cores()), torch.inference_mode(), at_work("a model"):
            parts = [self.client.predict(message, part.to(self.device)) for part in torch.split(images, batch_size)]
        return torch.cat(parts)

    def settle(self) -> None:
        """Wait until everything that was asked for is computed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _slot(self) -> Slot:
        with seeded("client"):  # all alike
            return Slot(self._client(), self.device, self.setting.shape[0] > 1)  # type: ignore[no-untyped-call]

    def _together(
        self, questions: Sequence[Question], handler: Callable[..., Any], message: Any, call: Call
    ) -> Iterator[Answered]:
        self.slots += [self._slot() for _ in range(len(questions) - len(self.slots))]
        with threads(1):
            answers = []
            for slot, asked in zip(self.slots, questions, strict=False):
                with seeded(call.seed, asked.who, call.step, "stray"):
                    answers.append(Answer(slot, asked.who, handler, asked.memory, asked.data(), message, call))
            while waiting := [answer for answer in answers if answer.fit is not None]:
                for answer, trained in zip(waiting, self._overlapped(waiting, call), strict=True):
                    with seeded(call.seed, answer.who, call.step, "stray", answer.trainings):
                        answer.go_on(trained)
        for answer in answers:
            yield answer.answered(self.setting.protocol)

    def _overlapped(self, waiting: "list[Answer]", call: Call) -> list[Trained]:
        """Do one training of each, all at a time where they can be captured."""
        graphs = []
        for answer in waiting:
            with at_work(f"client {answer.who}"):
                graphs.append(self._graph(answer, call))
        for step in range(max((graph.todo.steps for graph in graphs if graph), default=0)):
            for graph in graphs:
                if graph and step < graph.todo.steps:
                    graph.launch()
        results = []
        for answer, graph in zip(waiting, graphs, strict=True):
            if graph:
                results.append(graph.trained())
            else:
                stray = seeded(call.seed, answer.who, call.step, "stray", "loop", answer.trainings)
                with stray, at_work(f"client {answer.who}"):
                    results.append(self.fit(answer.asked_fit, call, answer.generator, answer.slot))
        return results

    def _graph(self, answer: "Answer", call: Call) -> Graph | None:
        """Return the graph of a training with everything in its buffers, or None where there can be none."""
        slot, fit = answer.slot, answer.asked_fit
        if len(fit.pool) == 0:
            return None
        fit = replace(fit, given=self.receive(fit.given))
        todo, state, key = work(fit, self.setting.protocol, call), slot.generator.get_state(), None
        try:
            key = kind(todo, slot.client)
            if key in self._impure:
                return None
            graph = slot.graphs.get(key)
            if graph is None or not graph.fits(todo):
                slot.graphs.pop(key, None)
                graph = Graph(slot.networks, todo, self.setting.augment, slot.generator, self.precision)
                slot.graphs[key] = graph
                if len(slot.graphs) > MOST_GRAPHS:
                    del slot.graphs[next(iter(slot.graphs))]
        except torch.OutOfMemoryError:
            raise
        except (Impure, RuntimeError) as why:  # the loop will do, or say what is wrong
            self._impure.add(key)
            self.why_eager = f"a loss cannot be captured: {(str(why) or repr(why)).splitlines()[0]}"
            return None
        finally:
            slot.generator.set_state(state)
        graph.begin(todo)
        return graph


class Answer:
    """A client's answer while it is being given: it stops wherever it asks for a training."""

    def __init__(
        self, slot: Slot, who: int, handler: Callable[..., Any], memory: Any, data: LocalData, message: Any, call: Call
    ):
        self.slot, self.who, self.handler, self.memory, self.call = slot, who, handler, memory, call
        self.generator, self.trainings, self.images = slot.generator, 0, 0
        self.loss: float | Tensor = float("nan")
        self.fit: Fit | None = None  # what it waits for
        data = seeded_data(data, slot.generator, who, call)
        with at_work(f"client {who}"):
            self.reply = handler(slot.client, memory, data, message)
        if isinstance(self.reply, Generator):
            self._running = self.reply
            self._resume(lambda: next(self._running))

    @property
    def asked_fit(self) -> Fit:
        """The training it waits for."""
        assert self.fit is not None
        return self.fit

    def go_on(self, trained: Trained) -> None:
        """Give it what came of the training it waits for."""
        self.trainings += 1
        if trained.count:
            self.images, self.loss = self.images + trained.count, trained.loss
        self._resume(lambda: self._running.send(trained))

    def answered(self, protocol: Protocol) -> Answered:
        """Return the finished answer, as it may leave the client."""
        if not is_dataclass(self.reply):
            raise UserError(
                f"{self.handler.__qualname__} answers with a {type(self.reply).__name__}; it must be a record"
            )
        reply = said(self.reply, protocol, self.call.seed, self.who, self.call.step)
        return Answered(reply, size_in_bytes(self.memory), self.loss, self.images)

    def _resume(self, step: Callable[[], Fit]) -> None:
        try:
            with at_work(f"client {self.who}"):
                self.fit = step()
        except StopIteration as end:
            self.fit, self.reply = None, end.value


def seeded_data(data: LocalData, generator: torch.Generator, who: int, call: Call) -> LocalData:
    """Return the data of a client with what this answer draws from."""
    generator.manual_seed(seed_of(call.seed, who, call.step))
    cache_seed, own_seed = seed_of(call.seed, who, "cache", call.task), seed_of(call.seed, who, "own")
    return replace(data, generator=generator, cache_seed=cache_seed, own_seed=own_seed)


def cores() -> int:
    """Return how many cores this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with `count` threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def seeded(*key: int | str) -> Iterator[None]:
    """Seed what draws from the global generators, such as initial weights or dropout, and leave the CPU's as it was."""
    everyones, seed = torch.default_generator, seed_of(*key)
    before = everyones.get_state()
    everyones.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        everyones.set_state(before)
