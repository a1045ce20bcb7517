"""Benchmarks and protocols by name: who learns what, and for how long.

A benchmark says which data comes to which clients in which tasks, and how many bytes a client may keep; a protocol
says how long and how clients train. Both are the same for every method. This file imports nothing heavy: listing costs
no start-up.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcil.errors import UserError, unknown
from fcil.knobs import changed, knob, knobs

PARTITIONS = ("lda_equal", "dirichlet_class", "class_subset", "powerlaw_dirichlet", "dirichlet_balanced")
SYNTHETIC = r"synthetic(-\d+x\d+)?"  # a dataset that is made up


@dataclass(frozen=True)
class Benchmark:
    """Tasks, clients and memory of an experiment."""

    name: str = knob("", "what the benchmark is called")
    dataset: str = knob(
        "",
        "digits, cifar100, tiny-imagenet, imagenet-subset, synthetic-CLASSESxIMAGES, or a path to class folders or "
        "parquet files",
    )
    tasks: int = knob(10, "number of tasks", least=1)
    stop_after: int = knob(0, "run only the first so many tasks, with heads and memory for all; 0 runs all", least=0)
    classes_per_task: int = knob(10, "classes that each task brings", least=1)
    clients: int = knob(50, "clients at the start", least=1)
    active: int = knob(5, "clients that train in a round", least=1)
    protocol: str = knob(
        "short", "protocol used unless another is asked for", choices=("brief", "quick", "short", "paper")
    )
    network: str = knob("resnet18", "classifier network", choices=("resnet18", "resnet8", "small"))
    norm: str = knob(
        "batch",
        "normalisation in the networks: over the batch, or over groups of an image's own channels, for clients that "
        "differ strongly",
        choices=("batch", "group"),
    )
    augment: str = knob("crop-flip", "augmentation of training batches", choices=("none", "crop", "crop-flip"))
    image_size: int = knob(0, "side of the square images in pixels; 0 keeps the dataset's own", least=0, most=512)
    class_order: str = knob("1993", "order of the classes: 1993, natural, or a list such as 3,0,1,2")
    partition: str = knob("lda_equal", "how a task's images are dealt to the clients", choices=PARTITIONS)
    alpha: float = knob(1.0, "concentration of the Dirichlet distributions; 0 deals all classes evenly", least=0)
    class_share: float = knob(
        0.6, "class_subset, powerlaw_dirichlet: share of a task's classes a client owns", above=0, most=1
    )
    exponent: float = knob(3.0, "powerlaw_dirichlet: exponent of the law of client sizes", above=1)
    reseed_per_task: bool = knob(False, "draw the same proportions in every task, as TARGET does with dirichlet_class")
    joining: int = knob(0, "clients that join at each task after the first", least=0)
    leaving: int = knob(0, "clients that leave at each task after the first", least=0)
    staying: float = knob(
        0.0, "share of the clients that keep the previous task's images instead of new ones", least=0, most=1
    )
    lag: int = knob(
        0,
        "most tasks that a client is behind: each has a number of its own, from 0 to this, gets its share of a task so "
        "many tasks later, and has nothing before; 0 is all at the same task",
        least=0,
    )
    memory: float = knob(
        20.0, "memory a class, in raw images: over the federation, or per client (memory_scope)", least=0
    )
    memory_scope: str = knob("federation", "what `memory` counts over", choices=("federation", "client"))
    memory_rule: str = knob(
        "fixed", "fixed: all bytes from the start; growing: in step with the classes", choices=("fixed", "growing")
    )
    lost: float = knob(0.0, "share of messages that never reach their client", least=0, below=1)
    holdout: float = knob(
        0.0, "share of the training images used for testing in place of the test set", least=0, most=0.9
    )
    train_limit: int = knob(0, "training images used per class; 0 is all", least=0)
    test_limit: int = knob(0, "test images used per class; 0 is all", least=0)
    partition_seed: int = knob(-1, "seed of the partition; -1 is the run's seed", least=-1)
    sampling_seed: int = knob(-1, "seed of the clients' schedule; -1 is the run's seed", least=-1)


@dataclass(frozen=True)
class Protocol:
    """How long and how clients train; the learning rate is the method's own."""

    name: str = knob("short", "what the protocol is called")
    rounds: int = knob(60, "communication rounds per task", least=1)
    steps: int = knob(15, "local steps per round; 0 counts epochs instead", least=0)
    epochs: int = knob(5, "local epochs per round, where steps is 0", least=1)
    batch_size: int = knob(64, "images per local step", least=1)
    schedule: str = knob(
        "cosine", "learning rate over the rounds of a task", choices=("cosine", "exponential", "constant")
    )
    warmup: float = knob(
        0.0,
        "share of a task's rounds in which the learning rate first rises linearly, before the schedule; a step has the "
        "rate reached at its end, so that none has 0",
        least=0,
        most=0.9,
    )
    new_share: float = knob(
        0.0,
        "least share of a step's images that are of new classes, where a client also has others; 0 takes them as they "
        "come",
        least=0,
        most=0.99,
    )
    momentum: float = knob(0.9, "momentum of the local SGD, fresh in every round", least=0, most=0.999)
    weight_decay: float = knob(5e-4, "weight decay of the local SGD", least=0)
    clip: float = knob(10.0, "largest norm of a step's gradient; 0 is no limit", least=0)
    precision: str = knob(
        "bf16",
        "arithmetic of local training on a GPU, where weights stay fp32; a CPU has fp32",
        choices=("bf16", "fp32"),
    )
    weighting: str = knob("plain", "weight of a client in the average", choices=("plain", "samples"))
    aggregate: str = knob(
        "mean",
        "how replies are averaged; clipped: no client moves what was sent by more than update_norm",
        choices=("mean", "clipped", "trimmed", "median"),
    )
    trim: float = knob(0.1, "share cut off at each end by the trimmed mean", least=0, most=0.49)
    update_norm: float = knob(
        0.0, "aggregate=clipped: largest norm of a client's change; 0 is the median of the round's", least=0
    )
    outliers: float = knob(
        0.0,
        "refuse a reply that lies so many times as far from the others' class statistics as usual, where four speak "
        "of a class; 0 refuses none",
        least=0,
    )
    most_images: int = knob(
        10_000_000, "images that a client may claim to have; a reply that claims more is refused", least=1
    )
    quorum: int = knob(
        0, "replies that a question needs: whoever did not answer is asked again until then; 0 needs none", least=0
    )
    dp: str = knob(
        "off",
        "differential privacy of what clients say of classes: noise in the server's sums, or in every reply",
        choices=("off", "central", "local"),
    )
    dp_clip: str = knob(
        "1", "largest norm of a field of a client's reply, all classes together: a number, or as sums:50,counts:20,10"
    )
    dp_noise: float = knob(1.0, "deviation of the noise, in units of dp_clip", above=0)
    dp_delta: float = knob(1e-5, "delta at which the privacy that a run cost is told", above=0, most=0.5)
    dp_seeded: bool = knob(
        False,
        "draw this noise from the run's seed, so that a run repeats; whoever knows the seed can take it off again",
    )
    evaluate_every: int = knob(0, "rounds between test evaluations inside a task; 0 evaluates at its end only", least=0)


PROTOCOLS = {
    "brief": Protocol("brief", rounds=5, steps=5, batch_size=32),
    "quick": Protocol("quick", rounds=20, steps=10, batch_size=32),
    "short": Protocol("short"),
    "paper": Protocol("paper", rounds=100, steps=0, epochs=5, batch_size=32, schedule="exponential"),
}

BENCHMARKS = {
    b.name: b
    for b in (
        Benchmark(
            "digits", "digits", tasks=5, classes_per_task=2, clients=10, active=5,
            protocol="quick", network="small", augment="none", memory=10,
        ),
        Benchmark(
            "cifar100-5x4", "cifar100", tasks=5, classes_per_task=4, clients=10, protocol="quick", network="resnet8"
        ),
        Benchmark("cifar100-10x10", "cifar100"),
        Benchmark("cifar100-20x5", "cifar100", tasks=20, classes_per_task=5),
        Benchmark("imagenet-subset-10x20", "imagenet-subset", classes_per_task=20, clients=100, active=10),
        Benchmark("imagenet-subset-20x10", "imagenet-subset", tasks=20, clients=100, active=10),
        Benchmark("tinyimagenet-10x5", "tiny-imagenet", classes_per_task=5, clients=300, active=30),
        Benchmark("mfcl-cifar100", "cifar100", class_order="natural"),
        Benchmark("mfcl-tiny", "tiny-imagenet", classes_per_task=20, clients=100, active=10, class_order="natural"),
        Benchmark(
            "glfc-cifar100", "cifar100", class_order="natural", clients=30, active=10, joining=10,
            partition="class_subset", class_share=0.6, staying=0.1, memory_scope="client",
        ),
        Benchmark(
            "scale-1000x100", "synthetic-200x2000", tasks=100, classes_per_task=2, clients=1000, active=10,
            protocol="brief", network="small", augment="none", memory=10,
        ),
    )
}  # fmt: skip

ABOUT = {
    "digits": "8x8 digits of scikit-learn: no download, a minute",
    "cifar100-5x4": "a fifth of the next, for a CPU: minutes",
    "cifar100-10x10": "column 1 of the paper's Table 2",
    "cifar100-20x5": "column 2: a long sequence",
    "imagenet-subset-10x20": "column 3: 200 classes, 84 px",
    "imagenet-subset-20x10": "column 4: a long sequence",
    "tinyimagenet-10x5": "column 5: 64 px, 8 images a client and task",
    "mfcl-cifar100": "as in MFCL: natural class order",
    "mfcl-tiny": "as in MFCL: all 200 classes, natural order",
    "glfc-cifar100": "as in GLFC: 6 of 10 classes each, 10 join a task",
    "scale-1000x100": "made-up images: 1,000 clients, 100 tasks",
}


def benchmark(name: str, within: tuple[Path, ...] = ()) -> Benchmark:
    """Return a benchmark by its name, or from a user's TOML file, looked for beside the last of those it is base of."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    if name.endswith(".toml"):
        return from_toml(within[-1].parent / name if within else Path(name), within)
    raise unknown("benchmark", name, [*BENCHMARKS, "a .toml file"])


def protocol(name: str) -> Protocol:
    """Return a protocol by its name."""
    if name not in PROTOCOLS:
        raise unknown("protocol", name, PROTOCOLS)
    return PROTOCOLS[name]


def is_knob(name: str) -> bool:
    """Tell whether --set changes what is called so, whatever the method."""
    return name == "lr" or name in (knobs(Benchmark).keys() | knobs(Protocol).keys()) - {"name", "protocol"}


def from_toml(path: Path, within: tuple[Path, ...] = ()) -> Benchmark:
    """Read a benchmark of the user's own; `base = "cifar100-10x10"` starts from a known one, or from another file.

    `within` has the files that this one is the base of. Paths in a file start from its folder.
    """
    try:
        values: Mapping[str, Any] = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"there is no benchmark file {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} is not a readable TOML file ({error})") from None
    if path.resolve() in map(Path.resolve, within):
        raise UserError(f"{path} is its own base; base takes a known benchmark or another .toml file")
    base = values.get("base")
    try:
        start = Benchmark(name=path.stem) if base is None else benchmark(str(base), (*within, path))
        _check_homes(values)
        made = changed(start, {"name": path.stem, **{k: v for k, v in values.items() if k != "base"}})
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if not made.dataset:
        raise UserError(f'{path} names no dataset; add a line such as dataset = "cifar100"')
    known = {b.dataset for b in BENCHMARKS.values()}
    own = "dataset" in values and made.dataset not in known and not re.fullmatch(SYNTHETIC, made.dataset)
    if own and ("/" in made.dataset or (path.parent / made.dataset).exists()):
        made = changed(made, {"dataset": str((path.parent / made.dataset).resolve())})
    return made


def _check_homes(values: Mapping[str, Any]) -> None:
    """Refuse in a benchmark's file what is a knob of the protocol or of methods."""
    for name, value in values.items():
        if is_knob(name) and name not in knobs(Benchmark):
            whose = "methods" if name == "lr" else "the protocol"
            raise UserError(f"{name} is a knob of {whose}, not of a benchmark; change it by --set {name}={value}")
