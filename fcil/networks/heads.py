"""A classifier is a body that makes features and a head that scores classes."""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Mean and deviation of CIFAR-100's training images: near enough for any natural image, and public.
CENTRE, SPREAD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)


class Body(Protocol):
    """What a body promises: its width and its stages."""

    width: int

    def stages(self, x: Tensor, raw: bool = False) -> list[Tensor]:
        """Return the feature maps after every stage, the last one before pooling included.

        `raw` ones are before the activation that ends a stage.
        """


class Normalise(nn.Module):
    """Centre and scale uint8 images, or floats in 0..1; the constants are not weights and do not travel."""

    def __init__(self, channels: int):
        super().__init__()
        centre, spread = (CENTRE, SPREAD) if channels == 3 else ((0.5,) * channels, (0.5,) * channels)
        self.centre: Tensor
        self.spread: Tensor
        self.register_buffer("centre", torch.tensor(centre).view(-1, 1, 1), persistent=False)
        self.register_buffer("spread", torch.tensor(spread).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            x = x.to(self.centre.dtype) / 255
        return (x - self.centre) / self.spread

    def pixels(self, x: Tensor) -> Tensor:
        """Return the floats that were centred and scaled to `x`."""
        return x * self.spread + self.centre


class Linear(nn.Linear):
    """A linear layer that computes in the precision of its weights, also where the body before it uses a lower one."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight))


def pooled(maps: list[Tensor]) -> Tensor:
    """Return the mean of each of the last maps, (batch, width), in full precision."""
    last = maps[-1]
    return last.mean((2, 3), dtype=torch.float32 if last.dtype == torch.bfloat16 else None)


class Classifier(nn.Module):
    """Body and linear head; the head has room for every class of the benchmark and is masked to those seen."""

    def __init__(self, body: nn.Module, classes: int):
        super().__init__()
        self.normalise, self.body = Normalise(body.channels), body  # type: ignore[arg-type]
        self.head = Linear(body.width, classes)  # type: ignore[arg-type]

    def stages(self, x: Tensor) -> list[Tensor]:
        """Return the feature maps after every stage."""
        maps: list[Tensor] = self.body.stages(self.normalise(x))  # type: ignore[operator]
        return maps

    def features(self, x: Tensor) -> Tensor:
        """Return pooled features, (batch, width)."""
        return pooled(self.stages(x))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


class Proxies(nn.Module):
    """Several directions for each class, which scores how similar the features are to them.

    Douillard et al., "PODNet", ECCV 2020: the local similarity classifier. Similarity is the negative squared distance
    of what is brought to length 1, or the cosine; a softmax over a class's own proxies says how much each counts.
    """

    def __init__(self, width: int, classes: int, proxies: int, cosine: bool = False):
        super().__init__()
        self.cosine = cosine
        self.weight = nn.Parameter(torch.randn(classes, proxies, width) * width**-0.5)

    def forward(self, features: Tensor, frozen: Tensor | None = None) -> Tensor:
        """Score every class; the proxies of classes where the boolean vector `frozen` is true get no gradient."""
        weight: Tensor = self.weight
        if frozen is not None:
            weight = torch.where(frozen[:, None, None], weight.detach(), weight)
        with torch.autocast(features.device.type, enabled=False):
            cosines = torch.einsum("nd,ckd->nck", F.normalize(features.to(weight)), F.normalize(weight, dim=2))
        similarity = cosines if self.cosine else 2 * cosines - 2
        return (similarity.softmax(2) * similarity).sum(2)


class ProxyClassifier(nn.Module):
    """Body and proxies; maps and features are raw, and the sharpness that a loss gives to the scores is learned."""

    def __init__(self, body: nn.Module, classes: int, proxies: int, cosine: bool = False):
        super().__init__()
        self.normalise, self.body = Normalise(body.channels), body  # type: ignore[arg-type]
        self.head = Proxies(body.width, classes, proxies, cosine)  # type: ignore[arg-type]
        self.scale = nn.Parameter(torch.ones(()))

    def stages(self, x: Tensor) -> list[Tensor]:
        """Return the feature maps of every stage, before the activation that ends it."""
        maps: list[Tensor] = self.body.stages(self.normalise(x), raw=True)  # type: ignore[operator]
        return maps

    def features(self, x: Tensor) -> Tensor:
        """Return pooled features, (batch, width), which may be negative."""
        return pooled(self.stages(x))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x))
        return scores
