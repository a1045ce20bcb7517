"""A softmax classifier over the classes seen so far: what the plainest methods keep, send and classify with."""

from torch import Tensor, nn

from fcil.blocks.losses import masked
from fcil.blocks.training import loaded, weights_of
from fcil.records import Weights, record
from fcil.scenario.tasks import mask


@record
class Model:
    """A network, and which classes it knows."""

    weights: Weights
    seen: Tensor  # classes that have come so far, as a mask


def untrained(net: nn.Module, capacity: int) -> Model:
    """Return a network as it was built, which knows no class yet."""
    return Model(weights_of(net), mask((), capacity))


def scores(net: nn.Module, model: Model, images: Tensor) -> Tensor:
    """Return the logits of the classes seen; all others are ruled out."""
    return masked(loaded(net, model.weights)(images), model.seen)
