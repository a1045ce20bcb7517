"""What a run is made of: the scenario that its plan names, both halves of its method, and what carries words between.

A simulation assembles it here; a node and a server of a deployment take from here what a method is told.
"""

import math
from dataclasses import dataclass

from fcil.federation.adaptive import crew
from fcil.federation.clients import Door
from fcil.federation.engine import Engine, seeded
from fcil.federation.in_process import InProcess
from fcil.machine import keep_memory, the_device
from fcil.method import Method, Server, Setting
from fcil.methods import family, method
from fcil.plan import Plan
from fcil.scenario.memory import budget
from fcil.scenario.scenario import Scenario


@dataclass
class Parts:
    """What a run is made of."""

    scenario: Scenario
    setting: Setting
    server: Server
    engine: Engine
    transport: InProcess
    door: Door
    method: Method


def assemble(
    wanted: Plan, device: str = "auto", scenario: Scenario | None = None, workers: int = 0, eager: bool = False
) -> Parts:
    """Build scenario, method, engine and door of a plan."""
    place = the_device(device)
    if place == "cpu":
        keep_memory()
    scenario = scenario or Scenario(wanted.benchmark, wanted.seed, device=place)
    setting = setting_of(wanted, scenario.capacity, scenario.shape, place)
    made = method(wanted.code)
    with seeded(wanted.seed, "initial weights"):
        server = made.server(wanted.config, setting)
        engine = Engine(made, wanted.config, setting, place, workers, eager)
    allowed = None if family(wanted.method) == "bound" else scenario.budget
    answering = (
        crew(workers, engine, scenario, method, wanted.code, wanted.config, wanted.source) if place == "cpu" else None
    )
    transport = InProcess(engine, scenario, made.memory, allowed, answering)
    return Parts(
        scenario, setting, server, engine, transport, Door(transport, scenario, wanted.protocol, wanted.seed), made
    )


def setting_of(wanted: Plan, capacity: int, shape: tuple[int, int, int], device: str = "cpu") -> Setting:
    """Return what both halves of a plan's method are told."""
    b = wanted.benchmark
    kept = budget(b, math.prod(shape))
    return Setting(capacity, shape, wanted.protocol, kept, b.network, b.augment, b.norm, device, wanted.seed)
