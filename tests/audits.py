"""The numbers of docs/audit.md, made from the audits in results/digits: what the document says is compared with this.

`python -m tests.audits` prints its tables.
"""

import json
from pathlib import Path
from typing import Any

import fcil
from fcil.report.evidence import Group, gather
from fcil.report.told import Step, steps
from fcil.results.metrics import mean_and_sem

RESULTS = Path(fcil.__file__).parent.parent / "results"
AUDITED = {  # the folder of each method, and its name in the document
    "icarl": "`icarl`, raw", "icarl,exemplar_codec=webp-64": "`icarl`, WebP (`--set exemplar_codec=webp:64`)",
    "glfc": "`glfc`, raw", "hr": "`hr`", "remind": "`remind`", "hr-literal": "`hr-literal`", "ictrl": "`ictrl`",
    "mfcl": "`mfcl`",
}  # fmt: skip
KEPT = {
    "icarl": "images", "icarl,exemplar_codec=webp-64": "files", "glfc": "images", "hr": "codes", "remind": "codes",
    "hr-literal": "latents",
}  # fmt: skip
SENT = (
    ("glfc", "messages of one image", "gradients of a prototype"),
    ("hr", "messages of one image", "mean code of a class with one image"),
    ("hr", "messages of several", "mean code of several, 16 on average"),
    ("hr", "sums for the codec of several", "sums of 29 images, for the codec"),
    ("icarl", "messages of one image", "mean feature of one exemplar"),
    ("ictrl", "messages of one image", "mean feature of a class with one image"),
    ("ictrl", "messages of several", "mean feature of several"),
    ("hr-literal", "messages of several", "class mean of several"),
)
CHAINS = ("hr", "remind", "hr-literal")  # what stands for codes, between icarl and mfcl


def runs(method: str) -> Path:
    """Return the folder of a method's runs."""
    return next(path for path in (RESULTS / "digits" / method, RESULTS / "digits-settings" / method) if path.exists())


def audits(method: str) -> list[dict[str, Any]]:
    """Return the audits of a method, seed by seed."""
    return [json.loads(path.read_text()) for path in sorted(runs(method).glob("*/audit.json"))]


def finals(method: str) -> list[float]:
    """Return the final accuracy of a method, seed by seed."""
    return [json.loads(path.read_text())["final"] for path in sorted(runs(method).glob("*/result.json"))]


def over(values: list[float], digits: int) -> str:
    """Say a mean over seeds and its standard error."""
    mean, error = mean_and_sem(values)
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def auc(found: list[dict[str, Any]], images: str, attack: str) -> str:
    """Say a mean AUC, its standard error, and how far the bootstraps of all seeds reach."""
    rows = [row for one in found for row in one["membership"] if (row["images"], row["attack"]) == (images, attack)]
    if not rows:
        return ""
    if min(row["low"] for row in rows) == 1:
        return "1.00"
    low, high = min(row["low"] for row in rows), max(row["high"] for row in rows)
    return f"{over([row['value'] for row in rows], 2)} ({low:.2f} to {high:.2f})"


def kept_rows() -> list[str]:
    """Return the lines of the table of exemplars and membership."""
    lines = []
    for method, name in AUDITED.items():
        found = audits(method)
        kept = [one["kept"] for one in found if one["kept"]]
        cells = ["nothing", "", "", ""]
        if kept:
            number = round(sum(one["memory"]["exemplars"] for one in found) / len(found))
            raw = kept[0]["psnr"] is None
            cells = [
                f"{number:,} {KEPT[method]} of {kept[0]['bytes']} bytes",
                "equal" if raw else over([one["psnr"] for one in kept], 1),
                "1" if raw else over([one["ssim"] for one in kept], 3),
                "100 %" if raw else f"{over([100 * one['source_is_nearest'] for one in kept], 1)} %",
            ]
        told = [
            auc(found, "sources of exemplars", "loss"), auc(found, "sources of exemplars", "distance to what is kept"),
            auc(found, "all training images", "loss"),
        ]  # fmt: skip
        lines.append(f"| {' | '.join([name, over(finals(method), 1), *cells, *told])} |".replace("|  |", "| |"))
    return [line.replace("|  |", "| |") for line in lines]


def sent_rows() -> list[str]:
    """Return the lines of the table of messages: by seed, but for the last two columns."""
    lines = []
    for method, which, name in SENT:
        rows = [one["sent"][which] for one in audits(method) if which in one["sent"]]
        pictures = [row["pictures"] for row in rows]
        nearest = sum(row["source_is_nearest"] * row["pictures"] for row in rows) / sum(pictures)
        cells = [
            f"`{method}`", name, ", ".join(map(str, pictures)), ", ".join(f"{row['psnr']:.1f}" for row in rows),
            f"{100 * nearest:.0f} %", ", ".join(str(row["rank"]) for row in rows),
            over([row["stands_out"]["value"] for row in rows], 2),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def other_sizes() -> list[str]:
    """Return what the same images are as codes of other sizes."""
    found = audits("hr")
    sizes = {name: [one["tried"][name] for one in found] for name in found[0]["tried"] if name.startswith("klt")}
    return [
        f"{rows[0]['bytes']} byte{'s' * (rows[0]['bytes'] > 1)} {over([row['psnr'] for row in rows], 1)} dB, "
        f"{over([100 * row['source_is_nearest'] for row in rows], 1)} %"
        for rows in sizes.values()
    ]


def chain(codes: str) -> list[Step]:
    """Return the steps from raw images to nothing, with one method that stands for codes."""
    (found,), left_out = gather([runs(name) for name in ("icarl", "icarl,exemplar_codec=webp-64", codes, "mfcl")])
    assert left_out == []
    groups: tuple[Group, ...] = found.groups
    return steps(groups)


def order_rows() -> list[str]:
    """Return the lines of the table of the order."""
    lines = []
    for codes in CHAINS:
        said = [f"{step.mean:.3f} ({step.low:.3f} to {step.high:.3f}), {step.verdict}" for step in chain(codes)]
        lines.append(f"| `{codes}` | {' | '.join(said)} |")
    return lines


if __name__ == "__main__":
    print("\n".join([*kept_rows(), "", *sent_rows(), "", *other_sizes(), "", *order_rows()]))
