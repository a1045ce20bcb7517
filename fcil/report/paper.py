"""Tables 1, 2 and 3 of the Hybrid Replay paper (ICLR 2025, arXiv 2501.15356), as data.

These are claims of the paper, not measurements of ours. Table 2 is final accuracy in percent, with standard errors over
10 runs: the curves of the paper's Figure 3 end at its values, and their means lie 9 to 14 points higher.
"""

from typing import NamedTuple

_BENCHMARKS = (
    "cifar100-10x10", "cifar100-20x5", "imagenet-subset-10x20", "imagenet-subset-20x10", "tinyimagenet-10x5",
)  # fmt: skip

# (final accuracy, its standard error) in the order of _BENCHMARKS
_TABLE_2 = {
    "icarl":          ((50.25, 0.53), (47.83, 0.49), (46.05, 0.37), (42.71, 0.32), (47.34, 0.40)),
    "bic":            ((54.38, 0.49), (51.03, 0.43), (48.83, 0.41), (45.02, 0.36), (48.79, 0.43)),
    "podnet":         ((58.97, 0.47), (54.09, 0.40), (51.38, 0.46), (48.91, 0.44), (53.12, 0.47)),
    "dde":            ((56.46, 0.50), (54.12, 0.48), (52.01, 0.49), (48.31, 0.40), (53.06, 0.41)),
    "geodl":          ((60.73, 0.57), (56.98, 0.54), (49.89, 0.40), (47.11, 0.35), (50.70, 0.41)),
    "ssil":           ((52.97, 0.52), (50.23, 0.47), (45.49, 0.43), (41.49, 0.39), (45.08, 0.32)),
    "glfc":           ((61.83, 0.59), (57.09, 0.51), (53.83, 0.46), (49.06, 0.41), (54.23, 0.57)),
    "fedftg":         ((46.86, 0.49), (43.01, 0.43), (42.89, 0.31), (39.08, 0.27), (43.23, 0.39)),
    "fedspace":       ((45.73, 0.51), (41.57, 0.45), (40.69, 0.24), (38.28, 0.31), (42.71, 0.32)),
    "target":         ((48.38, 0.42), (42.79, 0.39), (41.04, 0.25), (39.92, 0.34), (45.13, 0.42)),
    "mfcl":           ((50.03, 0.33), (44.88, 0.30), (43.71, 0.38), (40.04, 0.36), (46.71, 0.47)),
    "remind":         ((62.29, 0.52), (58.22, 0.42), (53.80, 0.47), (49.51, 0.45), (54.79, 0.60)),
    "remind-plus":    ((63.47, 0.56), (59.61, 0.44), (54.79, 0.52), (50.23, 0.49), (55.92, 0.57)),
    "ictrl":          ((63.31, 0.49), (58.93, 0.40), (54.55, 0.38), (49.92, 0.36), (55.23, 0.54)),
    "hr":             ((65.84, 0.57), (60.48, 0.47), (56.48, 0.38), (52.35, 0.31), (57.86, 0.59)),
    "hr-mini":        ((60.42, 0.49), (56.81, 0.44), (53.04, 0.36), (48.74, 0.29), (54.02, 0.53)),
    "hr-no-latents":  ((52.27, 0.32), (45.18, 0.29), (47.85, 0.31), (43.62, 0.27), (48.95, 0.49)),
    "hr-perfect":     ((66.53, 0.45), (62.37, 0.40), (57.65, 0.32), (54.46, 0.27), (59.25, 0.51)),
    "hr-no-kd":       ((64.07, 0.52), (58.13, 0.41), (55.71, 0.34), (50.38, 0.29), (54.80, 0.55)),
    "hr-no-global":   ((51.76, 0.24), (44.38, 0.23), (46.27, 0.25), (41.09, 0.21), (46.95, 0.42)),
    "hr-rfa":         ((65.73, 0.60), (60.50, 0.48), (56.44, 0.39), (52.35, 0.33), (57.81, 0.63)),
}  # fmt: skip

PAPER_FINAL = {b: {method: cells[i][0] for method, cells in _TABLE_2.items()} for i, b in enumerate(_BENCHMARKS)}
PAPER_SEM = {b: {method: cells[i][1] for method, cells in _TABLE_2.items()} for i, b in enumerate(_BENCHMARKS)}


class Claim(NamedTuple):
    """A cell of Table 2."""

    final: float
    sem: float


def paper_name(method: str) -> str:
    """Return the name of a method in `PAPER_FINAL`: both our `hr` and `hr-literal` stand beside the paper's HR."""
    return "hr" + method.removeprefix("hr-literal") if method.startswith("hr-literal") else method


def claim(benchmark: str, method: str) -> Claim | None:
    """Return what the paper claims for a method on a benchmark, if anything."""
    name = paper_name(method)
    if name not in PAPER_FINAL.get(benchmark, {}):
        return None
    return Claim(PAPER_FINAL[benchmark][name], PAPER_SEM[benchmark][name])


FLOAT_BYTES = 4
IMAGE_NUMBERS = {"cifar100-10x10": 3 * 32 * 32, "imagenet-subset-10x20": 3 * 84 * 84}
CLASSES = 100  # by Table 3's arithmetic, also where its benchmark has 200: else its raw images were 84.67M


class Budgeted(NamedTuple):
    """A line of Table 3: what a method may keep and how long it trains, and what comes out."""

    exemplars: int  # a class
    kind: str
    decoder: float  # numbers
    memory: float  # numbers of all exemplars
    epochs: int
    minutes: int
    final: float
    sem: float


PAPER_TABLE_3 = {
    "cifar100-10x10": {
        "hr": Budgeted(150, "latent", 1.4e6, 4.6e6, 50, 682, 65.43, 0.93),
        "geodl": Budgeted(20, "raw", 0, 6e6, 60, 763, 60.12, 0.91),
        "ssil": Budgeted(20, "raw", 0, 6e6, 60, 725, 52.81, 0.74),
        "glfc": Budgeted(20, "raw", 0, 6e6, 60, 788, 61.70, 0.79),
    },
    "imagenet-subset-10x20": {
        "hr": Budgeted(190, "latent", 1.8e6, 40.54e6, 70, 974, 56.09, 0.64),
        "geodl": Budgeted(20, "raw", 0, 42.34e6, 80, 1146, 49.23, 0.62),
        "ssil": Budgeted(20, "raw", 0, 42.34e6, 80, 1096, 45.67, 0.63),
        "glfc": Budgeted(20, "raw", 0, 42.34e6, 80, 1259, 53.83, 0.55),
    },
}

STAND_IN = {"digits": "cifar100-10x10"}  # for Table 3's ratios where there is no GPU: its shares of memory and length


def table_3(benchmark: str) -> dict[str, Budgeted]:
    """Return the lines of Table 3 about a benchmark, or about the one that it stands in for."""
    return PAPER_TABLE_3[STAND_IN.get(benchmark, benchmark)]


class Kept(NamedTuple):
    """What a line of Table 3 keeps, computed: the paper counts numbers, a device stores bytes."""

    methods: str
    benchmark: str
    said: Budgeted
    each: int  # numbers of an exemplar

    @property
    def numbers(self) -> int:
        """The numbers of all exemplars."""
        return self.said.exemplars * CLASSES * self.each

    @property
    def as_bytes(self) -> int:
        """What a device stores if a number of an exemplar takes a byte, and one of the decoder four."""
        return round(self.numbers + FLOAT_BYTES * self.said.decoder)

    @property
    def as_floats(self) -> int:
        """The same if every number takes four bytes."""
        return round(FLOAT_BYTES * (self.numbers + self.said.decoder))


def kept_in_table_3(benchmark: str) -> list[Kept]:
    """Return the memories that Table 3 compares, on one of its benchmarks or on both."""
    rows = []
    for name in [benchmark] if benchmark in PAPER_TABLE_3 else PAPER_TABLE_3:
        alike: dict[tuple[int, str], list[str]] = {}
        for method, said in PAPER_TABLE_3[name].items():
            alike.setdefault((said.exemplars, said.kind), []).append(method)
        for (_, kind), methods in alike.items():
            each = round(IMAGE_NUMBERS[name] / (10 if kind == "latent" else 1))
            rows.append(Kept(", ".join(methods), name, PAPER_TABLE_3[name][methods[0]], each))
    return rows


def in_millions(count: float) -> str:
    """Say a count of numbers as the paper does."""
    return f"{count / 1e6:g}M" if count else "-"


# Table 1, in few words: classification, quantisation, learning scenario, latent space, architectural simplicity
PAPER_TABLE_1 = {
    "hr": (
        "in the latent space, Euclidean distance", "would be straightforward", "offline",
        "structured: Lennard-Jones potential", "clean and minimalistic",
    ),
    "remind": (
        "after decoding, cross-entropy", "of latent exemplars", "online", "unstructured",
        "ad hoc, unnecessarily complex",
    ),
    "remind-plus": (
        "after decoding, cross-entropy", "of features", "online", "unstructured", "ad hoc, overly complex",
    ),
    "ictrl": (
        "in the latent space, Euclidean distance", "would be straightforward", "offline",
        "structured: linear discriminative representation", "clean and minimalistic",
    ),
}  # fmt: skip
