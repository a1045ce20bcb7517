"""A generator that is told which class to make.

As in Zhang et al., "Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated Learning", CVPR
2022: noise and label each become a small grid of maps, side by side, which two enlargements with a convolution each
make into an image. With 64 maps each it has 1,690,115 parameters for noise of 256 numbers and 100 classes at 32x32.
"""

import torch
from torch import Tensor, nn

from fcil.networks.enlarging import convolved_large, enlargements
from fcil.networks.norm import activated


class ConditionalGenerator(nn.Module):
    """Noise and labels to images, centred and scaled as networks see them: `Normalise.pixels` makes them 0..1."""

    def __init__(self, latent: int, classes: int, shape: tuple[int, int, int], width: int = 64):
        super().__init__()
        channels, height, self.side = shape
        if height != self.side:
            raise ValueError(f"images are square here, not {height}x{self.side}")
        self.grid, *self.enlarge = enlargements(self.side)
        self.noise = nn.Linear(latent, width * self.grid**2)
        self.label = nn.Linear(classes, width * self.grid**2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (2 * width, 2 * width, width))
        plan = [(2 * width, 2 * width), (2 * width, width), (width, channels)]
        self.convolutions = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in plan)
        self.last = nn.BatchNorm2d(channels, affine=False)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        one_hot = (labels[:, None] == torch.arange(self.label.in_features, device=labels.device)).to(noise)
        grids = [
            branch.view(len(noise), -1, self.grid, self.grid) for branch in (self.noise(noise), self.label(one_hot))
        ]
        x = activated(self.norms[0], torch.cat(grids, 1), slope=1.0)  # type: ignore[arg-type]
        for factor, convolution, norm in zip(self.enlarge, self.convolutions[:2], self.norms[1:], strict=True):
            x = activated(norm, convolved_large(convolution, x, factor), slope=0.2)  # type: ignore[arg-type]
        images: Tensor = self.last(self.convolutions[2](x)[..., : self.side, : self.side].tanh())
        return images
