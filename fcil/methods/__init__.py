"""Every method by name. To add one: write its file, add its line here. Reading this table imports none of them."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from fcil.errors import UserError, unknown

if TYPE_CHECKING:
    from fcil.method import Method


OWN = "fcil_own_"  # how the module of a user's own file is called, before its name
OVERRIDDEN = {"momentum", "weight_decay", "new_share"}  # what a Fit may say in place of the protocol


class Entry(NamedTuple):
    """Where a method lives and what it is."""

    module: str
    family: str  # "bound": shows what is possible, and may keep more than the benchmark's memory
    sentence: str
    preset: Mapping[str, Any] = MappingProxyType({})  # the knobs that make an ablation of its file's method
    captured: bool = True  # whether a GPU replays its trainings as graphs; if not, they run in a loop
    paper: str = ""  # whose it is, and of which year
    keeps: str = "nothing"  # on a client, from task to task
    sends: str = "weights"  # what leaves a client

    @property
    def on_a_gpu(self) -> str:
        """How a GPU does its trainings, in a word."""
        return "captured" if self.captured else "eager"


_hr = partial(
    Entry, "fcil.methods.hr", paper="Khademi Nori et al. 2025, ours",
    keeps="codes", sends="weights, class means, moments of images",
)  # fmt: skip
_FITTED = "moments of images if exemplar_codec is klt, trellis or dct"
_fedftg = partial(Entry, "fcil.methods.fedftg", paper="Zhang et al. 2022", sends="weights, counts of images by class")
_literal = partial(
    Entry, "fcil.methods.hr_literal", paper="Khademi Nori et al. 2025", keeps="codes", sends="weights, class means"
)

METHODS = {
    "finetune": Entry("fcil.methods.finetune", "bound", "learns each task's data, forgets the rest: lower bound"),
    "joint": Entry(
        "fcil.methods.joint", "bound", "clients keep every image they ever had: upper bound", keeps="every image"
    ),
    "fedprox": Entry(
        "fcil.methods.fedprox", "reference", "finetune with a pull towards the global model", paper="Li et al. 2020"
    ),
    "lwf": Entry(
        "fcil.methods.lwf", "reference", "the last task's model teaches the new one; no memory",
        paper="Li and Hoiem 2016",
    ),
    "ewc": Entry(
        "fcil.methods.ewc", "reference", "holds the weights that mattered before; no memory",
        paper="Kirkpatrick et al. 2017", sends="weights, how much each mattered",
    ),
    "icarl": Entry(
        "fcil.methods.icarl", "exemplars", "herded exemplars, old outputs as targets, nearest mean",
        paper="Rebuffi et al. 2017", keeps="exemplars",
        sends=f"weights, sums of exemplars' features and counts, {_FITTED}",
    ),
    "bic": Entry(
        "fcil.methods.bic", "exemplars", "learns to correct the bias towards new classes on images held out",
        paper="Wu et al. 2019", keeps="exemplars", sends=f"weights, slopes of the correction, {_FITTED}",
    ),
    "podnet": Entry(
        "fcil.methods.podnet", "exemplars", "keeps pooled maps where they were; ten proxies a class",
        paper="Douillard et al. 2020", keeps="exemplars", sends=f"weights, proxies of new classes, {_FITTED}",
    ),
    "dde": Entry(
        "fcil.methods.dde", "exemplars", "learns an image with its neighbours in old features, unbiased by momentum",
        paper="Hu et al. 2021", keeps="exemplars", sends=f"weights, mean feature, {_FITTED}",
    ),
    "geodl": Entry(
        "fcil.methods.geodl", "exemplars", "iCaRL with features held along geodesics, not outputs", captured=False,
        paper="Simon et al. 2021", keeps="exemplars",
        sends=f"weights, sums of exemplars' features and counts, {_FITTED}",
    ),
    "ssil": Entry(
        "fcil.methods.ssil", "exemplars", "old and new classes never compete in one softmax",
        paper="Ahn et al. 2021", keeps="exemplars", sends=f"weights, {_FITTED}",
    ),
    "glfc": Entry(
        "fcil.methods.glfc", "exemplars", "even pace of old and new classes; a proxy server picks teachers",
        paper="Dong et al. 2022", keeps="exemplars, an entropy",
        sends=f"weights, gradients of prototypes, each round whether a new task was noticed, {_FITTED}",
    ),
    "fedftg": _fedftg("data-free", "tunes each average on images made up to be hard; an old model teaches, too"),
    "fedftg-plain": _fedftg(
        "data-free", "the same as published: nobody teaches old classes",
        {"old_teacher": False, "student_norm": "batch"},
    ),
    "fedspace": Entry(
        "fcil.methods.fedspace", "data-free", "prototypes with noise, rotations and a contrast; begins with fractals",
        paper="Shenaj et al. 2023", sends="weights, class means, a radius",
    ),
    "target": Entry(
        "fcil.methods.target", "data-free", "distils the old model on images that the server makes from it",
        paper="Zhang et al. 2023",
    ),
    "mfcl": Entry(
        "fcil.methods.mfcl", "data-free", "a generator trained without data stands in for old classes",
        paper="Babakniya et al. 2023",
    ),
    "remind": Entry(
        "fcil.methods.remind", "hybrid", "frozen lower layers; replays quantised maps into the upper ones",
        paper="Hayes et al. 2020", keeps="codes of maps", sends="weights, sums of maps by centre",
    ),
    "remind-plus": Entry(
        "fcil.methods.remind_plus", "hybrid", "REMIND split earlier, with an autoencoder of maps (our reading)",
        paper="Wang et al. 2021, our reading", keeps="codes of maps", sends="weights, sums of codes by centre",
    ),
    "ictrl": Entry(
        "fcil.methods.ictrl", "hybrid", "encoder and decoder play over coding rates; classes are subspaces",
        paper="Tong et al. 2023", sends="weights, moments of features",
    ),
    "hr": _hr("hybrid", "Hybrid Replay made to work: a fixed codec, one image domain"),
    "hr-mini": _hr("ablation", "with a tenth of the memory", {"memory_share": 0.1}),
    "hr-no-latents": _hr(
        "ablation", "without exemplars: later tasks are all made up", {"exemplars": "none"}, keeps="nothing"
    ),
    "hr-perfect": _hr(
        "bound", "keeps images where it would keep codes, as many", {"exemplars": "images"}, keeps="images"
    ),
    "hr-no-kd": _hr("ablation", "without distillation", {"distill": 0.0}),
    "hr-no-global": _hr("ablation", "makes up no images of classes that others hold", {"global_replay": False}),
    "hr-rfa": _hr("ablation", "with repulsion in place of the Lennard-Jones potential", {"alignment": "rfa"}),
    "hr-literal": _literal("hybrid", "Hybrid Replay as in its paper, errors corrected"),
    "hr-literal-mini": _literal("ablation", "with a tenth of the memory", {"memory_share": 0.1}),
    "hr-literal-no-latents": _literal(
        "ablation", "without exemplars: all old classes are made up", {"exemplars": "none"}, keeps="nothing"
    ),
    "hr-literal-perfect": _literal(
        "bound", "keeps images where it would keep codes, as many", {"exemplars": "images"}, keeps="images"
    ),
    "hr-literal-no-kd": _literal("ablation", "without distillation", {"distill_codes": 0.0, "distill_images": 0.0}),
    "hr-literal-no-global": _literal(
        "ablation", "makes up no images of classes that others hold", {"global_replay": False}
    ),
    "hr-literal-rfa": _literal(
        "ablation", "with repulsion in place of the Lennard-Jones potential", {"alignment": "rfa"}
    ),
}  # fmt: skip

DEFAULT = "hr"  # what `fcil run` runs


def method(name: str) -> "Method":
    """Return a method by its name, or from a user's own Python file."""
    if name.endswith(".py"):
        return _from_file(Path(name))
    if name not in METHODS:
        raise unknown("method", name, [*METHODS, "a .py file"])
    entry = METHODS[name]
    loaded: Method = importlib.import_module(entry.module).METHOD
    return loaded._replace(config=partial(loaded.config, **entry.preset)) if entry.preset else loaded


def family(name: str) -> str:
    """Return what kind of method this is; a user's own file is "own"."""
    return METHODS[name].family if name in METHODS else "own"


def _from_file(path: Path) -> "Method":
    if not path.is_file():
        raise UserError(f"there is no method file {path}")
    spec = importlib.util.spec_from_file_location(f"{OWN}{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # records resolve their annotations through it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the file is the user's: anything may happen while it loads
        raise UserError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    if type(getattr(module, "METHOD", None)).__name__ != "Method":
        raise UserError(f"{path} defines no METHOD; end it with METHOD = Method(Config, Server, Client, Memory)")
    own: Method = module.METHOD
    _check_parts(path, own)
    _check_knobs(path, own.config())
    _check_records(path, own)
    return own


def _check_parts(path: Path, own: "Method") -> None:
    """Refuse a method of which a part is missing that every run calls."""
    for part, made in (("Config", own.config), ("memory", own.memory)):
        try:
            record = made()
        except TypeError as error:
            raise UserError(f"{path}: its {part} cannot be made ({error}); it must be a record with defaults") from None
        if not is_dataclass(record):
            raise UserError(f"{path}: its {part} is a {type(record).__name__}; it must be a record")
    for part, half, needed in (
        ("Server", own.server, ("learn_task", "broadcast")),
        ("Client", own.client, ("networks", "predict")),
    ):
        if missing := [name for name in needed if not callable(getattr(half, name, None))]:
            raise UserError(f"{path}: its {part} has no {missing[0]}; it needs {' and '.join(needed)}")


def _check_knobs(path: Path, config: Any) -> None:
    """Refuse a knob that no config.toml could give back, or that would take a setting of the frame away."""
    from fcil.knobs import knobs
    from fcil.scenario.benchmarks import Benchmark, Protocol

    kinds = (bool, int, float, str)
    try:
        own = knobs(type(config))
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        raise UserError(f"{path}: its Config has no such type ({error}); a knob is bool, int, float or str") from None
    taken = (knobs(Protocol).keys() | knobs(Benchmark).keys()) - OVERRIDDEN
    for name, knob in own.items():
        if knob.kind not in kinds:
            kind = getattr(knob.kind, "__name__", "") if isinstance(knob.kind, type) else knob.kind
            raise UserError(f"{path}: the knob {name} is of type {kind}; a knob is bool, int, float or str")
        if name in taken:
            raise UserError(f"{path}: the knob {name} is called like a setting of every run; give it another name")
        try:
            knob.check(getattr(config, name))
        except UserError as error:
            raise UserError(f"{path}: the default {error}") from None


def _check_records(path: Path, own: "Method") -> None:
    """Refuse a method whose records the frame could not find: messages are rebuilt from their annotations."""
    from fcil.method import answers

    needed = [(own.server.broadcast, "return")]  # type: ignore[attr-defined]
    needed += [(answer, name) for answer in answers(own.client) for name in ("message", "return")]
    for function, name in needed:
        if name not in function.__annotations__:
            raise UserError(f"{path}: {function.__qualname__} says no type for its {name}; annotate it with its record")
