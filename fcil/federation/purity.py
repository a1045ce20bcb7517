"""What keeps a loss from being captured: a graph replays kernels, and nothing that Python decides."""

import warnings
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Impure(Exception):
    """A loss does something that a graph cannot replay."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise `Impure` where a value is read back to Python, a shape depends on values, or a draw has no generator."""

    READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
    SHAPES = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")
    CHECKS = ("_linalg_svd", "_linalg_eigh", "linalg_eig", "_linalg_eigvals", "linalg_lstsq", "_linalg_check_errors")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name in self.READS:
            raise Impure("it reads a value back to Python, as .item(), float(...) or a branch on a tensor does")
        word = name.removeprefix("aten::")
        by_mask = word in ("index", "index_put", "index_put_", "_index_put_impl_") and _by_mask(args[1])
        if word in self.SHAPES or by_mask or (word == "repeat_interleave" and kwargs.get("output_size") is None):
            raise Impure(f"the shape of a result depends on values ({word})")
        if word in self.CHECKS:
            raise Impure(f"it makes Python wait for the GPU, to see whether a decomposition succeeded ({word})")
        if torch.Tag.nondeterministic_seeded in func.tags and _generator(func, args, kwargs) is None:
            raise Impure(f"it draws ({word}) without the batch's generator")
        return func(*args, **kwargs)


def _by_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _generator(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("generator") if "generator" in names else len(args)
    return kwargs.get("generator", args[place] if place < len(args) else None)


def identity(loss: Callable[..., Any], client: object) -> Any:
    """Return what tells one loss from another; raise `Impure` for one that may be another with every message."""
    own = isinstance(loss, MethodType) and loss.__self__ is client
    function = loss.__func__ if isinstance(loss, MethodType) and own else loss
    if (
        not isinstance(function, FunctionType)
        or function.__closure__
        or function.__defaults__
        or function.__kwdefaults__
    ):
        raise Impure(
            "it may be another one for every Fit; make it a plain function of the module, without defaults or "
            "decorators, or a method of the client"
        )
    return function.__code__


def watched(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the same loss, which raises `Impure` on a GPU where it cannot be captured."""

    def under_watch(*args: Any) -> Tensor:
        with warnings.catch_warnings(action="ignore"):  # that it does not see everything
            torch.cuda.set_sync_debug_mode("error")
        try:
            with Watch():  # type: ignore[no-untyped-call]
                return loss(*args)
        except RuntimeError as error:
            if "synchronizing" in str(error):
                raise Impure("it makes Python wait for the GPU, as .tolist() or .cpu() does") from error
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return under_watch
