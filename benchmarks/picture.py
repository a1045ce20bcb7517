"""The README's picture: accuracy on all classes so far, task by task, of runs under results/.

`python benchmarks/picture.py` draws docs/accuracy.png from results/cifar100-10x10; needs the extra `report`.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

RUNS, OUT = Path("results/cifar100-10x10"), Path("docs/accuracy.png")
LINES = {  # label, colour, dashes, points up for the last number; colours by Okabe and Ito: safe for the colour-blind
    "joint": ("joint: keeps every image (upper bound)", "#000000", (1, 2), 1),
    "hr": ("hr: codes of 307 bytes, 0.12 MB a client", "#0072B2", (), -3),
    "dde,lr=0.01": ("dde: raw images, same memory; best of seven", "#009E73", (), -3),
    "glfc,lr=0.6": ("glfc: raw images, same memory", "#CC79A7", (), -3),
    "hr-literal": ("hr-literal: as printed, errors mended", "#D55E00", (), -9),
    "finetune": ("finetune: no memory (lower bound)", "#000000", (4, 2), 2),
}


def curves(method: str) -> list[list[float]]:
    """Return the accuracy after each task of every finished run of a method."""
    return [json.loads(path.read_text())["overall"] for path in sorted((RUNS / method).glob("*/result.json"))]


if __name__ == "__main__":
    figure, axes = pyplot.subplots(figsize=(8, 4.8), dpi=150)
    for method, (label, colour, dashes, up) in LINES.items():
        found = curves(method)
        if not found:
            continue
        mean = [sum(values) / len(values) for values in zip(*found, strict=True)]
        tasks = range(1, len(mean) + 1)
        label += f", {len(found)} seed{'s' * (len(found) > 1)}"
        axes.plot(tasks, mean, color=colour, dashes=dashes or (None, None), linewidth=2, label=label)
        for values in found if len(found) > 1 else []:
            axes.plot(tasks, values, color=colour, linewidth=0.6, alpha=0.5)
        axes.annotate(f"{mean[-1]:.1f}", (tasks[-1], mean[-1]), (6, up), textcoords="offset points", color=colour)
    axes.plot(
        10, 65.84, "D", color="#777777", markerfacecolor="none", linestyle="none", label="what the paper claims for HR"
    )
    axes.set_title("CIFAR-100, 50 clients of which 5 train in a round, 60 rounds a task", fontsize=9, loc="left")
    axes.set_xlabel("tasks learned, of ten classes each")
    axes.set_ylabel("test accuracy on all classes so far, %")
    axes.set_xticks(range(1, 11))
    axes.set_ylim(0, 125)
    axes.set_yticks(range(0, 101, 20))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", fontsize=7.5, ncol=2)
    figure.tight_layout()
    figure.savefig(OUT)
    print(OUT)
