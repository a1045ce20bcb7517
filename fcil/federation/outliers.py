"""Which replies lie far from the others in what they say of a class.

The rule is the median absolute deviation, for vectors. Of one field and one class, let m be the median of the replies,
number by number, and d the distance of a reply from m. A reply is far out where d is more than `factor` times the
median of all d. Sums are divided by the reply's own `counts` first, since clients have more images or fewer. It takes
four replies of a class; and a deviation below a hundredth of m's length counts as that much, or else clients that
nearly agree would rule each other out.
"""

from collections.abc import Sequence
from typing import get_type_hints

import torch
from torch import Tensor

from fcil.records import ByClass, Weights

ENOUGH = 4  # replies of a class
LEAST = 0.01  # of the median's length


def far_out(flats: Sequence[Weights], kind: type, factor: float) -> list[str]:
    """Say of each reply where it lies far from the others, or nothing; a GPU is waited for once."""
    whys, judged = [""] * len(flats), list[tuple[str, list[int], Tensor]]()
    for name in dict.fromkeys(name for flat in flats for name in flat if _of_a_class(name, kind)):
        who = [i for i, flat in enumerate(flats) if name in flat]
        if len(who) >= ENOUGH and len({flats[i][name].shape for i in who}) == 1:
            judged.append((name, who, _deviations(torch.stack([_mean(flats[i], name) for i in who]))))
    if not judged:
        return whys
    each = torch.cat([found for *_, found in judged]).tolist()
    for name, who, _ in judged:
        own, each = each[: len(who)], each[len(who) :]
        field, _, j = name.partition("/")
        for i, deviation in zip(who, own, strict=True):
            if deviation > factor:
                whys[i] = whys[i] or (
                    f"has {field} of class {j} that lie {deviation:.0f} times as far from the median as usual; "
                    f"outliers allows {factor:g}"
                )
    return whys


def _of_a_class(name: str, kind: type) -> bool:
    field = name.partition("/")[0]
    return get_type_hints(kind)[field] == ByClass and not field.startswith("count")


def _mean(flat: Weights, name: str) -> Tensor:
    count = flat.get("counts/" + name.partition("/")[2])
    number = flat[name].double().flatten()
    return number / count.double().clamp_min(1) if count is not None and count.ndim == 0 else number


def _deviations(values: Tensor) -> Tensor:
    """Return the distance of each row from the median row, over the median of these distances."""
    centre = _median(values)
    distances = torch.linalg.vector_norm(values - centre, dim=1)
    usual = torch.maximum(_median(distances), LEAST * torch.linalg.vector_norm(centre))
    return torch.where(distances > 0, distances / usual, 0.0)  # where all agree but one, it is infinitely far


def _median(values: Tensor) -> Tensor:
    """Return the median of the rows; of an even number, the middle between two."""
    ordered, n = values.sort(0).values, len(values)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
