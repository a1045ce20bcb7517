"""What a deployment is to do: a method and its knobs, without any dataset."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fcil.errors import UserError, unknown
from fcil.methods import DEFAULT, METHODS, method
from fcil.parts import setting_of
from fcil.plan import Plan, plan, settable
from fcil.scenario.benchmarks import Benchmark, Protocol
from fcil.scenario.memory import NODES

BENCHMARK = Benchmark(
    "nodes", NODES, tasks=1000, classes_per_task=1000, clients=1, active=1000, protocol="quick", network="small",
    augment="none", image_size=64, memory=200, memory_scope="client",
)  # fmt: skip
OUTLIERS = 10  # times as far from the median as usual: what a node that nobody knows may say of a class
MEANINGLESS = (  # what only a simulation decides
    "dataset", "stop_after", "clients", "class_order", "partition", "alpha", "class_share", "exponent",
    "reseed_per_task", "joining", "leaving", "staying", "lag", "memory_scope", "lost", "holdout", "train_limit",
    "test_limit", "partition_seed", "sampling_seed",
)  # fmt: skip


def deployed(
    name: str, protocol: str | None, seed: int, settings: Mapping[str, Any], capacity: int, command: str = ""
) -> Plan:
    """Return the plan of a deployment; what only a simulation decides cannot be set."""
    if name.endswith(".py"):
        raise UserError(f"{name} is a file of your own; nodes answer for methods that fcil has: see fcil methods")
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    allowed = settable(type(method(name).config())) | settable(Protocol) | settable(Benchmark)
    for key in settings:
        if key in MEANINGLESS:
            raise UserError(f"{key} is not allowed here: nodes have their own images and come and go as they like")
        if key not in allowed and key != "protocol":
            raise UserError(f"{name}: {unknown('setting', key, sorted(allowed - {*MEANINGLESS}))}")
    if str(settings.get("dp", "off")) != "central":  # which they would undo
        settings = {"outliers": OUTLIERS, **settings}
    made = plan(name, BENCHMARK, protocol, seed, settings, command)
    if made.benchmark.image_size < 1:
        raise UserError("image_size=0 is not allowed here; all nodes make their images square, of one size: 1 to 512")
    if getattr(made.config, "latent", None) == 0:  # it would follow the capacity, which grows
        pixels = 3 * made.benchmark.image_size**2
        made = replace(made, config=replace(made.config, latent=max(1, min(2 * capacity, math.floor(pixels / 2)))))
    halves, size = method(name), made.benchmark.image_size
    for half in (halves.server, halves.client):  # what they refuse is said before anyone is asked
        half(made.config, setting_of(made, capacity, (3, size, size)))
    return made


def read_config(path: Path, capacity: int, command: str = "") -> Plan:
    """Read a deployment's TOML file: `method`, `seed`, `protocol`, and any knob of the method or the protocol."""
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f'there is no file {path}; it may be as short as: method = "hr"') from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} is not a readable TOML file ({error})") from None
    name, protocol, seed = values.pop("method", DEFAULT), values.pop("protocol", None), values.pop("seed", 0)
    if type(seed) is not int or not isinstance(name, str) or not isinstance(protocol, str | None):
        raise UserError(f"{path}: method and protocol are names, seed is a whole number")
    try:
        return deployed(name, protocol, seed, values, capacity, command)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
