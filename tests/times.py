"""The tables of RESULTS.md on decoder capacity and on what a run takes, made from the runs in results/.

`python -m tests.times` prints them.
"""

import json
from typing import Any

from fcil.methods import family
from fcil.report.comparison import ran_by
from fcil.report.paper import PAPER_TABLE_3
from fcil.results.metrics import mean_and_interval
from tests.audits import RESULTS, audits, finals, over, runs

WIDE = {"4": "hr-literal,decoder_width=4", "16": "hr-literal", "64": "hr-literal,decoder_width=64"}
CODES = {"3": "hr-literal,code_bits=4", "6": "hr-literal", "24": "hr-literal,code_bits=32"}
STEPS = 100 * 5 * 10  # rounds, clients and steps of each in a run
TIMED = (
    "finetune", "joint", "icarl", "remind", "hr", "ssil", "remind-plus", "glfc", "podnet", "bic", "geodl", "dde",
    "hr-literal", "fedspace", "target", "mfcl", "fedftg", "ictrl",
)  # fmt: skip
TABLE_3 = {"hr": "hr,memory_share=0.75,rounds=17", "hr-literal": "hr-literal,memory_share=0.75,rounds=17"}


def results(method: str) -> list[dict[str, Any]]:
    """Return the results of a method, seed by seed."""
    return [json.loads(path.read_text()) for path in sorted(runs(method).glob("*/result.json"))]


def capacity(sizes: dict[str, str]) -> dict[str, list[list[float]]]:
    """Return what each size is worth, seed by seed: accuracy, PSNR, the highest AUC, and the time of a step in ms.

    Times are of seeds of which all sizes were run by one code.
    """
    found = {}
    by_seed = zip(*map(results, sizes.values()), strict=True)
    alike = [seed for seed, of_sizes in enumerate(by_seed) if len({ran_by(result) for result in of_sizes}) == 1]
    for size, method in sizes.items():
        told, timed = audits(method), results(method)
        found[size] = [
            finals(method), [one["kept"]["psnr"] for one in told],
            [max(row["value"] for row in one["membership"]) for one in told],
            [1000 * timed[seed]["seconds"]["train"] / STEPS for seed in alike],
        ]  # fmt: skip
    return found


def capacity_rows() -> list[str]:
    """Return the lines of the table of decoder capacity: three seeds each, but for times."""
    lines = []
    for title, sizes in (("{} channels", WIDE), ("{} bytes", CODES)):
        for size, values in capacity(sizes).items():
            assert [len(of_seeds) for of_seeds in values[:3]] == [3] * 3 and len(values[3]) > 1
            cells = [over(of_seeds, digits) for of_seeds, digits in zip(values, (1, 1, 3, 1), strict=True)]
            lines.append(f"| {' | '.join([title.format(size), *cells])} |")
    return lines


def apart(one: str, other: str, which: int, digits: int) -> str:
    """Say how two widths differ, seed by seed, with the interval that holds it with 95 %."""
    found = capacity(WIDE)
    differences = [a - b for a, b in zip(found[one][which], found[other][which], strict=True)]
    return "{:.{d}f} ({:.{d}f} to {:.{d}f})".format(*mean_and_interval(differences), d=digits)


def time_rows() -> list[str]:
    """Return the lines of the table of what a run takes: seed 0 of each method, all by one code."""
    folders = {method: RESULTS / "digits-times" / method / "0" for method in TIMED}
    alone = {method: json.loads((folder / "result.json").read_text()) for method, folder in folders.items()}
    assert len({ran_by(result) for result in alone.values()}) == 1
    lines = []
    for method, result in alone.items():
        seconds = result["seconds"]
        kind = {"bound": "bound", "data-free": "data-free", "exemplars": "exemplars"}.get(family(method), "hybrid")
        parts = [seconds["train"], seconds.get("server", 0.0)]
        rest = seconds["total"] - sum(parts)
        ratio = seconds["total"] / alone["hr"]["seconds"]["total"]
        cells = [f"{seconds['total']:.1f}", f"{ratio:.2f}", *(f"{part:.1f}" for part in (*parts, rest))]
        lines.append(f"| {' | '.join([method, kind, *cells])} |")
    return lines


def to_hr() -> dict[str, str]:
    """Return the times of Table 3's methods on digits in multiples of hr's."""
    found = {method: results(TABLE_3.get(method, method)) for method in ("hr", "hr-literal", "geodl", "ssil", "glfc")}
    assert len({ran_by(result) for every in found.values() for result in every}) == 1
    means = {method: sum(r["seconds"]["total"] for r in every) / len(every) for method, every in found.items()}
    return {method: f"{seconds / means['hr']:.2f}" for method, seconds in means.items()}


def an_epoch() -> dict[str, str]:
    """Return the minutes of an epoch in the paper's Table 3, on CIFAR-100."""
    return {method: f"{said.minutes / said.epochs:.1f}" for method, said in PAPER_TABLE_3["cifar100-10x10"].items()}


if __name__ == "__main__":
    print("\n".join([*capacity_rows(), "", *time_rows(), "", str(to_hr()), str(an_epoch())]))
    print(apart("4", "16", 0, 1), apart("64", "16", 0, 1), apart("64", "16", 2, 3))
