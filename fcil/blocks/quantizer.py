"""Product quantisation of feature maps, whose codebooks are found without any feature leaving its client.

Jégou, Douze and Schmid, "Product Quantization for Nearest Neighbor Search", TPAMI 2011. The channels of a map are cut
into parts of `width`; in each place, each part is one byte: the number of the nearest centre in that part's codebook.

Codebooks are found by k-means. In each exchange clients send, for every centre, how many vectors are nearest to it,
their sum and the sum of their squares; so the centres move as they would if all vectors lay in one place. The server
needs the totals alone. Who sees what one client sends, sees its vector wherever that is the only one of a centre.
"""

import torch
from torch import Tensor

from fcil.errors import UserError
from fcil.records import record

AT_ONCE = 2**14  # vectors whose distances to all centres are computed at a time


@record
class Cells:
    """What one client has of each centre's cell."""

    sums: Tensor  # (books, centres, width)
    squares: Tensor  # of every number: (books, centres, width)
    counts: Tensor  # (books, centres)


def no_codebooks(channels: int, width: int, centres: int) -> Tensor:
    """Return codebooks before the first exchange: all centres at 0, (books, centres, width)."""
    if channels % width:
        raise UserError(f"maps of {channels} channels cannot be cut into parts of {width}; choose a divisor of them")
    return torch.zeros(channels // width, centres, width)


def vectors(maps: Tensor, width: int) -> Tensor:
    """Return the parts of maps (n, channels, height, width) in every place: (n * places, books, width)."""
    count, channels, high, wide = maps.shape
    return maps.permute(0, 2, 3, 1).reshape(count * high * wide, channels // width, width)


def nearest(codebooks: Tensor, found: Tensor) -> Tensor:
    """Return the number of the centre nearest to each vector; among equals, the first: (vectors, books)."""
    halves = codebooks.square().sum(2) / 2
    return torch.stack(
        [(half - found[:, b] @ book.T).argmin(1) for b, (book, half) in enumerate(zip(codebooks, halves, strict=True))],
        1,
    )


def coded(codebooks: Tensor, maps: Tensor) -> Tensor:
    """Return maps as codes, a byte for each part of each place: uint8 (n, places * books)."""
    found = torch.split(vectors(maps, codebooks.shape[2]), AT_ONCE)
    codes = torch.cat([nearest(codebooks, part).to(torch.uint8) for part in found])
    return codes.reshape(len(maps), code_bytes(codebooks, tuple(maps.shape[1:])))  # type: ignore[arg-type]


def decoded(codebooks: Tensor, codes: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return codes as maps of `shape` (channels, height, width)."""
    channels, high, wide = shape
    books, count = len(codebooks), codes.numel() // (len(codebooks) * high * wide)
    which = codes.reshape(count * high * wide, books).long()
    found = codebooks[torch.arange(books, device=which.device), which]  # (n * places, books, width)
    return found.reshape(count, high, wide, channels).permute(0, 3, 1, 2)


def quantised(codebooks: Tensor, maps: Tensor) -> Tensor:
    """Return maps as their codes give them back."""
    codes = nearest(codebooks, vectors(maps, codebooks.shape[2]))
    return decoded(codebooks, codes, tuple(maps.shape[1:]))  # type: ignore[arg-type]


def code_bytes(codebooks: Tensor, shape: tuple[int, int, int]) -> int:
    """Return how many bytes the code of one map of `shape` takes."""
    return len(codebooks) * shape[1] * shape[2]


# -- k-means over many clients ----------------------------------------------------------------------------------------


def cells(codebooks: Tensor, found: Tensor) -> Cells:
    """Add up the vectors in each centre's cell."""
    centres = torch.arange(codebooks.shape[1], device=found.device)
    sums, squares = torch.zeros_like(codebooks), torch.zeros_like(codebooks)
    counts = torch.zeros(codebooks.shape[:2], dtype=torch.int64, device=found.device)
    for part in torch.split(found, AT_ONCE):
        for b, own in enumerate(nearest(codebooks, part).T):
            inside = own == centres[:, None]  # (centres, vectors): as a product, it adds up alike every time
            sums[b] += inside.to(part) @ part[:, b]
            squares[b] += inside.to(part) @ part[:, b].square()
            counts[b] += inside.sum(1)
    return Cells(sums, squares, counts)


def moved(codebooks: Tensor, pooled: Cells, generator: torch.Generator) -> Tensor:
    """Return every centre at the mean of its cell, over all clients.

    A centre whose cell is empty is drawn anew inside a cell that was drawn by its squared error, as k-means++ would. So
    the first exchange, in which one cell has everything, is the start.
    """
    sums, squares, counts = pooled.sums.double().cpu(), pooled.squares.double().cpu(), pooled.counts.cpu()[..., None]
    if not counts.any():
        return codebooks
    means = sums / counts.clamp_min(1)
    spread = (squares / counts.clamp_min(1) - means.square()).clamp_min(0)
    error = (counts * spread).sum(2) + 1e-12 * counts[..., 0]  # where no cell has any, the fullest are as good
    noise = torch.randn(means.shape, generator=generator, dtype=torch.float64)
    origin = torch.multinomial(error, means.shape[1], replacement=True, generator=generator)[..., None].expand_as(means)
    drawn = means.gather(1, origin) + noise * spread.gather(1, origin).sqrt()
    return torch.where(counts > 0, means, drawn).to(codebooks)
