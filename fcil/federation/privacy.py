"""Differential privacy of what clients say of classes: centroids, moments, counts.

Each field of a client's reply, all its classes together, is scaled down to a norm of at most `dp_clip`. Then every
number gets Gaussian noise of deviation `dp_noise * dp_clip`: once, in the sum that the server uses (`central`, where
the server is trusted and those who receive its messages are not), or in each client's reply before it leaves
(`local`, where nobody is). So each field of each question is one Gaussian mechanism, whose neighbours are federations
with and without one client; Opacus adds them up. Networks, codecs and which classes there are, are not covered:
docs/trust.md.
"""

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, get_type_hints

import torch
from torch import Tensor

from fcil.errors import UserError, lacking
from fcil.records import ByClass, Weights, flatten, unflatten
from fcil.scenario.benchmarks import Protocol
from fcil.seeds import seed_of


def covered(kind: type) -> tuple[str, ...]:
    """Name the fields of a reply that noise protects: what is told by class, or stands beside `counts` of anything."""
    kinds = get_type_hints(kind)
    return tuple(name for name, its in kinds.items() if its == ByClass or (its is Tensor and "counts" in kinds))


@dataclass(frozen=True)
class Sums:
    """The server's side of one question, where its sums are to be private."""

    kind: type
    protocol: Protocol
    key: tuple[int | str, ...]  # seeds the noise, if it is to be seeded
    book: Callable[[str], None]  # is told which field was released

    def clipped(self, flat: Weights) -> Weights:
        """Return one reply, scaled down where it is too large; where privacy is local, it was before it came."""
        if self.protocol.dp == "local":
            return flat
        limits = clips(self.protocol)
        return flat | {n: t for own in covered(self.kind) for n, t in _clipped(flat, own, limits(own)).items()}

    def released(self, field: str, sums: Weights, replies: int) -> Weights:
        """Return the sums of a field over clipped replies with noise in them, if it is to be covered."""
        if field not in covered(self.kind):
            return sums
        if self.protocol.dp == "central":
            self.book(field)
            sums = _noised(sums, field, self.protocol, (*self.key, field))
        drawn = 1 if self.protocol.dp == "central" else replies  # how often noise was added
        return repaired(self.kind, field, sums, math.sqrt(drawn) * _deviation(self.protocol, field))

    def averaged(self, field: str) -> None:
        """Refuse an average of what only sums protect: by how many it is divided tells who has a class."""
        if self.protocol.dp == "central" and field in covered(self.kind):
            raise UserError(f"dp=central protects sums, and this method's server averages {field}; set dp=local")

    def single(self, reply: Any) -> Any:
        """Return one reply for a server that looks at it, if it is private by itself."""
        if not covered(self.kind):
            return reply
        if self.protocol.dp == "central":
            raise _seen(self.kind)
        flat = flatten(reply)
        for own in covered(self.kind):
            flat |= repaired(self.kind, own, _of(flat, own), _deviation(self.protocol, own))
        return unflatten(self.kind, flat)


def said(reply: Any, protocol: Protocol, *key: int | str) -> Any:
    """Return a reply as it may leave its client: with noise in what is covered, where privacy is local."""
    kind = type(reply)
    if protocol.dp != "local" or not covered(kind):
        return reply
    flat, limits = flatten(reply), clips(protocol)
    for own in covered(kind):
        flat |= _noised(_clipped(flat, own, limits(own)), own, protocol, (*key, own))
    told = unflatten(kind, flat)
    has_network = Weights in get_type_hints(kind).values()
    return replace(told, count=1) if hasattr(told, "count") and not has_network else told


def repaired(kind: type, field: str, flat: Weights, deviation: float) -> Weights:
    """Mend what noise made impossible: a class has at least one image, anything else that is counted at least none.

    And at least as many as the noise may have added or taken: sums are divided by it, and what is left of a class by
    chance would blow them up.
    """
    if not field.startswith("count"):
        return flat
    least = max(1.0, deviation) if get_type_hints(kind)[field] == ByClass else 0.0
    return {name: tensor.clamp_min(least) for name, tensor in flat.items()}


def clips(protocol: Protocol) -> Callable[[str], float]:
    """Read `dp_clip`: return the largest norm of each field."""
    found: dict[str, float] = {}
    for word in protocol.dp_clip.split(","):
        name, _, number = word.strip().rpartition(":")
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = math.nan
        if not 0 < found[name] < math.inf:
            raise UserError(
                f"dp_clip={protocol.dp_clip} is not allowed; dp_clip takes a number above 0, or fields and numbers "
                "such as sums:50,counts:20, or both"
            )

    def limit(field: str) -> float:
        if field not in found and "" not in found:
            raise UserError(
                f"dp_clip={protocol.dp_clip} says nothing of {field}; add {field}:NUMBER, or a number for all"
            )
        return found.get(field, found.get("", math.nan))

    return limit


def ready(protocol: Protocol) -> None:
    """Say at the start of a run what its privacy lacks, not at its end."""
    if protocol.dp != "off":
        clips(protocol)
        if protocol.dp == "central" and protocol.outliers:
            raise UserError(
                "dp=central and outliers exclude each other: one client's data would decide whose reply is refused; "
                "set outliers=0, or dp=local"
            )
        if find_spec("opacus") is None:
            raise lacking(f"dp={protocol.dp} counts its cost with the package opacus", "privacy")


def fits(protocol: Protocol, kinds: Iterable[type], single: Iterable[type]) -> None:
    """Say before a run begins what its privacy cannot be, given what clients answer, and what is read one by one."""
    if protocol.dp == "off":
        return
    limit = clips(protocol)
    for field in [field for kind in kinds for field in covered(kind)]:
        limit(field)
    for kind in single:
        if protocol.dp == "central" and covered(kind):
            raise _seen(kind)


def _seen(kind: type) -> UserError:
    return UserError(
        f"dp=central protects sums, and this method's server looks at every {kind.__name__} by itself; set dp=local"
    )


def spent(protocol: Protocol, releases: Mapping[str, int]) -> dict[str, Any]:
    """Return what the releases of a run cost, in Renyi differential privacy as Opacus adds it up."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    if steps := sum(releases.values()):
        accountant.history = [(protocol.dp_noise, 1.0, steps)]  # everyone may have answered every time
    return {
        "dp": protocol.dp, "clip": protocol.dp_clip, "noise": protocol.dp_noise, "delta": protocol.dp_delta,
        "releases": dict(releases), "epsilon": accountant.get_epsilon(protocol.dp_delta),
    }  # fmt: skip


def _clipped(flat: Weights, field: str, limit: float) -> Weights:
    own = _of(flat, field)
    if not own:
        return {}
    norms = [torch.linalg.vector_norm(tensor.to(torch.float64)) for tensor in own.values()]
    factor = (limit / torch.stack(norms).norm().clamp_min(1e-300)).clamp_max(1.0)
    return {name: (tensor * factor).to(_float(tensor)) for name, tensor in own.items()}


def _of(flat: Weights, field: str) -> Weights:
    return {name: tensor for name, tensor in flat.items() if name == field or name.startswith(field + "/")}


def _noised(flat: Weights, field: str, protocol: Protocol, key: tuple[int | str, ...]) -> Weights:
    deviation = _deviation(protocol, field)
    draws = torch.Generator().manual_seed(seed_of("noise", *key)) if protocol.dp_seeded else None
    return {name: tensor + deviation * normal(tensor.shape, draws).to(tensor) for name, tensor in flat.items()}


def _deviation(protocol: Protocol, field: str) -> float:
    return protocol.dp_noise * clips(protocol)(field)


def normal(shape: tuple[int, ...], draws: torch.Generator | None) -> Tensor:
    """Draw standard normal numbers; without a generator, from the operating system, which nobody can foresee."""
    if draws is not None:
        return torch.randn(shape, generator=draws, dtype=torch.float64)
    number = math.prod(shape)
    whole = torch.frombuffer(bytearray(secrets.token_bytes(8 * max(number, 1))), dtype=torch.int64)[:number] >> 12
    drawn: Tensor = torch.special.ndtri((whole.double() + 2**51 + 0.5) / 2**52)
    return drawn.reshape(shape)


def _float(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.is_floating_point() else torch.float32
