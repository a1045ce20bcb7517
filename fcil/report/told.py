"""What audits found, side by side: how well an attacker tells training images from others, method by method.

The paper orders what clients keep by how much it tells: raw images most, then compressed ones, latent codes, nothing.
Here that order is a measurement: the differences between these levels, seed by seed, with their intervals.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fcil.errors import UserError
from fcil.report.drawing import COLOURS, GREY, Chart, chart, names
from fcil.report.evidence import Evidence, Group, Trial, over_seeds
from fcil.report.views import dots
from fcil.results.metrics import mean_and_interval
from fcil.results.runs import read_audit

LEVELS = ("raw images", "WebP files", "codes", "nothing")  # what clients keep, in the paper's order
ATTACKS = (  # name, whose images, how they are told, and the mark
    ("exemplars' images, by distance", "sources of exemplars", "distance to what is kept", "diamond"),
    ("exemplars' images, by loss", "sources of exemplars", "loss", "circle"),
    ("all training images, by loss", "all training images", "loss", "circle-open"),
)


class Step(NamedTuple):
    """By how much one level tells more than the next: a mean over seeds, and where 95 % of such intervals hold it."""

    higher: str
    lower: str
    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Say what the interval allows."""
        return "holds" if self.low > 0 else "fails" if self.high < 0 else "not seen"


def what_audits_tell(evidence: Evidence) -> Chart | str:
    """How well an attacker tells training images from test images, for every method that was audited."""
    groups = [group for group in evidence.groups if any(auc_of(trial) is not None for trial in group.trials)]
    if not groups:
        return "What audits tell is left out: no run here was audited; fcil audit RUN does it."
    kinds = [
        (name, symbol, COLOURS[i], [_over(group, whose, attack) for group in groups])
        for i, (name, whose, attack, symbol) in enumerate(ATTACKS)
    ]
    figure = dots(groups, kinds, "AUC: 0.5 is guessing, 1 is certain", "", 3)
    figure.update_xaxes(range=[0.44, 1.02])
    figure.add_vline(x=0.5, line={"color": GREY, "dash": "dot"}, name="guessing", showlegend=True)
    said = "; ".join(
        f"{s.higher} above {s.lower} by {s.mean:.3f} ({s.low:.3f} to {s.high:.3f}): {s.verdict}" for s in steps(groups)
    )
    return chart(
        "told", "What an attacker can tell: was this image trained on?",
        "The chance that a training image scores higher than a test image of the same classes. Means over seeds, with "
        "the standard error; distance is that to the nearest picture that memories give back. The CSV has all attacks, "
        "and the bootstrap interval of each."
        + (f" The highest AUC of an audit by what clients keep, 95 % by Student's t: {said}." if said else ""),
        figure, ("method", "settings", "seed", "kept", "images", "attack", "auc", "low", "high"),
        [
            (*names(group), trial.seed, level_of(group, trial), row["images"], row["attack"], row["value"], row["low"],
             row["high"])
            for group in groups
            for trial in group.trials
            for row in _membership(trial)
        ],
    )  # fmt: skip


def steps(groups: Sequence[Group]) -> list[Step]:
    """Compare what clients keep, level by level: the highest AUC of each audit, a mean over methods, seed by seed."""
    found: dict[str, dict[int, list[float]]] = {}
    for group in groups:
        for trial in group.trials:
            if (value := auc_of(trial)) is not None:
                found.setdefault(level_of(group, trial), {}).setdefault(trial.seed, []).append(value)
    present = [level for level in LEVELS if level in found]
    made = []
    for higher, lower in zip(present, present[1:], strict=False):
        shared = sorted(found[higher].keys() & found[lower].keys())
        apart = [fmean(found[higher][seed]) - fmean(found[lower][seed]) for seed in shared]
        if len(apart) > 1:
            made.append(Step(higher, lower, *mean_and_interval(apart)))
    return made


def level_of(group: Group, trial: Trial) -> str:
    """Return what a run's clients keep."""
    kept = audit_of(trial.run.folder).get("kept")
    if not isinstance(kept, dict):
        return "nothing"
    if kept.get("identical") == 1:
        return "raw images"
    return "WebP files" if str(group.row.settings.get("exemplar_codec", "")).startswith("webp") else "codes"


def auc_of(trial: Trial) -> float | None:
    """Return the highest AUC of an audit's attacks on membership; None where the run was not audited."""
    return max((row["value"] for row in _membership(trial)), default=None)


def audit_of(folder: Path) -> Mapping[str, Any]:
    """Return a run's audit; nothing where there is none that can be read, which `gather` says."""
    try:
        return read_audit(folder)
    except UserError:
        return {}


def _membership(trial: Trial) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = audit_of(trial.run.folder).get("membership", [])
    return rows


def _over(group: Group, whose: str, attack: str) -> Any:
    values = [
        [row["value"] for row in _membership(trial) if (row["images"], row["attack"]) == (whose, attack)]
        for trial in group.trials
    ]
    return (over_seeds(values) or [None])[0]
