"""Codes as they are kept: numbers of 4, 6 or 8 bits, really packed, or floats of 16 or 32.

What is packed is best centred first: a code less its class's centroid, which everyone knows, spans a small range.
"""

import torch
from torch import Tensor

BITS = ("32", "16", "8", "6", "4")


def packed(codes: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes (n, width) in `bits` bits a number, and the one scale they share (none for floats)."""
    if bits >= 16:
        kind = torch.float32 if bits == 32 else torch.float16
        floats = codes.clamp(torch.finfo(kind).min, torch.finfo(kind).max).to(kind)
        return floats, codes.new_zeros(0, dtype=torch.float32)
    largest = codes.abs().amax() if codes.numel() else codes.new_zeros(())
    scale = largest.to(torch.float32).clamp_min(1e-12).view(1)
    levels = ((codes / scale + 1) / 2 * (2**bits - 1)).round().to(torch.uint8)
    places = torch.arange(bits, device=codes.device)
    return _bytes((levels.unsqueeze(2) >> places) & 1), scale


def unpacked(stored: Tensor, scale: Tensor, bits: int, width: int) -> Tensor:
    """Return what `packed` stored, as floats (n, width)."""
    if bits >= 16:
        return stored.to(torch.get_default_dtype())
    places = torch.arange(8, device=stored.device)
    all_bits = ((stored.unsqueeze(2) >> places) & 1).flatten(1)[:, : width * bits].view(len(stored), width, bits)
    levels = (all_bits << torch.arange(bits, device=stored.device)).sum(2)
    shares: Tensor = levels / (2**bits - 1) * 2 - 1
    return shares.to(torch.get_default_dtype()) * scale


def code_bytes(width: int, bits: int) -> int:
    """Return how many bytes one code takes."""
    return -(-width * bits // 8)


def scale_bytes(bits: int) -> int:
    """Return how many bytes the scale takes that codes packed together share."""
    return 0 if bits >= 16 else 4


def _bytes(bits: Tensor) -> Tensor:
    rows = bits.flatten(1)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 8))
    eights = torch.stack([rows[:, place::8] << place for place in range(8)])
    return eights.sum(0).to(torch.uint8)
