"""What is made up of classes that a client has no exemplar of: of which, how many, and how like the class it is."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fcil.blocks import made_up
from fcil.blocks.codec import build
from fcil.blocks.transform_codec import square
from fcil.records import ByClass
from fcil.scenario.tasks import LocalData, Task

WIDTH, LEADING = 60, torch.tensor([5, 0, 7, 9, 11, 13, 17, 19, 23, 29, 31, 37])
NONE = torch.zeros(0, dtype=torch.int64)


def numbers(count: int = 700, seed: int = 0, contrast: float = 0.5) -> Tensor:
    """Rows that vary together, each with a contrast of its own but for the first eight that lead."""
    draws = torch.Generator().manual_seed(seed)
    mix = torch.eye(WIDTH) + 0.15 * torch.randn(WIDTH, WIDTH, generator=draws)
    rows = torch.randn(count, WIDTH, generator=draws) @ mix
    gain = torch.exp(contrast * torch.randn(count, 1, generator=draws) - contrast**2)
    varied = torch.ones(WIDTH)
    varied[LEADING[:8]] = 0
    return torch.linspace(-1, 1, WIDTH) + rows * torch.where(varied > 0, gain, 1.0)


def told(rows: Tensor, leading: Tensor = LEADING, clients: int = 1) -> tuple[ByClass, ByClass, ByClass]:
    """The sums over clients that hold these rows of class 3 among them."""
    sums = [made_up.summed({3: own}, leading) for own in rows.tensor_split(clients)]
    firsts, seconds = ({3: torch.stack([one[i][3] for one in sums]).sum(0)} for i in (0, 1))
    return firsts, seconds, {3: torch.tensor(len(rows))}


def known(rows: Tensor, leading: Tensor = LEADING, clients: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
    means, deviations, roots = made_up.moments(*told(rows, leading, clients), leading, (2, 3))
    assert means.keys() == deviations.keys() == {3}, "of class 2 nobody told anything"
    return means[3], deviations[3], roots.get(3)


def draw(rows: Tensor, number: int, leading: Tensor = LEADING, seed: int = 1) -> Tensor:
    mean, deviation, root = known(rows, leading)
    roots = {} if root is None else {3: root}
    generator = torch.Generator().manual_seed(seed)
    return made_up.drawn({3: mean}, {3: deviation}, roots, leading, [3], number, generator)[3]


def contrast(rows: Tensor) -> Tensor:
    varied = [i for i in range(WIDTH) if i not in LEADING[:8].tolist()]
    return rows[:, varied].square().mean(1).log()


# -- what is told -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [2, 7, 700])
@pytest.mark.parametrize("leading", [LEADING, NONE])
def test_sums_over_clients_are_those_of_all_rows_pooled(clients: int, leading: Tensor) -> None:
    rows = numbers()
    shuffled = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(4))]
    for pooled, shared in zip(known(rows, leading), known(shuffled, leading, clients), strict=True):
        assert (pooled is None) == (shared is None) == (pooled is None and not len(leading))
        assert pooled is None or torch.allclose(pooled, shared, atol=1e-4)


def test_what_is_told_and_sent_is_so_many_numbers() -> None:
    firsts, seconds, _ = told(numbers())
    many = len(LEADING)
    assert firsts[3].shape == (WIDTH + 1,) and seconds[3].shape == (WIDTH + 1 + many * (many - 1) // 2,)
    _, _, root = known(numbers())
    assert root is not None and root.shape == (many * (many + 1) // 2,)


def test_with_nothing_that_leads_only_sums_and_squares_are_told_and_numbers_are_drawn_one_by_one() -> None:
    rows = numbers()
    firsts, seconds, _ = told(rows, NONE)
    assert torch.equal(firsts[3], rows.sum(0)) and torch.equal(seconds[3], rows.square().sum(0))
    mean, deviation, root = known(rows, NONE)
    z = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(1))
    assert root is None and torch.equal(draw(rows, 9, NONE), mean + deviation * z)


def test_mean_deviation_and_root_are_those_of_the_rows() -> None:
    rows = numbers()
    mean, deviation, root = known(rows)
    assert root is not None
    assert torch.allclose(mean[:-1], rows.mean(0), atol=1e-5)
    assert mean[-1].item() == pytest.approx(contrast(rows).mean().item(), rel=1e-4)
    assert torch.allclose(deviation[:-1], rows.std(0, correction=0), atol=1e-4)
    assert deviation[-1].item() == pytest.approx(contrast(rows).std(correction=0).item(), rel=1e-3)
    full = square(root, len(LEADING))
    covariance = torch.cov(rows[:, LEADING].T, correction=0)
    shrunk = torch.where(torch.eye(len(LEADING)) > 0, covariance, 0.9 * covariance)
    assert torch.allclose(full @ full, shrunk, atol=1e-3) and torch.equal(full, full.T)


def test_what_noise_has_made_impossible_is_drawn_all_the_same() -> None:
    firsts, seconds, counts = told(numbers(30))
    seconds = {3: seconds[3] + 40 * torch.randn(seconds[3].shape, generator=torch.Generator().manual_seed(2))}
    means, deviations, roots = made_up.moments(firsts, seconds, counts, LEADING, [3])
    made = made_up.drawn(means, deviations, roots, LEADING, [3], 50, torch.Generator())
    assert made[3].shape == (50, WIDTH) and made[3].isfinite().all()


# -- what is drawn ----------------------------------------------------------------------------------------------------


def test_drawn_rows_vary_together_as_the_class_does() -> None:
    rows, made = numbers(), draw(numbers(), 20_000)
    spread = rows.std(0, correction=0)
    assert ((made.mean(0) - rows.mean(0)).abs() < 6 * spread / 20_000**0.5).all()
    assert torch.allclose(made.std(0), spread, rtol=0.06)
    real, drawn, alone = (torch.corrcoef(x[:, LEADING].T) for x in (rows, made, draw(rows, 20_000, NONE)))
    assert torch.allclose(drawn, 0.9 * real + 0.1 * torch.eye(len(LEADING)), atol=0.05)
    apart = torch.eye(len(LEADING))
    assert (real - apart).abs().max() > 0.2 and torch.allclose(alone, apart, atol=0.04)


@pytest.mark.parametrize("amount", [0.0, 0.3, 0.6])
def test_drawn_rows_differ_in_contrast_as_the_class_does(amount: float) -> None:
    rows = numbers(4000, contrast=amount) - torch.linspace(-1, 1, WIDTH)  # of mean 0, contrast is spread alone
    real, made, alone = (contrast(x).std().item() for x in (rows, draw(rows, 4000), draw(rows, 4000, NONE)))
    assert abs(made - real) < 0.15 * real + 0.05
    assert amount == 0 or alone < real / 2


def test_a_class_that_is_known_from_before_by_less_is_drawn_number_by_number() -> None:
    rows = numbers()
    means, deviations, _ = made_up.moments(*told(rows, NONE), NONE, [3])
    made = made_up.drawn(means, deviations, {}, LEADING, [3], 9, torch.Generator().manual_seed(1))
    assert torch.equal(made[3], draw(rows, 9, NONE))


@pytest.mark.parametrize("width", [1, 4, 8, 9])
def test_codes_of_hardly_any_numbers_will_do(width: int) -> None:
    rows = numbers()[:, :width]
    leading = torch.arange(width)
    means, deviations, roots = made_up.moments(*told(rows, leading), leading, [3])
    made = made_up.drawn(means, deviations, roots, leading, [3], 500, torch.Generator().manual_seed(1))[3]
    assert made.shape == (500, width) and torch.allclose(made.std(0), rows.std(0), rtol=0.2)


def test_a_class_of_one_image_is_that_image() -> None:
    rows = numbers(1)
    assert torch.allclose(draw(rows, 5), rows.expand(5, -1), atol=1e-2)


# -- codecs -----------------------------------------------------------------------------------------------------------


def test_the_numbers_that_lead_are_those_with_most_spread() -> None:
    codec = build("klt", (1, 8, 8), 12)
    images = torch.randint(0, 256, (50, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    fitted = codec.fitted(codec.statistics(images))  # type: ignore[union-attr]
    first = made_up.leading(codec, fitted, 5)
    rest = [i for i in range(len(fitted["deviation"])) if i not in first.tolist()]
    assert len(first) == 5 and fitted["deviation"][first].min() >= fitted["deviation"][rest].max()
    assert len(made_up.leading(codec, fitted, 10_000)) == len(fitted["deviation"])
    assert len(made_up.leading(codec, fitted, 0)) == 0


@pytest.mark.parametrize("kind", ["autoencoder", "webp"])
def test_a_codec_that_orders_nothing_has_none_that_lead(kind: str) -> None:
    assert len(made_up.leading(build(kind, (3, 32, 32), 307), {}, 12)) == 0


def test_of_webp_nothing_is_known_and_nothing_is_made_up() -> None:
    codec = build("webp", (3, 32, 32), 307)
    assert made_up.numbers_of(codec, {}, {1: torch.zeros(2, 3, 32, 32, dtype=torch.uint8)}) == {}
    assert made_up.pictures_of(codec, {}, {1: torch.zeros(2, 9)}) == {}


# -- of which, and how many -------------------------------------------------------------------------------------------


def data(labels: list[int]) -> LocalData:
    images: Any = torch.zeros(len(labels), 1, 8, 8, dtype=torch.uint8)
    return LocalData(Task(2, ((0, 1), (2, 3), (4, 5))), images, torch.tensor(labels, dtype=torch.int64))


def test_absent_are_old_classes_with_neither_exemplars_nor_images() -> None:
    assert made_up.absent(data([4, 4, 2]), {0: torch.zeros(1)}) == [1, 3]
    assert made_up.absent(data([]), {}) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("kept", "labels", "number"), [([3, 6], [4], 4), ([], [4, 4, 4, 5], 2), ([1], [4] * 9, 1), ([], [], 0)]
)
def test_as_many_are_made_up_as_there_are_exemplars_of_a_class_or_images(
    kept: list[int], labels: list[int], number: int
) -> None:
    assert made_up.usual_number({j: torch.zeros(n, 12) for j, n in enumerate(kept)}, data(labels)) == number
