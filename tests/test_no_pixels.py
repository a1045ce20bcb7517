"""Methods that call themselves data-free send and store nothing that is a real image, however scaled.

Every tensor that a client sends or keeps, and that is at least as large as an image, is read in order. No piece of it
of an image's size, wherever it begins, may correlate by more than 0.95 with an image that the client holds or has held.
That a leak would be seen is tested with leaks.
"""

import math
from collections.abc import Callable, Generator, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor

from fcil.federation.engine import threads
from fcil.methods import METHODS, fedftg
from fcil.records import Weights, flatten
from fcil.scenario.tasks import mask
from tests.conftest import TINY, tiny_plan
from tests.test_every_method import Seen, Watching, lines_of, parts_of, tiny_scenario

ALIKE = 0.95
BLOCK = 2**14  # numbers that are compared at a time, of a large tensor
LARGE = 512  # numbers in an image from which on a Fourier transform is faster than products
SHORT: dict[str, dict[str, int]] = {"fedftg": {"iterations": 1}, "fedftg-plain": {"iterations": 1}}  # what need not run
DATA_FREE = [name for name, entry in METHODS.items() if entry.family == "data-free"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


def directions(rows: Tensor) -> Tensor:
    """Centre each row and scale it to length one; one that is flat has no direction and becomes 0."""
    rows = rows.double()
    rows = rows - rows.mean(1, keepdim=True)
    length = rows.norm(dim=1, keepdim=True)
    return torch.where(length > 1e-9 * math.sqrt(rows.shape[1]), rows / length.clamp_min(1e-300), 0.0)


def by_products(block: Tensor, wanted: Tensor) -> Tensor:
    """Return the correlation of each piece of a line of numbers with each of these directions: (pieces, wanted)."""
    return directions(block.unfold(0, wanted.shape[1], 1)).float() @ wanted.T.float()


def by_transform(block: Tensor, wanted: Tensor) -> Tensor:
    """The same for many pieces at once; those that rounding could hide beside larger numbers are compared as above."""
    (size, count), block = (wanted.shape[1], len(block)), block - block.mean()
    products = torch.fft.irfft(torch.fft.rfft(block) * torch.fft.rfft(wanted, count).conj(), count)
    running = torch.cat([torch.zeros(2, 1), torch.stack([block, block.square()]).cumsum(1)], 1)
    sums, squares = running[:, size:] - running[:, :-size]
    energy = squares - sums.square() / size  # of each piece around its own mean
    found = products[:, : len(energy)].T / energy.clamp_min(1e-300).sqrt()[:, None]
    faint = energy < 1e-9 * block.square().sum()
    found[faint] = directions(block.unfold(0, size, 1)[faint]) @ wanted.T
    return found.float()


def likeness(tensor: Tensor, images: Tensor) -> float:
    """Return the largest correlation, of either sign, of a piece of `tensor` with one of the images."""
    size = math.prod(images.shape[1:])
    if tensor.numel() < size or not len(images) or tensor.dtype == torch.bool:
        return 0.0
    orders = torch.cat([images.flatten(1), images.permute(0, 2, 3, 1).flatten(1)])  # channels first, and last
    wanted, flat = directions(orders.unique(dim=0)), tensor.detach().flatten().cpu().double().nan_to_num(0.0, 0.0, 0.0)
    compare = by_products if size < LARGE else by_transform
    length = max(BLOCK, 2 * size)
    blocks = [flat[i : i + length] for i in range(0, len(flat) - size + 1, length - size + 1)]
    return max(float(compare(block, wanted).abs().max()) for block in blocks)


def leaks(flat: Weights, images: Tensor) -> list[str]:
    return [name for name, tensor in flat.items() if likeness(tensor, images) > ALIKE]


def leaks_of(seen: list[Seen]) -> list[str]:
    """Name all that clients sent or stored that is an image which they hold or have held."""
    found, held = [], dict[int, Tensor]()
    for answer in seen:
        before = held.get(answer.client, answer.images[:0])
        held[answer.client] = torch.cat([before, answer.images]).unique(dim=0)
        sent = leaks(flatten(answer.reply), held[answer.client])
        kept = leaks(flatten(answer.memory), held[answer.client]) if answer.memory is not None else []
        found += [f"{answer.handler} sends {name}" for name in sent] + [f"{answer.handler} keeps {n}" for n in kept]
    return found


def observed(method: str) -> list[Seen]:
    parts = parts_of(tiny_plan(method, TINY, rounds=2, steps=2, **SHORT.get(method, {})), Watching)
    lines_of(parts)
    seen: list[Seen] = parts.transport.seen  # type: ignore[attr-defined]
    assert seen and any(len(answer.images) for answer in seen)
    return seen


@pytest.mark.parametrize("method", DATA_FREE)
def test_nothing_sent_or_stored_is_an_image(method: str) -> None:
    assert leaks_of(observed(method)) == []


# -- the guard is awake ------------------------------------------------------------------------------------------------


def some_images() -> Tensor:
    return tiny_scenario().dataset.train_images[:20]


DISGUISES: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda image: image,
    "scaled and shifted": lambda image: 0.003 * image.float() - 7.0,
    "negative": lambda image: 255 - image.float(),
    "rounded": lambda image: (image.float() / 40).round().half(),
    "first of a larger tensor": lambda image: torch.cat([image.float().flatten() / 9, torch.randn(100)]),
    "last of a larger tensor": lambda image: torch.cat([torch.randn(101), image.float().flatten() / 9]),
    "among others": lambda image: torch.cat([torch.randn(128), image.float().flatten(), torch.randn(640)]).view(-1, 16),
    "at an odd place": lambda image: torch.cat([torch.randn(37), image.float().flatten() / 9, torch.randn(52)]),
    "one number from a border": lambda image: torch.cat([torch.randn(65), image.flatten() / -9.0, torch.randn(700)]),
    "beyond a block": lambda image: torch.cat([torch.randn(19001), image.flatten() / 9.0, torch.randn(3)]).view(4, -1),
    "across two blocks": lambda image: torch.cat([torch.randn(BLOCK - 9), image.flatten() / 9.0, torch.randn(600)]),
    "among much larger numbers": lambda image: torch.cat(
        [1e6 * torch.randn(37), image.flatten() / 9.0, 1e6 * torch.randn(9)]
    ),
    "beside no number": lambda image: torch.cat(
        [torch.tensor([math.nan, math.inf, 0.0]), image.flatten() / 9.0, torch.zeros(9)]
    ),
    "under some noise": lambda image: image.float() + 4 * torch.randn(image.shape),
}


@pytest.mark.parametrize("how", DISGUISES)
def test_an_image_is_found(how: str) -> None:
    torch.manual_seed(0)
    assert leaks({"a": DISGUISES[how](some_images()[3])}, some_images()) == ["a"]


def test_an_image_of_colours_is_found_in_either_order() -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (5, 3, 6, 6), dtype=torch.uint8)
    assert leaks({"a": images[2] * 2.0 + 1, "b": images[2].permute(1, 2, 0) * 0.1}, images) == ["a", "b"]


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_a_large_image_is_found_in_a_large_tensor(scale: float) -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    hidden = torch.randn(2 * BLOCK + 1234, dtype=torch.float64)
    assert leaks({"a": hidden}, images) == []
    hidden[15001 : 15001 + 3072] = scale * images[2].permute(1, 2, 0).flatten() - 3
    assert leaks({"a": hidden}, images) == ["a"]


def test_both_ways_to_compare_agree() -> None:
    torch.manual_seed(0)
    block, wanted = torch.randn(500, dtype=torch.float64) + 50, directions(torch.randn(7, 64))
    block[100:180] = 50.0
    block[300:370] = 50 + 1e-6 * torch.randn(70)
    assert (by_products(block, wanted) - by_transform(block, wanted)).abs().max() < 1e-6


def test_what_is_no_image_is_let_pass() -> None:
    torch.manual_seed(0)
    images = some_images()
    harmless = {
        "noise": torch.randn(300, 64), "flat": torch.full((128,), 3.0), "small": images[0].flatten()[:60],
        "mean": images.float().mean(0), "blend": images[:6].float().mean(0) + 60 * torch.randn(1, 8, 8),
        "counts": torch.arange(10), "mask": torch.ones(100, dtype=torch.bool),
    }  # fmt: skip
    assert leaks(harmless, images[8:]) == []
    assert leaks({"a": images[3]}, images[:0]) == [], "a client without images has none to give away"


def planted(leak: Callable[[Any, Any, Any], None]) -> Callable[..., Any]:
    """Let a client of FedFTG train as it does, and then do something that it must not."""
    train = fedftg.Client.train

    @wraps(train)
    def leaking(self: Any, memory: Any, data: Any, message: Any) -> Generator[Any, Any, Any]:
        reply = yield from train(self, memory, data, message)
        if len(data.images):
            leak(memory, data, reply)
        return reply

    return leaking


def into_weights(memory: Any, data: Any, reply: Any) -> None:
    reply.weights["head.weight"].view(-1)[64:128] = data.images[0].float().flatten() * 0.01 - 0.3


def into_counts(memory: Any, data: Any, reply: Any) -> None:
    reply.counts = data.images[-1].flatten().long()


@pytest.mark.parametrize(
    ("leak", "name"), [(into_weights, "train sends weights/head.weight"), (into_counts, "train sends counts")]
)
def test_a_client_that_sends_an_image_is_caught(
    leak: Callable[..., None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedftg.Client, "train", planted(leak))
    parts = parts_of(tiny_plan("fedftg", TINY, rounds=1, steps=1), Watching)
    server: Any = parts.server
    server.state.seen = mask(parts.scenario.tasks[0].seen, parts.setting.capacity)
    parts.door.begin(parts.scenario.tasks[0])
    assert len(list(parts.door.ask([0, 1], fedftg.Client.train, server.broadcast()))) == 2
    assert set(leaks_of(parts.transport.seen)) == {name}  # type: ignore[attr-defined]


def test_a_client_that_keeps_an_image_is_caught() -> None:
    """By a method that does: iCaRL calls itself none of these."""
    found = leaks_of(observed("icarl"))
    assert {line for line in found if "keeps" in line} and all("exemplars" in line for line in found if "keeps" in line)
