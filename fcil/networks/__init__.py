"""Networks by name. Each takes uint8 images or floats in 0..1 and exposes its stages."""

from fcil.networks.autoencoder import AutoEncoder, Decoder, Encoder
from fcil.networks.heads import Classifier, ProxyClassifier
from fcil.networks.resnet import ResNet8, ResNet18
from fcil.networks.small import SmallNet

__all__ = [
    "AutoEncoder", "Classifier", "Encoder", "ProxyClassifier", "ResNet8", "ResNet18", "SmallNet", "build",
    "build_autoencoder", "build_encoder", "build_with_proxies",
]  # fmt: skip

BODIES = {"resnet18": ResNet18, "resnet8": ResNet8, "small": SmallNet}


def build(name: str, shape: tuple[int, int, int], classes: int, norm: str = "batch") -> Classifier:
    """Return the named body for images of `shape` with a linear head for `classes`."""
    return Classifier(BODIES[name](shape[0], norm), classes)


def build_autoencoder(
    name: str, shape: tuple[int, int, int], latent: int, variational: bool, norm: str = "batch", width: int = 0
) -> AutoEncoder:
    """Return an autoencoder whose encoder has the named body; width 0 is a decoder as wide as the body begins."""
    body: ResNet8 | ResNet18 | SmallNet = BODIES[name](shape[0], norm)  # type: ignore[assignment]
    return AutoEncoder(Encoder(body, latent, variational), Decoder(latent, shape, width or body.begins, norm))


def build_encoder(name: str, shape: tuple[int, int, int], latent: int, norm: str = "batch") -> Encoder:
    """Return the named body with a linear head that makes codes of `latent` numbers, without variance."""
    return Encoder(BODIES[name](shape[0], norm), latent, variational=False)


def build_with_proxies(
    name: str, shape: tuple[int, int, int], classes: int, proxies: int, cosine: bool = False, norm: str = "batch"
) -> ProxyClassifier:
    """Return the named body with so many proxies for each of `classes`, compared by distance or by cosine."""
    return ProxyClassifier(BODIES[name](shape[0], norm), classes, proxies, cosine)
