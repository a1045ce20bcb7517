"""docs/claims.md and docs/audit.md: their numbers are those of results/, and every claim has command and verdict."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fcil
from fcil.methods import METHODS
from fcil.plan import plan
from fcil.report.apart import change_later, mended_later
from fcil.report.comparison import compare
from fcil.report.drawing import Chart
from fcil.report.evidence import gather, trial_of
from fcil.report.paper import PAPER_FINAL, PAPER_TABLE_3
from fcil.report.paper_runs import RATES
from fcil.results.metrics import mean_and_sem
from fcil.results.runs import find
from tests import audits, mended, on_two_cores, times

ROOT = Path(fcil.__file__).parent.parent
TEXT = (ROOT / "docs/claims.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| **")]
VERDICTS = ("holds", "in part", "not seen", "fails", "open")
TOPICS = (
    "Descent", "10x memory", "Latents as good as perfect", "Order of families", "Without latents",
    "Without distillation", "Without global replay", "RFA", "HR-mini", "Less forgetting", "Less compute",
    "Privacy order",
)  # fmt: skip


BASELINES_ON_CIFAR = {
    "hr": "hr", "icarl": "icarl,lr=0.3", "icarl, exemplar_codec=webp:300": "icarl,exemplar_codec=webp:300,lr=0.3",
    "icarl, over=all": "icarl,lr=3,over=all", "bic": "bic,lr=0.01", "podnet": "podnet,lr=0.03", "dde": "dde,lr=0.01",
    "ssil": "ssil,lr=0.01", "glfc": "glfc,lr=0.6", "geodl": "geodl,lr=0.01",
    "glfc, exemplar_codec=webp:300": "glfc,exemplar_codec=webp:300,lr=0.6",
    "icarl, over=all, exemplar_codec=webp:300": "icarl,exemplar_codec=webp:300,lr=3,over=all",
}  # fmt: skip
HR_ON_CIFAR = {  # as RESULTS.md calls a run, and its folder
    "hr": "hr", "hr, exemplars=raw: 40 images in the same bytes": "hr,exemplars=raw",
    "hr, memory_scope=client": "hr,memory_scope=client",
    "hr-perfect, memory_scope=client": "hr-perfect,memory_scope=client", "hr-literal": "hr-literal",
}  # fmt: skip
BEFORE_CONTRAST = {  # likewise, from before hr had its softmax
    "hr": "hr,contrast=0", "hr, lifelike=0": "hr", "hr-no-kd": "hr-no-kd,contrast=0",
    "hr-no-global": "hr-no-global,contrast=0", "hr-rfa": "hr-rfa,contrast=0", "hr-mini": "hr-mini,contrast=0",
    "hr, exemplars=raw": "hr,contrast=0,exemplars=raw", "hr-no-latents": "hr-no-latents,contrast=0",
    "hr-perfect, an image for each code": "hr-perfect,contrast=0",
    "hr, memory_scope=client": "hr,contrast=0,memory_scope=client",
    "hr-perfect, memory_scope=client": "hr-perfect,contrast=0,memory_scope=client",
}  # fmt: skip


def row_of(topic: str) -> list[str]:
    """Return the row of a claim."""
    (row,) = (row for row in ROWS if f"**{topic}" in row[0])
    return row


@pytest.mark.parametrize("topic", TOPICS)
def test_every_claim_has_a_row(topic: str) -> None:
    assert any(f"**{topic}" in row[0] for row in ROWS)


def test_every_row_has_a_command_and_a_verdict() -> None:
    assert len(ROWS) >= 18
    for claim, command, measured, verdict in ROWS:
        said = re.findall(r"\*\*([a-z ]+)\*\*", verdict)
        assert said and set(said) <= set(VERDICTS), claim
        assert command.startswith(("`", "the same")), claim
        assert (measured == "not measured yet") == (said == ["open"]), claim


def test_its_numbers_on_digits_are_those_of_the_runs() -> None:
    (section,) = compare(find([ROOT / "results/digits"])).sections
    measured = {row.method: str(row.final) for row in section.rows if not row.settings}
    told = re.findall(r"`([\w-]+)` (\d+\.\d ± \d+\.\d)(?! %)", TEXT)
    assert len(told) > 25
    for method, value in told:
        assert measured[method] == value, method
    forgotten = {row.method: f"{row.forgetting.mean:.1f}" for row in section.rows if not row.settings}
    told = re.search(r"forgetting on digits, points: ([^.]*\.\d[^.]*)+?\. CIFAR", row_of("Less forgetting")[2])
    assert told is not None
    pairs = re.findall(r"([a-z][\w-]*(?: and [\w-]+)?) (-?\d+\.\d)", told[0])
    assert len(pairs) >= 13
    for names, value in pairs:
        for method in names.split(" and "):
            assert forgotten[method] == value, method


def test_its_numbers_with_settings_are_those_of_the_runs() -> None:
    (section,) = compare(find([ROOT / "results/digits-settings"])).sections
    measured = {row.label: str(row.final) for row in section.rows}
    descent, globally = row_of("Descent")[2], row_of("Without global replay")[2]
    assert f"ends at {measured['hr-literal (alignment=printed)']}" in descent
    for method in ("hr", "hr-no-global"):
        value = measured[f"{method} (class_share=0.5, partition=class_subset)"]
        assert f"{method} {value}" in globally


def test_its_numbers_on_cifar_are_those_of_the_runs() -> None:
    sections = compare(find([ROOT / "results/cifar100-10x10"])).sections
    (short,) = (section for section in sections if section.protocol == "short")
    rows = {row.method: row for row in short.rows if not row.settings}
    best, forgetting = row_of("HR is best")[2], row_of("Less forgetting")[2]
    of = {row.method: row for row in short.rows if not set(row.settings) - {"lr"}}
    for method in ("hr", "hr-literal", "dde", "podnet", "ssil", "geodl", "bic", "icarl", "glfc"):
        assert f"{method} {of[method].final.mean:.1f}" in best.partition("CIFAR")[2], method
        assert f"{method} {of[method].forgetting.mean:.1f}" in forgetting.partition("CIFAR")[2], method
        assert of[method].seeds == ((0, 1, 2) if method == "hr" else (0,))
    assert f"hr {rows['hr'].final}, and by one seed" in best
    assert f"finetune has {rows['finetune'].final} and joint {rows['joint'].final} (two seeds)" in best
    assert f"finetune {rows['finetune'].forgetting.mean:.1f}" in forgetting.partition("CIFAR")[2]


def test_the_numbers_of_the_audit_are_those_of_the_runs() -> None:
    text = (ROOT / "docs/audit.md").read_text()
    assert all(len(audits.audits(method)) == 3 for method in audits.AUDITED)
    for line in [*audits.kept_rows(), *audits.sent_rows(), *audits.other_sizes(), *audits.order_rows()]:
        assert line in text, line


def test_the_privacy_row_says_what_the_audits_found() -> None:
    said = row_of("Privacy order")[2]
    for method in ("icarl", "hr", "remind", "hr-literal"):
        found = audits.audits(method)
        nearest = audits.over([100 * one["kept"]["source_is_nearest"] for one in found], 1)
        loss = audits.auc(found, "sources of exemplars", "loss").partition(" (")[0]
        assert f"`{method}` {nearest} %" in said and f"`{method}` {loss}" in said, method
    everyone = audits.auc(audits.audits("mfcl"), "all training images", "loss").partition(" (")[0]
    assert f"`mfcl` {everyone}" in said
    raw, webp, hr = audits.chain("hr")
    steps = {"raw above WebP": raw, "WebP above `hr`": webp, "`hr` above `mfcl`": hr}
    steps["`hr-literal` above `mfcl`"] = audits.chain("hr-literal")[2]
    for name, step in steps.items():
        assert f"{name} by {step.mean:.3f} ({step.low:.3f} to {step.high:.3f})" in said


def test_whether_confusion_is_mended_later_is_as_the_ledgers_have_it() -> None:
    (found,), left_out = gather([ROOT / "results/digits" / method for method in ("hr", "hr-literal", "finetune")])
    assert left_out == []
    drawn = mended_later(found)
    assert isinstance(drawn, Chart)
    at_its_end, later = (dict(zip(*_named(trace), strict=True)) for trace in drawn.figure.data)
    (row,) = (row for row in ROWS if "Repaired one task later" in row[0])
    for method in ("hr", "hr-literal"):
        assert f"{method} {at_its_end[method]} and {later[method]}" in row[2]
    assert f"(finetune) {at_its_end['finetune']} and {later['finetune']}" in row[2]
    text = (ROOT / "docs/forgetting.md").read_text()
    for line in mended.rows():
        assert line in text, line
    now, then = mended.over_tasks(trial_of(ROOT / "results/cifar100-10x10/hr-literal,protocol=paper/0"))
    assert f"hr-literal (protocol `paper`, one seed) {now:.3f} and {then:.3f}" in row[2]
    assert f"`hr-literal` (protocol `paper`, one seed) {now:.3f} and {then:.3f}" in text
    (cifar,), _ = gather([ROOT / "results/cifar100-10x10/hr"])
    (group,) = cifar.groups
    change = change_later(group)
    assert len(group.trials) == 3 and change is not None
    sides = zip(*map(mended.over_tasks, group.trials), strict=True)
    told = "{} and {}".format(*("{:.3f} ± {:.3f}".format(*mean_and_sem(side)) for side in sides))
    assert f"hr {told}, less by {-change.mean:.3f} (95 %: {-change.high:.3f} to {-change.low:.3f})" in row[2]
    assert f"{told}, a change of {change.mean:.3f} ({change.low:.3f} to {change.high:.3f})" in text


def test_the_capacity_row_says_what_the_runs_and_audits_found() -> None:
    said = row_of("Decoder capacity")[2]

    def of(sizes: dict[str, str], which: int, digits: int) -> str:
        return ", ".join(audits.over(values[which], digits) for values in times.capacity(sizes).values())

    wide, codes = times.WIDE, times.CODES
    assert f"4, 16, 64 channels end at {of(wide, 0, 1)}, with exemplars at {of(wide, 1, 1)} dB" in said
    assert f"the highest AUC of an attack at {of(wide, 2, 3)}, and a step in {of(wide, 3, 1)} ms" in said
    assert (
        f"4 channels end {times.apart('4', '16', 0, 1)} points from 16, 64 at {times.apart('64', '16', 0, 1)}" in said
    )
    assert f"AUC is off by {times.apart('64', '16', 2, 3)}" in said
    assert f"24 bytes in the same memory: {of(codes, 0, 1)}, AUC {of(codes, 2, 3)}" in said


def test_the_compute_row_says_what_the_runs_took() -> None:
    said, ours, epoch = row_of("Less compute")[2], times.to_hr(), times.an_epoch()
    paper = {method: line.minutes / 682 for method, line in PAPER_TABLE_3["cifar100-10x10"].items()}
    for method in ("geodl", "ssil", "glfc"):
        assert f"{method} {ours[method]} ({paper[method]:.2f})" in said
    assert f"hr-literal {ours['hr-literal']}." in said
    assert f"HR {epoch['hr']} minutes, GLFC {epoch['glfc']}, GeoDL {epoch['geodl']}, SSIL {epoch['ssil']}" in said


def test_the_tables_of_capacity_and_times_are_those_of_the_runs() -> None:
    text = (ROOT / "RESULTS.md").read_text()
    for line in [*times.capacity_rows(), *times.time_rows()]:
        assert line in text, line


def test_the_tables_of_cifar100_on_two_cores_are_those_of_the_runs() -> None:
    text = (ROOT / "RESULTS.md").read_text()
    lines = [
        *on_two_cores.accuracy_rows(),
        *on_two_cores.rate_rows(),
        *on_two_cores.chosen_rows(),
        *on_two_cores.hundred_rows(),
    ]
    assert len(lines) > 30
    for line in lines:
        assert line in text, line
    rows, readme = on_two_cores.rows(), (ROOT / "README.md").read_text()
    finals = {label: row.final if len(row.seeds) > 1 else f"{row.final.mean:.1f}" for label, row in rows.items()}
    assert f"`hr` ends at {finals['hr']} there ({finals['hr (contrast=0)']} without its softmax)" in readme
    assert f"`joint` at {finals['joint (lr=0.03)']}, over three seeds" in readme
    calibrated = finals["hr (calibrate=1, contrast=0.3)"]
    assert f"(`--set contrast=0.3 --set calibrate=1`, chosen on held-out images), `hr` at {calibrated}" in readme
    for method, label in (("podnet`,", "podnet (lr=0.03)"), ("finetune`", "finetune (lr=0.03)"), ("hr-literal`",) * 2):
        assert f"`{method} at {finals[label.strip('`')]}" in readme
    for method, rates in on_two_cores.tried().items():  # what did best there is what ran
        best = max(rates, key=rates.__getitem__)
        row = next(row for row in rows.values() if row.method == method and not row.settings.keys() - {"lr"})
        config = tomllib.loads((row.folders[0] / "config.toml").read_text())["config"]
        assert config["lr"] == best, method


def _named(trace: Any) -> tuple[list[str], list[str]]:
    """Return the methods of a trace, and what it says of each to three digits."""
    values = zip(trace.x, trace.error_x.array, strict=True)
    return [label for label, _ in trace.customdata], [f"{mean:.3f} ± {sem:.3f}" for mean, sem in values]


def test_every_method_and_setting_in_a_command_is_there() -> None:
    commands = re.findall(r"`(fcil [^`]*)`", TEXT)
    assert len(commands) > 15
    for command in commands:
        methods = re.findall(r"--methods ([\w,-]+)|fcil run ([\w-]+)", command)
        for name in (name for pair in methods for names in pair for name in names.split(",") if name):
            settings = dict(word.split("=", 1) for word in re.findall(r"--set (\S+)", command))
            assert name in METHODS and plan(name, settings={k: v.split(",")[0] for k, v in settings.items()})


@pytest.mark.parametrize(
    ("start", "end", "folder", "runs"),
    [
        ("### CIFAR-100\n", "What they say:", "cifar100-10x10", HR_ON_CIFAR),
        ("#### Before the softmax: ablations", "####", "cifar100-superseded", BEFORE_CONTRAST),
    ],
)
def test_the_tables_on_cifar100_are_those_of_the_runs(start: str, end: str, folder: str, runs: dict[str, str]) -> None:
    """Accuracy after each task, old and new at the end, forgetting, and bytes kept; of what ran on one seed."""
    text = (ROOT / "RESULTS.md").read_text().partition(start)[2].partition(end)[0]
    lines = [[cell.strip(" *`") for cell in line.strip("| ").split(" | ")] for line in text.splitlines()]
    for name, run in runs.items():
        (cells,) = (cells for cells in lines if re.sub("[*`]", "", cells[0]) == name and len(cells) == 14)
        result = json.loads((ROOT / "results" / folder / run / "0/result.json").read_text())
        last = result["matrix"][-1]
        assert cells[1:11] == [f"{value:.1f}" for value in result["overall"]], name
        assert cells[11] == f"{sum(last[:-1]) / len(last[:-1]):.1f} / {last[-1]:.1f}", name
        assert cells[12:] == [f"{result['forgetting']:.1f}", f"{result['memory_bytes']:,}"], name


def test_the_tables_of_seeds_code_sizes_long_sequences_and_clients_that_differ_are_those_of_the_runs() -> None:
    text = (ROOT / "RESULTS.md").read_text().partition("### CIFAR-100\n")[2].partition("How the knobs were")[0]
    lines = [[cell.strip(" *`") for cell in line.strip("| ").split(" | ")] for line in text.splitlines()]
    cells = {tuple(line) for line in lines}

    def of(folder: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((ROOT / "results" / folder / "result.json").read_text())
        return found

    def ends(result: dict[str, Any]) -> list[str]:
        last = result["matrix"][-1]
        return [f"{sum(last[:-1]) / len(last[:-1]):.1f} / {last[-1]:.1f}", f"{result['forgetting']:.1f}"]

    now, before = "cifar100-10x10", "cifar100-superseded"
    for name, folder in (
        ("hr**, 400 codes a client", f"{now}/hr"),
        ("hr**, `memory_scope=client`: 1,000 codes", f"{now}/hr,memory_scope=client"),
        ("hr-perfect*, `memory_scope=client`: 1,000 images", f"{now}/hr-perfect,memory_scope=client"),
        ("hr, `contrast=0", f"{before}/hr,contrast=0"),
        ("hr, `contrast=0`, `memory_scope=client", f"{before}/hr,contrast=0,memory_scope=client"),
        ("hr-perfect*, `contrast=0`, `memory_scope=client", f"{before}/hr-perfect,contrast=0,memory_scope=client"),
        ("hr, `contrast=0`, `lifelike=0", f"{before}/hr"),
        ("hr, `contrast=0`, `lifelike=0`, `memory_scope=client", f"{before}/hr,memory_scope=client"),
        ("hr-perfect*, `contrast=0`, `lifelike=0`, `memory_scope=client", f"{before}/hr-perfect,memory_scope=client"),
    ):
        finals = [of(f"{folder}/{seed}")["final"] for seed in range(3)]
        mean = "{:.1f} ± {:.1f}".format(*mean_and_sem(finals))
        assert [name, *(f"{final:.1f}" for final in finals), mean] in lines, name
        if name.startswith("hr**"):  # old and new classes, and forgetting, by seed
            runs = [of(f"{folder}/{seed}") for seed in range(3)]
            sides = ", ".join(ends(run)[0].replace(" / ", " and ") for run in runs)
            fell = "{}, {} and {}".format(*(ends(run)[1] for run in runs))
            assert f"{sides}, forgetting {fell}" in text, name
    joint = [f"{of(f'cifar100-10x10/joint/{seed}')['final']:.1f}" for seed in range(2)]
    mean = "{:.1f} ± {:.1f}".format(*mean_and_sem([of(f"cifar100-10x10/joint/{seed}")["final"] for seed in range(2)]))
    assert ["joint", *joint, f"| {mean}"] in lines
    for size in (32, 77, 154, 307, 614):
        folder = f"cifar100-superseded/hr{'' if size == 307 else f',code_bytes={size},contrast=0'}/0"
        run = of(folder)
        (line,) = (line for line in lines if re.match(rf"{size}\b", line[0]) and len(line) == 7)
        assert line[1] == f"{_psnr(folder):.2f}"
        assert int(line[2].partition(":")[0].replace(",", "")) == run["memory_bytes"] // size
        assert line[3:] == [f"{run['memory_bytes']:,}", f"{run['final']:.1f}", *ends(run)]
    for method in ("joint", "hr", "finetune"):
        run = of("cifar100-superseded/20x5/hr,contrast=0/0" if method == "hr" else f"cifar100-20x5/{method}/0")
        some = [f"{run['overall'][task - 1]:.1f}" for task in (1, 2, *range(4, 21, 2))]
        assert any((method, *some, *ends(run)) == line[:14] for line in cells), method
    for method, folder in (
        ("hr", "hr,alpha=0.1,contrast=0"), ("hr-no-global", "hr-no-global,alpha=0.1,contrast=0"),
        ("hr, `lifelike=0", "hr,alpha=0.1"),
    ):  # fmt: skip
        run = of(f"cifar100-superseded/{folder}/0")
        assert (method, *(f"{value:.1f}" for value in run["overall"]), *ends(run)) in cells, method


def _psnr(folder: str) -> float:
    """Return what the last task of a run says of its codes."""
    found: float = _tasks(folder)[-1]["measured"]["psnr"]
    return found


def _tasks(folder: str) -> list[dict[str, Any]]:
    """Return the lines of a run's ledger that end a task."""
    lines = (ROOT / "results" / folder / "ledger.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == "task"]


def test_the_table_of_baselines_with_exemplars_on_cifar_is_that_of_the_runs() -> None:
    text = (ROOT / "RESULTS.md").read_text().partition("### Baselines with exemplars, on CIFAR-100")[2]
    rows = {}
    for line in text.partition("### Data-free")[0].splitlines():
        first, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        rows[re.sub("[*`]", "", first)] = [cell.strip("* |") for cell in cells]
    for name, folder in BASELINES_ON_CIFAR.items():
        result = json.loads((ROOT / "results/cifar100-10x10" / folder / "0/result.json").read_text())
        last = result["matrix"][-1]
        ends = [f"{sum(last[:-1]) / len(last[:-1]):.1f} / {last[-1]:.1f}", f"{result['forgetting']:.1f}"]
        claimed = [f"{PAPER_FINAL['cifar100-10x10'][name]:.2f}"] if name in PAPER_FINAL["cifar100-10x10"] else [""]
        assert rows[name] == [*(f"{value:.1f}" for value in result["overall"]), *ends, *claimed], name


def test_the_table_of_data_free_and_hybrid_baselines_on_cifar_is_that_of_the_runs() -> None:
    text = (ROOT / "RESULTS.md").read_text().partition("**On CIFAR-100** (cifar100-10x10")[2].partition("###")[0]
    (line,) = (line for line in text.splitlines() if line.startswith("| remind, `replay=64` |"))
    result = json.loads((ROOT / "results/cifar100-superseded/remind,lr=0.01/0/result.json").read_text())
    last, claimed = result["matrix"][-1], PAPER_FINAL["cifar100-10x10"]["remind"]
    ends = [f"{sum(last[:-1]) / len(last[:-1]):.1f} / {last[-1]:.1f}", f"{result['forgetting']:.1f}", f"{claimed:.2f}"]
    assert line.strip("| ").split(" | ")[1:] == [*(f"{value:.1f}" for value in result["overall"]), *ends]


@pytest.mark.parametrize("method", ["icarl", "glfc", "dde", "podnet", "mfcl", "ictrl"])
def test_rates_of_baselines_are_those_that_did_best_on_held_out_images(method: str) -> None:
    text = (ROOT / "RESULTS.md").read_text().partition("## How the learning rate was chosen")[2]
    head, _, row = text.partition(f"| {method}, lr | ")[2].splitlines()[:3]
    told = dict(zip(head.strip("| ").split(" | "), row.strip("| ").split(" | ")[1:], strict=True))
    found = {}
    for path in (ROOT / "results/cifar100-held-out").glob(f"{method},*/0/config.toml"):
        config = tomllib.loads(path.read_text())
        assert config["benchmark"]["holdout"] == 0.1 and config["benchmark"]["stop_after"] == 1
        found[f"{config['config']['lr']:g}"] = json.loads((path.parent / "result.json").read_text())["final"]
    best = max(found, key=lambda rate: found[rate])
    assert told == {rate: f"**{value:.1f}**" if rate == best else f"{value:.1f}" for rate, value in found.items()}
    runs = list((ROOT / "results/cifar100-10x10").glob(f"{method},*/0/config.toml"))
    if method == "ictrl":  # the last rate tried is the best; one beyond it comes first
        assert not runs and method not in RATES
        return
    assert RATES.get(method) == (best if float(best) != plan(method).config.lr else None)
    configs = [tomllib.loads(path.read_text())["config"] for path in runs]
    assert configs or method == "mfcl"
    assert all(own["lr"] == float(best) for own in configs if own.get("over", "seen") == "seen")


def test_the_table_of_the_readme_is_that_of_the_runs() -> None:
    text = (ROOT / "README.md").read_text().partition("## What one sees")[2].partition("    fcil run hr")[0]
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if "|" in line][2:]
    found = find([ROOT / "results/cifar100-10x10"])
    (short,) = (section for section in compare(found).sections if section.protocol == "short")
    rows = {row.label: row for row in short.rows}
    for name, *told in lines:
        method, _, setting = re.sub("[*`]", "", name.partition(": bound")[0]).partition(", ")
        label = f"{method} ({setting})" if "=" in setting else method.replace(" with raw images", " (exemplars=raw)")
        row = rows[label]
        assert told[:4] == [str(len(row.seeds)), str(row.final), str(row.average), f"{row.forgetting.mean:.1f}"], name
        assert told[4].partition(":")[0] in (f"{row.memory_bytes / 1000:,.0f} KB", "0"), name
    assert len(lines) == 17
