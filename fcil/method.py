"""What a method is: a script for the server, answers for the clients, and the records between them.

A method's file defines `Config`, its records, `Server`, `Client` and `METHOD = Method(Config, Server, Client, Memory)`.
This module is the frame as such a file sees it; networks, blocks and records are what it is built from.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, get_args, get_origin, get_type_hints, overload

import torch
from torch import Tensor, nn

from fcil.networks import (
    AutoEncoder,
    Classifier,
    Encoder,
    ProxyClassifier,
    build,
    build_autoencoder,
    build_encoder,
    build_with_proxies,
)
from fcil.records import ByClass, Weights, record
from fcil.scenario import benchmarks
from fcil.scenario.memory import Budget
from fcil.scenario.tasks import LocalData, Task

Down = TypeVar("Down")
Up = TypeVar("Up")
Up_co = TypeVar("Up_co", covariant=True)
Handler = TypeVar("Handler", bound=Callable[..., Any])
Answer = Callable[..., Any]  # a @remote method of a client
Nets = Mapping[str, Any]  # the networks of a client, by the names it gave them


# -- training is a value ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """Images (or features) with labels to draw batches from; uint8 images are scaled to 0..1 and augmented."""

    images: Tensor
    labels: Tensor
    augment: bool = True
    batch_size: int = 0  # images of this pool in a step; 0 is the protocol's number
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # more to know of each image, such as its neighbours

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Batch:
    """What a loss sees of the pools in one step."""

    images: Tensor  # float, 0..1
    labels: Tensor
    generator: torch.Generator  # for random draws inside the loss
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # the pool's, of these images
    beside: Mapping[str, Batch] = field(default_factory=dict)  # batches of the further pools, by name


Loss = Callable[[Nets, Batch, Any], Tensor]


@dataclass(frozen=True)
class Fit:
    """A local training, described and not done: the engine decides how to run it.

    `loss(nets, batch, given)` is a pure tensor function: no `.item()`, no `.tolist()`, no branch on values. What
    varies from message to message is in `given`, a tensor or a record of tensors whose shapes stay the same.
    """

    loss: Loss
    load: Mapping[str, Weights]  # network -> the weights it starts from
    trains: tuple[str, ...]  # networks that learn, or parts of them such as "net.head"; all others are frozen
    pool: Pool
    lr: float  # scaled over the rounds of a task by the protocol's schedule
    given: Any = None
    beside: Mapping[str, Pool] = field(
        default_factory=dict
    )  # further pools, each giving a batch of its own to every step
    steps: int = 0  # 0: the protocol's, counted by the pool's size where it speaks of epochs
    momentum: float | None = None  # None, here and below: the protocol's
    weight_decay: float | None = None
    new_share: float | None = None


@dataclass(frozen=True)
class Trained:
    """What came of a Fit."""

    networks: Mapping[str, Weights]  # the trained ones, by name
    count: int  # images in the pool; 0 when there was nothing to train on
    loss: Tensor  # mean over the steps

    @property
    def weights(self) -> Weights:
        """The weights of the only network that was trained."""
        (only,) = self.networks.values()
        return only


Training = Generator[Fit, Trained, Up]  # an answer that trains yields a Fit and is sent a Trained


# -- the door, as a method sees it ------------------------------------------------------------------------------------


def remote(handler: Handler) -> Handler:
    """Mark a client method as callable by the server; nothing else is."""
    handler.is_remote = True  # type: ignore[attr-defined]
    return handler


def answers(client: Callable[..., Any]) -> list[Answer]:
    """Return what a server may ask of a client."""
    return [found for found in vars(client).values() if getattr(found, "is_remote", False)]


def reply_type(handler: Callable[..., Any]) -> type:
    """Return the record that `handler` answers with, whether or not it trains on the way."""
    kind = get_type_hints(handler)["return"]
    reply: type = get_args(kind)[2] if get_origin(kind) is Generator else kind
    return reply


class Replies(Protocol[Up_co]):
    """The answers that came, in the order of the clients asked.

    They are computed when first looked at. Means and sums are taken as they come in, so iterate first where single
    replies are needed, too. Replies whose `count` is 0 had no images and are left out of both.
    """

    def mean(self, field: str) -> Any:
        """Average one field; integers are the first reply's; if nobody answered, what was sent stands."""

    def sum(self, field: str) -> Any:
        """Add one field up; None if nobody answered."""

    def __iter__(self) -> Iterator[Up_co]:
        """Yield single replies: a method that does this needs to see them, and excludes sums that are private."""
        ...

    def __len__(self) -> int:
        """Count the replies that came."""
        ...


class Clients(Protocol):
    """The one door between a server and its clients; it counts every byte that passes."""

    def sample(self) -> list[int]:
        """Return the clients of this round, from the scenario's seeded schedule: the same for every method."""
        ...

    def everyone(self) -> list[int]:
        """Return all clients present, for what must reach each memory."""
        ...

    def once(self, name: str) -> bool:
        """Tell whether this part of the task is still to be done; false when resuming after it."""
        ...

    def rounds(self, rounds: int = 0, stage: str = "train") -> Iterator[int]:
        """Count communication rounds, the protocol's number unless given; resumes at its own count."""
        ...

    @overload
    def ask(
        self, who: Sequence[int], handler: Callable[[Any, Any, LocalData, Down], Training[Up]], message: Down
    ) -> Replies[Up]: ...
    @overload
    def ask(
        self, who: Sequence[int], handler: Callable[[Any, Any, LocalData, Down], Up], message: Down
    ) -> Replies[Up]: ...
    def ask(self, who: Sequence[int], handler: Callable[..., Any], message: Any) -> Replies[Any]:
        """Send `message` to each client in `who`, run `handler` there, return the replies that come."""
        ...


# -- the two halves ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What both halves of a method are told of the experiment."""

    capacity: int  # classes that heads and tables have room for
    shape: tuple[int, int, int]  # channels, height, width
    protocol: benchmarks.Protocol
    budget: Budget  # bytes a client may keep
    network: str = "resnet18"
    augment: str = "none"
    norm: str = "batch"  # how the networks normalise
    device: str = "cpu"  # where a server computes that has something to compute
    seed: int = 0  # the run's: part of the key of all that a server draws

    def classifier(self, outputs: int = 1) -> Classifier:
        """Build the benchmark's network with a head for `capacity` classes, of so many outputs each."""
        return build(self.network, self.shape, outputs * self.capacity, self.norm)

    def proxy_classifier(self, proxies: int, cosine: bool = False) -> ProxyClassifier:
        """Build the benchmark's network with so many proxies a class in place of a linear head."""
        return build_with_proxies(self.network, self.shape, self.capacity, proxies, cosine, self.norm)

    def encoder(self, latent: int) -> Encoder:
        """Build an encoder with the body of the benchmark's network: images to `latent` numbers."""
        return build_encoder(self.network, self.shape, latent, self.norm)

    def autoencoder(self, latent: int, variational: bool, width: int = 0) -> AutoEncoder:
        """Build an autoencoder whose encoder has the body of the benchmark's network; width 0 is the body's own."""
        return build_autoencoder(self.network, self.shape, latent, variational, self.norm, width)


class Server(Protocol):
    """The server's half. It sees tasks and messages, never data; all that lasts is the record `state`.

    It may also have `measured(self) -> dict[str, float | None]`: what it found out about itself in the task that has
    just ended, computed from `state`; the ledger's task line holds it. And `look(self) -> ByClass`: a picture that it
    has of each class, uint8 (channels, height, width), which is drawn beside what a client's `look` shows. And
    `pages(self) -> dict[str, Tensor]`: other pictures, uint8 (rows, columns, channels, height, width) by name, each a
    file NAME.png in the run folder. And, on the class, `one_by_one(config) -> list[Answer]`: those whose
    replies it reads one by one, since means and sums are not enough: a run whose privacy is in the sums is refused
    before it begins.
    """

    state: Any

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:
        """Learn one task; yield after each communication round.

        After an interruption it is called anew with the state of its last yield: no local variable may live across a
        yield, and what must not happen twice stands under `if clients.once(...)`.
        """

    def broadcast(self) -> Any:
        """Return the message that holds all a device needs to train or to classify."""


class Client(Protocol):
    """A client's half: `networks`, `predict`, and any number of @remote answers `(memory, data, message) -> reply`.

    A client keeps nothing on `self` between calls but scratch networks: what must last is in `memory`, a record that an
    answer updates in place.

    It may also have `look(self, memory, data, message, classes) -> Pictures`, which no server can call: a simulation
    shows its user with it what the clients replay. For `fcil audit`, which no server can call either:

    - `exposed(self, memory, data, message) -> Exposed`: the exemplars of classes at hand as whoever has memory and
      broadcast sees them, row by row beside the images that they came from;
    - `overheard(self, memory, data, message) -> Exposed`: pictures that whoever hears the client's answers can make of
      them, beside all images that went into each;
    - `invented(self, message, number, generator) -> Tensor`: images made up from the broadcast alone, so many or fewer.
    """

    def networks(self) -> dict[str, nn.Module]:
        """Name the networks that a Fit may load and train."""
        ...

    def predict(self, message: Any, images: Tensor) -> Tensor:
        """Score every class for each image, (images, capacity), from the broadcast alone; the highest is the answer."""
        ...


@record
class Pictures:
    """An image of each class that a client can show: uint8 (channels, height, width)."""

    real: ByClass  # as it was taken
    kept: ByClass  # the same, as the client's memory gives it back
    made: ByClass  # made up, without any exemplar


@record
class Exposed:
    """Images of each class, and what can be made of what was kept or sent of them: uint8 (rows, channels, ...)."""

    real: ByClass
    rebuilt: ByClass
    drawn: bool = False  # whether `real` was found by repeating random draws, which differ from device to device


class Method(NamedTuple):
    """The four parts of a method's file."""

    config: Callable[..., Any]
    server: Callable[[Any, Setting], Server]
    client: Callable[[Any, Setting], Client]
    memory: Callable[[], Any]
