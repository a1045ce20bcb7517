"""The shape of images: one that does not fit is refused in a sentence."""

from torch import Tensor

from fcil.errors import UserError

Shape = tuple[int, int, int]  # channels, height, width


def check_shape(images: Tensor, shape: Shape) -> None:
    """Refuse images of another shape than a codec is for."""
    if tuple(images.shape[1:]) != shape:
        raise UserError(f"this codec is for images of {in_words(shape)}, not of {in_words(tuple(images.shape[1:]))}")


def in_words(shape: tuple[int, ...]) -> str:
    """Return a shape as a person would say it."""
    return f"{shape[0]} channel{'s' * (shape[0] != 1)} and {'x'.join(map(str, shape[1:]))} pixels"
