"""The autoencoder of Hybrid Replay: an encoder that also classifies, and a decoder of four layers.

The encoder is a classifier's body with linear heads for the mean and the log-variance of a code. The decoder is one
linear layer and three convolutions; with 64 channels it has 1,411,459 parameters for codes of 307 numbers at 32x32
(the paper's 1.4M) and 1,755,011 for codes of 2,117 numbers at 84x84 (its 1.8M).
"""

import torch
from torch import Tensor, nn

from fcil.networks.enlarging import convolved_large, enlargements
from fcil.networks.heads import Body, Linear, Normalise, pooled
from fcil.networks.norm import activated, normalisation

FIRST_LAYER = 1_700_000  # parameters that the decoder's linear layer may have: what the paper's 1.8M leaves for it


class AutoEncoder(nn.Module):
    """Encoder f and decoder g, one network: the paper's theta."""

    def __init__(self, encoder: "Encoder", decoder: "Decoder"):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance of each image's code, (N, latent) each."""
        code: tuple[Tensor, Tensor] = self.encoder(images)
        return code

    def decode(self, codes: Tensor) -> Tensor:
        """Return images in 0..1."""
        images: Tensor = self.decoder(codes)
        return images


class Encoder(nn.Module):
    """A body, pooled, with a linear head for the mean and, if variational, one for the log-variance of a code."""

    def __init__(self, body: nn.Module, latent: int, variational: bool = True):
        super().__init__()
        self.normalise, self.body = Normalise(body.channels), body  # type: ignore[arg-type]
        self.mean = Linear(body.width, latent)  # type: ignore[arg-type]
        self.logvar = Linear(body.width, latent) if variational else None  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        body: Body = self.body  # type: ignore[assignment]
        features = pooled(body.stages(self.normalise(images)))
        mean = self.mean(features)
        # e^-10 is no variance to speak of, e^10 no code to speak of: beyond, only overflow waits
        return mean, self.logvar(features).clamp(-10, 10) if self.logvar is not None else torch.zeros_like(mean)


class Decoder(nn.Module):
    """Linear to a small grid of maps, then three convolutions with two enlargements between, then a sigmoid."""

    def __init__(self, latent: int, shape: tuple[int, int, int], width: int = 64, norm: str = "batch"):
        super().__init__()
        channels, height, self.side = shape
        if height != self.side:
            raise ValueError(f"images are square here, not {height}x{self.side}")
        self.grid, *self.enlarge = enlargements(self.side)
        self.maps = min(width, max(1, FIRST_LAYER // ((latent + 1) * self.grid**2)))
        self.linear = nn.Linear(latent, self.maps * self.grid**2)
        self.norms = nn.ModuleList(normalisation(norm, n) for n in (self.maps, 2 * width, width))
        plan = [(self.maps, 2 * width), (2 * width, width), (width, channels)]
        self.convolutions = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in plan)

    def forward(self, codes: Tensor) -> Tensor:
        x = activated(self.norms[0], self.linear(codes).view(-1, self.maps, self.grid, self.grid), slope=1.0)  # type: ignore[arg-type]
        for factor, convolution, norm in zip(self.enlarge, self.convolutions[:2], self.norms[1:], strict=True):
            x = activated(norm, convolved_large(convolution, x, factor), slope=0.2)  # type: ignore[arg-type]
        images: Tensor = self.convolutions[2](x)[..., : self.side, : self.side].to(codes).sigmoid()
        return images
