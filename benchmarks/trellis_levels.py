"""The levels and errors of fcil/blocks/trellis.py: what is best for numbers of a given density.

`python benchmarks/trellis_levels.py` prints them for the density exp(-|x|^1.3). It draws numbers, rounds them along
paths, moves each level to the mean of what it stands for, and does so again: a quarter of an hour on one core. Another
exponent may be given; 1 is Laplace, 2 is Gauss.
"""

import sys

import torch

from fcil.blocks import trellis
from fcil.blocks.levels import MOST_BITS, book

LISTED, ROUNDS, PATHS = 4, 40, 20_000


def draws(exponent: float) -> torch.Tensor:
    """Return rows of numbers of variance 1 with the density exp(-|x|^exponent)."""
    torch.manual_seed(0)
    size = torch.distributions.Gamma(1 / exponent, 1.0).sample((PATHS, trellis.STEPS)) ** (1 / exponent)
    x = torch.where(torch.rand(size.shape) < 0.5, size, -size)
    return x / x.std()


def rounded(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return which level stands for each number."""
    found, lost = trellis._nearest(x, levels)
    hands = trellis.hands_of(trellis._side_by_side(trellis.path(trellis._in_paths(lost)), *x.shape))
    return trellis.HANDS * found.gather(2, hands[..., None])[..., 0] + hands


def trained(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, float]:
    """Return levels, and the error that they leave."""
    levels = book(bits + 1)[0]
    for _ in range(ROUNDS if bits <= LISTED else 0):
        own = rounded(x, levels).flatten()
        sums = torch.zeros_like(levels).index_add_(0, own, x.flatten())
        means = sums / torch.bincount(own, minlength=len(levels)).clamp_min(1)
        levels = ((means - means.flip(0)) / 2).sort().values
    return levels, float((x - levels[rounded(x, levels)]).square().mean())


if __name__ == "__main__":
    x = draws(float(sys.argv[1]) if len(sys.argv) > 1 else 1.3)
    errors = [1.0]
    for bits in range(1, MOST_BITS + 1):
        levels, error = trained(x, bits)
        errors.append(error)
        if bits <= LISTED:
            print(f"    ({', '.join(f'{level:.4f}' for level in levels[len(levels) // 2 :].tolist())}),", flush=True)
    print(f"ERRORS = ({', '.join(f'{error:.3g}' for error in errors)})")
