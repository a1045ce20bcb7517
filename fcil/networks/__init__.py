"""Networks by name. Each takes uint8 images or floats in 0..1 and exposes its stages."""

from fcil.networks.heads import Classifier
from fcil.networks.resnet import ResNet18
from fcil.networks.small import SmallNet

__all__ = ["Classifier", "ResNet18", "SmallNet", "build"]

BODIES = {"resnet18": ResNet18, "small": SmallNet}


def build(name: str, shape: tuple[int, int, int], classes: int) -> Classifier:
    """Return the named body for images of `shape` with a linear head for `classes`."""
    return Classifier(BODIES[name](shape[0]), classes)
