"""Augmentation of whole batches of tensors, drawn from one generator."""

import torch
from torch import Tensor
from torch.nn import functional as F


def augmented(images: Tensor, how: str, generator: torch.Generator) -> Tensor:
    """Shift each image by up to an eighth of its side (reflecting the border) and mirror half of them."""
    if how == "none":
        return images
    images = shifted(images, images.shape[-1] // 8, generator)
    return mirrored(images, generator) if how == "crop-flip" else images


def shifted(images: Tensor, margin: int, generator: torch.Generator) -> Tensor:
    """Crop each image at a random place of its reflect-padded self."""
    count, _, height, width = images.shape
    padded = F.pad(images, (margin,) * 4, mode="reflect")
    offsets = torch.randint(0, 2 * margin + 1, (2, count, 1), generator=generator, device=images.device)
    rows = offsets[0] + torch.arange(height, device=images.device)  # (batch, height)
    columns = offsets[1] + torch.arange(width, device=images.device)  # (batch, width)
    which = torch.arange(count, device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def mirrored(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image with probability one half."""
    flip = torch.rand(len(images), 1, 1, 1, generator=generator, device=images.device) < 0.5
    return torch.where(flip, images.flip(3), images)
