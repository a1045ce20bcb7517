"""Codes as they are kept: numbers of 4, 6 or 8 bits, really packed, or floats of 16 or 32.

What is packed is best centred first: a code less its class's centroid, which everyone knows, spans a small range.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fcil.records import ByClass

BITS = ("32", "16", "8", "6", "4")


def packed(rows: ByClass, bits: int) -> tuple[ByClass, ByClass]:
    """Return the codes (n, width) of each class in `bits` bits a number, and the scale that they share.

    Floats have no scale. All classes are packed at once: a GPU would spend its time on starting.
    """
    if not rows:
        return {}, {}
    codes, counts = torch.cat(list(rows.values())), [len(own) for own in rows.values()]
    if bits >= 16:
        kind = torch.float32 if bits == 32 else torch.float16
        floats = codes.clamp(torch.finfo(kind).min, torch.finfo(kind).max).to(kind)
        return _apart(rows, floats, counts), {j: codes.new_zeros(0, dtype=torch.float32) for j in rows}
    which = torch.arange(len(counts), device=codes.device).repeat_interleave(
        _tensor(counts, codes), output_size=len(codes)
    )
    largest = codes.new_zeros(len(counts), dtype=torch.float32)
    largest = largest.scatter_reduce(0, which, codes.abs().amax(1).to(torch.float32), "amax").clamp_min(1e-12)
    levels = ((codes / largest[which, None] + 1) / 2 * (2**bits - 1)).round().to(torch.uint8)
    places = torch.arange(bits, device=codes.device)
    stored = _bytes((levels.unsqueeze(2) >> places) & 1)
    return _apart(rows, stored, counts), dict(zip(rows, torch.split(largest, 1), strict=True))


def unpacked(stored: ByClass, scales: ByClass, bits: int, width: int) -> ByClass:
    """Return what `packed` stored, as floats (n, width)."""
    if bits >= 16 or not stored:
        return {j: codes.to(torch.get_default_dtype()) for j, codes in stored.items()}
    codes, counts = torch.cat(list(stored.values())), [len(own) for own in stored.values()]
    scale = torch.cat([scales[j] for j in stored]).repeat_interleave(_tensor(counts, codes), output_size=len(codes))
    places = torch.arange(8, device=codes.device)
    all_bits = ((codes.unsqueeze(2) >> places) & 1).flatten(1)[:, : width * bits].view(len(codes), width, bits)
    levels = (all_bits << torch.arange(bits, device=codes.device)).sum(2)
    shares: Tensor = levels / (2**bits - 1) * 2 - 1
    return _apart(stored, shares.to(torch.get_default_dtype()) * scale[:, None], counts)


def renewed(
    stored: ByClass, scales: ByClass, rows: ByClass, keep: Mapping[int, int], bits: int
) -> tuple[ByClass, ByClass]:
    """Return so many codes of each class, and scales: `rows` packed, where a class has any; else what was stored."""
    fresh, fresh_scales = packed({j: rows[j][:number] for j, number in keep.items() if j in rows}, bits)
    codes = {j: fresh[j] if j in fresh else stored[j][:number].clone() for j, number in keep.items()}
    return codes, {j: fresh_scales[j] if j in fresh else scales[j] for j in keep}


def code_bytes(width: int, bits: int) -> int:
    """Return how many bytes one code takes."""
    return -(-width * bits // 8)


def scale_bytes(bits: int) -> int:
    """Return how many bytes the scale takes that codes packed together share."""
    return 0 if bits >= 16 else 4


def _apart(like: ByClass, rows: Tensor, counts: list[int]) -> ByClass:
    return dict(zip(like, torch.split(rows, counts), strict=True))


def _tensor(counts: list[int], like: Tensor) -> Tensor:
    return torch.tensor(counts, device=like.device)


def _bytes(bits: Tensor) -> Tensor:
    rows = bits.flatten(1)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 8))
    eights = torch.stack([rows[:, place::8] << place for place in range(8)])
    return eights.sum(0).to(torch.uint8)
