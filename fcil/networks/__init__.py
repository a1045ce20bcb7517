"""Networks by name. Each takes uint8 images or floats in 0..1 and exposes its stages."""

from fcil.networks.autoencoder import AutoEncoder, Decoder, Encoder
from fcil.networks.heads import Classifier
from fcil.networks.resnet import ResNet18
from fcil.networks.small import SmallNet

__all__ = [
    "AutoEncoder", "Classifier", "Encoder", "ResNet18", "SmallNet", "build", "build_autoencoder", "build_encoder",
]  # fmt: skip

BODIES = {"resnet18": ResNet18, "small": SmallNet}


def build(name: str, shape: tuple[int, int, int], classes: int) -> Classifier:
    """Return the named body for images of `shape` with a linear head for `classes`."""
    return Classifier(BODIES[name](shape[0]), classes)


def build_autoencoder(name: str, shape: tuple[int, int, int], latent: int, variational: bool) -> AutoEncoder:
    """Return an autoencoder whose encoder has the named body; its decoder begins as wide as the body does."""
    body: ResNet18 | SmallNet = BODIES[name](shape[0])  # type: ignore[assignment]
    return AutoEncoder(Encoder(body, latent, variational), Decoder(latent, shape, body.begins))


def build_encoder(name: str, shape: tuple[int, int, int], latent: int) -> Encoder:
    """Return the named body with a linear head that makes codes of `latent` numbers, without variance."""
    return Encoder(BODIES[name](shape[0]), latent, variational=False)
