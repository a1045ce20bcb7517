"""Records: dataclasses of tensors and numbers, and nothing else.

A message is a record that travels; a memory is a record that stays on its client; a server's state is a record, too.
One flatten/unflatten pair therefore serves the network, the disk and the ledger.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fcil.errors import UserError
from fcil.files import whole

T = TypeVar("T")
Weights = dict[str, Tensor]  # a state_dict
ByClass = dict[int, Tensor]  # one tensor per class

NUMBERS = {int: torch.int64, float: torch.float64, bool: torch.bool}


def varying(what: Literal["names", "rows"]) -> Any:
    """Declare a field that honest replies differ in: which names it has, or how many rows its tensors have."""
    return field(metadata={"varies": what})


@dataclass_transform(field_specifiers=(field, varying))
def record(cls: type[T]) -> type[T]:
    """Make `cls` a dataclass that can be sent, stored and weighed."""
    for name, kind in get_type_hints(cls).items():
        if kind is not Tensor and kind not in NUMBERS and kind not in (Weights, ByClass):
            raise TypeError(f"{cls.__name__}.{name}: a record holds tensors, dicts of tensors and numbers, not {kind}")
    return dataclass(cls)


@record
class Done:
    """The empty reply."""


@record
class Nothing:
    """The memory of a method that keeps none."""


@record
class Update:
    """A locally trained network."""

    weights: Weights
    count: int  # images trained on; 0 when there were none, and then the weights are left out of any mean


def flatten(rec: Any) -> Weights:
    """Return one flat dict, e.g. {"weights/conv1.weight": ..., "count": tensor(500)}."""
    flat: Weights = {}
    for part in fields(rec):
        value = getattr(rec, part.name)
        if isinstance(value, dict):
            flat |= {f"{part.name}/{key}": tensor for key, tensor in value.items()}
        elif isinstance(value, Tensor):
            flat[part.name] = value
        else:
            flat[part.name] = torch.tensor(value, dtype=NUMBERS[type(value)])
    return flat


def unflatten(cls: type[T], flat: Mapping[str, Tensor]) -> T:
    """Invert `flatten`, guided by the annotations of `cls`."""
    values: dict[str, Any] = {}
    for name, kind in _hints(cls).items():  # type: ignore[arg-type]
        if get_origin(kind) is dict:
            key, prefix = get_args(kind)[0], name + "/"
            values[name] = {key(k.removeprefix(prefix)): v for k, v in flat.items() if k.startswith(prefix)}
        else:
            values[name] = flat[name] if kind is Tensor else kind(flat[name].item())
    return cls(**values)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def keep_no_more(rec: Any) -> None:
    """Let a record hold what it weighs: tensors that are pieces of larger ones become their own."""
    flat = {name: tensor.clone() if _is_a_piece(tensor) else tensor for name, tensor in flatten(rec).items()}
    for name, value in vars(unflatten(type(rec), flat)).items():
        setattr(rec, name, value)


def _is_a_piece(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def size_in_bytes(rec: Any) -> int:
    """Return what this record weighs on the wire or on the client's disk."""
    return sum(tensor.numel() * tensor.element_size() for tensor in flatten(rec).values())


def write_tensors(path: Path, flat: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> None:
    """Write tensors to `path` as safetensors: whole and synced, or not at all."""
    copied = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in flat.items()}  # none shares storage
    with whole(path) as partial:
        partial.unlink(missing_ok=True)
        partial.touch()
        mode = partial.stat().st_mode  # what the umask gives; safetensors lets only the owner read
        try:
            save_file(copied, partial, dict(facts) if facts else None)
            _in_order(partial)
        except SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from error
        partial.chmod(mode)


def _in_order(path: Path) -> None:
    """Sort the facts in a file's header, which safetensors writes in any order: equal runs leave equal files."""
    with path.open("r+b") as file:
        header = json.loads(file.read(size := int.from_bytes(file.read(8), "little")))
        if facts := header.get("__metadata__"):
            header["__metadata__"] = dict(sorted(facts.items()))
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
            assert len(text) == size
            file.seek(8)
            file.write(text)


def read_tensors(path: Path) -> tuple[Weights, dict[str, str]]:
    """Return the tensors of a safetensors file and the facts written beside them."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error})") from error
