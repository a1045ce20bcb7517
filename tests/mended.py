"""The numbers of docs/forgetting.md on what the next task mends, made from the ledgers in results/.

`python -m tests.mended` prints its table.
"""

from pathlib import Path
from statistics import fmean

import fcil
from fcil.report.apart import change_later
from fcil.report.evidence import Group, Trial, gather
from fcil.results.metrics import mean_and_sem

RESULTS = Path(fcil.__file__).parent.parent / "results"
HALVES = "class_share=0.5, partition=class_subset"  # each client has one class of a task's two
SHOWN = (
    "finetune", "fedspace", "fedftg", "target", "mfcl", "ictrl", "ssil", "geodl", "glfc", "remind",
    "hr-literal", "hr", "hr-no-global", "hr-perfect", "joint",
    f"hr-literal ({HALVES})", f"hr ({HALVES})", f"hr-no-global ({HALVES})",
)  # fmt: skip


def groups() -> dict[str, Group]:
    """Return all methods on digits, by what they are called."""
    (found,), left_out = gather([RESULTS / "digits", RESULTS / "digits-settings"])
    assert left_out == []
    return {group.row.label: group for group in found.groups}


def over_tasks(trial: Trial) -> tuple[float, float]:
    """Return the mean loss on new pairs between clients at the end of their task, and one task later."""
    pairs = zip(trial.apart, trial.apart[1:], strict=False)
    known = [
        (now.across, later.across_before)
        for now, later in pairs
        if now and later and now.across is not None and later.across_before is not None
    ]
    return fmean(now for now, _ in known), fmean(later for _, later in known)


def rows() -> list[str]:
    """Return the lines of the table: three seeds each."""
    lines, known = [], groups()
    for label in SHOWN:
        group = known[label]
        assert [trial.seed for trial in group.trials] == [0, 1, 2], label
        change = change_later(group)
        assert change is not None, label
        sides = zip(*(over_tasks(trial) for trial in group.trials), strict=True)
        cells = ["{:.3f} ± {:.3f}".format(*mean_and_sem(side)) for side in sides]
        name = f"`{group.row.method}`" + ", halves" * (HALVES in label)
        cells += [f"{change.mean:+.3f} ({change.low:+.3f} to {change.high:+.3f})", change.verdict]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return lines


if __name__ == "__main__":
    print("\n".join(rows()))
