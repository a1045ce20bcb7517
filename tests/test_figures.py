"""Figures as files, and the paper's figures beside its values: what they show is what runs and the paper say."""

import base64
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fcil.bench.page import made_up_run
from fcil.cli import main
from fcil.errors import UserError
from fcil.files import sha256
from fcil.methods.hr import Config as Ours
from fcil.methods.hr_literal import Config as Literal
from fcil.plan import plan
from fcil.records import write_tensors
from fcil.report import capacity as capacities
from fcil.report import charts
from fcil.report.drawing import Chart
from fcil.report.evidence import Evidence, gather
from fcil.report.figures import WIDTH, write_figures
from fcil.report.paper import PAPER_FINAL
from fcil.report.paper_curves import BY_MEMORY, BY_TASK, MEMORIES, MEMORYLESS, SWEPT
from fcil.report.paper_runs import RATES
from fcil.report.replay_figure import what_is_replayed
from fcil.report.schemes import how_hybrid_replay_goes, where_forgetting_happens
from fcil.results.gallery import GAP, HEADER, LABELS, Gallery
from fcil.scenario.benchmarks import Benchmark
from fcil.scenario.memory import budget

CHROMIUM = shutil.which("chromium")


def write_run(root: Path, method: str, seed: int = 0, benchmark: str = "digits", **settings: Any) -> Path:
    """Write a run folder with made-up numbers and the plan that its settings make."""
    words = {key: str(value) for key, value in settings.items()}
    wanted = plan(method, benchmark, None, seed, words)
    folder = wanted.folder(root)
    made_up_run(folder, method, seed, tasks=4, clients=4, settings=wanted.settings, benchmark=benchmark)
    (folder / "config.toml").write_text(wanted.to_toml())
    kept = budget(wanted.benchmark, 64 if benchmark == "digits" else 3072).per_client
    change(folder, memory_budget=kept)
    return folder


def change(folder: Path, **facts: Any) -> None:
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | facts))


def measure(folder: Path, **found: float) -> None:
    """Let a run's last task line say what its method measured."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    lines[-1]["measured"] = found
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    change(folder, measured=found, ledger_sha256=sha256(folder / "ledger.jsonl"))


def evidence(root: Path) -> Evidence:
    (found,), left_out = gather([root])
    assert left_out == []
    return found


def made(found: Chart | str) -> Chart:
    assert isinstance(found, Chart), found
    return found


def rows(chart: Chart) -> list[dict[str, Any]]:
    return [dict(zip(chart.columns, row, strict=True)) for row in chart.rows]


def test_the_papers_curves_are_whole_and_end_near_its_table() -> None:
    for curves, points in ((BY_TASK, 10), (BY_MEMORY, len(MEMORIES))):
        assert set(curves) == {"cifar100-10x10", "imagenet-subset-10x20", "tinyimagenet-10x5"}
        for methods in curves.values():
            assert set(methods) == set(SWEPT) and all(len(values) == points for values in methods.values())
    for benchmark, methods in BY_TASK.items():
        for method, values in methods.items():
            assert abs(values[-1] - PAPER_FINAL[benchmark][method]) < 2.8, (benchmark, method)
    assert all(len(set(methods[m])) == 1 for methods in BY_MEMORY.values() for m in MEMORYLESS)


def test_curves_over_tasks_have_the_papers_behind_them(tmp_path: Path) -> None:
    for method in ("finetune", "glfc", "hr", "hr-literal", "icarl"):
        write_run(tmp_path, method, benchmark="cifar100-10x10")
    found = evidence(tmp_path)
    chart = made(charts.over_tasks(found))
    traces = {trace.name: trace for trace in chart.figure.data}
    assert set(traces) == {
        "finetune", "glfc", "hr", "hr-literal", "glfc, in the paper", "hr, in the paper", "dotted: the paper"
    }  # fmt: skip
    assert tuple(traces["hr, in the paper"].y) == BY_TASK["cifar100-10x10"]["hr"]
    assert traces["hr, in the paper"].line.dash == "dot" and traces["hr"].line.dash == "solid"
    assert traces["hr, in the paper"].line.color == traces["hr"].line.color
    looks = [(trace.line.color, trace.line.dash) for trace in chart.figure.data]
    assert len(set(looks)) == len(looks), "no two lines look alike"
    mine = next(group for group in found.groups if group.label == "glfc")
    assert list(traces["glfc"].y) == mine.trials[0].overall
    literal = [row for row in rows(chart) if row["method"] == "hr-literal"]
    assert [row["paper_accuracy"] for row in literal] == list(BY_TASK["cifar100-10x10"]["hr"][:4])


def test_the_papers_figure_takes_the_run_with_the_rate_chosen(tmp_path: Path) -> None:
    for settings in ({}, {"lr": RATES["glfc"]}, {"lr": "7"}):
        write_run(tmp_path, "glfc", benchmark="cifar100-10x10", **settings)
    told = [row["settings"] for row in rows(made(charts.over_tasks(evidence(tmp_path))))]
    assert set(told) == {f"lr={RATES['glfc']}"}


def test_without_the_papers_benchmark_its_curves_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, "hr")
    assert "forgetting trends are left out" in str(charts.over_tasks(evidence(tmp_path)))
    assert "memory sweep is left out" in str(charts.by_memory(evidence(tmp_path)))


def test_a_memory_sweep_has_the_papers_values_at_its_memories(tmp_path: Path) -> None:
    for memory in (1, 16, 20):
        write_run(tmp_path, "glfc", benchmark="cifar100-10x10", memory=memory)
    write_run(tmp_path, "mfcl", benchmark="cifar100-10x10")
    write_run(tmp_path, "glfc", benchmark="cifar100-10x10", memory=2, alpha=0.1)  # another experiment
    found = evidence(tmp_path)
    chart = made(charts.by_memory(found))
    traces = {trace.name: trace for trace in chart.figure.data}
    assert list(traces["glfc"].x) == [1, 16, 20] and list(traces["glfc, in the paper"].x) == list(MEMORIES)
    assert list(traces["mfcl"].x) == [1, 128] and len(set(traces["mfcl"].y)) == 1, "what keeps nothing is a level line"
    assert [(row["memory"], row["paper_final"]) for row in rows(chart) if row["method"] == "glfc"] == [
        (1, 38.29), (16, 60.28), (20, None)
    ]  # fmt: skip
    finals = {g.row.settings.get("memory", "20"): g.row.final.mean for g in found.groups if len(g.row.settings) < 2}
    assert list(traces["glfc"].y)[:2] == [finals["1"], finals["16"]]


def write_sizes(root: Path) -> None:
    for width in (4, 16, 64):
        folder = write_run(root, "hr-literal", decoder_width=width)
        real, kept = torch.full((1, 8, 8), 100), torch.full((1, 8, 8), 100 + 64 // width)
        pictures = {"0/real/0": real, "0/kept/0": torch.zeros(1, 8, 8), "3/kept/0": kept}
        write_tensors(
            folder / "replay.safetensors", {n: p.to(torch.uint8) for n, p in pictures.items()}, {"owners": "{}"}
        )
    for size in (0, 24):
        measure(write_run(root, "hr", code_bytes=size), psnr=10.0 + size)


def test_decoder_capacity_has_a_column_for_each_size_and_no_panel_without_an_audit(tmp_path: Path) -> None:
    write_sizes(tmp_path)
    found = evidence(tmp_path)
    chart = made(charts.capacity(found))
    titles = [chart.figure.layout[f"yaxis{i}"].title.text for i in ("", "3", "5")]
    assert titles == ["accuracy (%)", "PSNR (dB)", "step (ms)"] and "No run here was audited" in chart.says
    wide = {row["decoder_channels"]: row for row in rows(chart) if row["method"] == "hr-literal"}
    assert list(wide) == [4.0, 16.0, 64.0] and {row["code_bytes"] for row in wide.values()} == {6.0}
    assert wide[64.0]["psnr"] == pytest.approx(20 * torch.tensor(255.0).log10().item())
    assert wide[4.0]["psnr"] == pytest.approx(20 * torch.tensor(255.0 / 16).log10().item())
    codes = {row["code_bytes"]: row for row in rows(chart) if row["method"] == "hr"}
    assert list(codes) == [12.0, 24.0] and codes[24.0]["psnr"] == 34.0 and codes[12.0]["decoder_channels"] is None
    trial = found.groups[0].trials[0]
    seconds = trial.run.result["seconds"]["train"]
    assert rows(chart)[0]["step"] == pytest.approx(1000 * seconds / (10 * 5 * 8)), (
        "ten steps, five clients, eight rounds"
    )


def test_an_audit_adds_its_panel(tmp_path: Path) -> None:
    write_sizes(tmp_path)
    for i, width in enumerate((4, 64)):
        row = {"images": "all training images", "attack": "loss", "low": 0.4, "high": 0.8}
        told = {"membership": [{**row, "value": 0.5}, {**row, "value": 0.6 + i / 10}], "kept": {"psnr": 9.0}}
        (tmp_path / f"digits/hr-literal,decoder_width={width}/0/audit.json").write_text(json.dumps(told))
    (tmp_path / "digits/hr/0/audit.json").write_text("[torn")
    (found,), (torn,) = gather([tmp_path])
    assert str(tmp_path / "digits/hr/0/audit.json") in torn
    chart = made(charts.capacity(found))
    shown = {row["decoder_channels"]: row for row in rows(chart) if row["method"] == "hr-literal"}
    assert [shown[width]["auc"] for width in (4.0, 16.0, 64.0)] == [0.6, None, 0.7]
    assert shown[4.0]["psnr"] == 9.0, "an audit looks at more exemplars than the gallery"
    assert chart.figure.layout.yaxis5.title.text == "membership AUC"


def test_steps_of_another_commit_are_not_compared(tmp_path: Path) -> None:
    write_sizes(tmp_path)
    change(tmp_path / "digits/hr-literal,decoder_width=64/0", commit="another")
    change(tmp_path / "digits/hr,code_bytes=24/0", commit="another")
    chart = made(charts.capacity(evidence(tmp_path)))
    titles = [axis.title.text for axis in chart.figure.select_yaxes()]
    assert "accuracy (%)" in titles and "step (ms)" not in titles
    for size in (0, 24):
        write_run(tmp_path, "hr", 1, code_bytes=size)
    chart = made(charts.capacity(evidence(tmp_path)))
    shown = [trace for trace in chart.figure.data if "step (ms)" in trace.hovertemplate and len(trace.x)]
    assert [trace.name for trace in shown] == ["hr"] and "(1 seed)" in shown[0].customdata[1][0]


def test_sizes_are_compared_over_the_seeds_that_all_of_them_have(tmp_path: Path) -> None:
    finals = [
        [json.loads((write_run(tmp_path, "hr", seed, code_bytes=size) / "result.json").read_text())["final"]]
        for size, seed in ((0, 0), (24, 0), (0, 1))
    ]
    chart = made(charts.capacity(evidence(tmp_path)))
    assert list(chart.figure.data[0].y) == [finals[0][0], finals[1][0]] and finals[0] != finals[2]


def test_both_sizes_are_drawn_on_one_scale_that_holds_all_values(tmp_path: Path) -> None:
    write_sizes(tmp_path)
    chart = made(charts.capacity(evidence(tmp_path)))
    values = [y for trace in chart.figure.data if "accuracy" in trace.hovertemplate for y in trace.y]
    low, high = chart.figure.layout.yaxis.range
    assert low < min(values) and max(values) < high and chart.figure.layout.yaxis2.range == (low, high)
    assert chart.figure.layout.yaxis5.title.text == "step (ms)" and chart.figure.layout.yaxis5.range[0] == 0


def test_one_size_is_no_figure_of_capacity(tmp_path: Path) -> None:
    write_run(tmp_path, "hr")
    assert "decoder capacity is left out" in str(charts.capacity(evidence(tmp_path)))


def test_the_sizes_of_the_figure_are_those_of_the_networks() -> None:
    from fcil.methods.hr import codec_of
    from fcil.methods.hr_literal import network_of
    from fcil.parts import setting_of

    setting = setting_of(
        plan("hr", Benchmark("x", "digits", tasks=5, classes_per_task=2, network="small")), 10, (1, 8, 8)
    )
    counts = [
        sum(p.numel() for p in network_of(Literal(decoder_width=w), setting).decoder.parameters()) for w in (4, 16, 0)
    ]
    assert counts[0] < counts[1] == counts[2], "0 is as wide as the encoder begins"
    learned = [codec_of(Ours(codec="autoencoder", codec_width=w), setting) for w in (8, 64)]
    small, large = (sum(p.numel() for p in codec.net.parameters()) for codec in learned)  # type: ignore[union-attr]
    assert small < large / 10
    assert capacities.SIZED[0] in plan("hr-literal", settings={"decoder_width": 4}).settings


def test_figure_1_has_the_measured_terms_in_its_fields(tmp_path: Path) -> None:
    for method in ("finetune", "hr", "icarl"):
        write_run(tmp_path, method)
    found = evidence(tmp_path)
    chart = made(where_forgetting_happens(found))
    *titles, key = [note.text for note in chart.figure.layout.annotations]
    assert titles == ["finetune", "hr"] and all(f"({numeral})" in key for numeral in ("i", "ii", "iii", "iv"))
    apart = found.groups[0].trials[0].apart[-1]
    assert apart is not None and apart.means["prior"] is None
    fields = chart.figure.data[0].z
    assert fields[0][0] is None and fields[0][1] == fields[1][0] == apart.means["intra"]
    assert fields[1][1] == fields[1][3] == apart.means["new"]
    assert fields[0][2] == fields[0][3] == fields[1][2] == apart.means["inter"]


def test_figure_2_shows_a_runs_own_images(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "hr")
    assert "Figure 2 is left out" in str(how_hybrid_replay_goes(evidence(tmp_path)))
    kinds = [(t, kind, j) for t in range(4) for kind in ("kept", "made") for j in range(2 * t + 2)]
    kinds += [(j // 2, "real", j) for j in range(8)]
    pictures = {f"{t}/{kind}/{j}": torch.full((1, 8, 8), 8 * j, dtype=torch.uint8) for t, kind, j in kinds}
    write_tensors(folder / "replay.safetensors", pictures, {"owners": "{}"})
    chart = made(how_hybrid_replay_goes(evidence(tmp_path)))
    assert dict(chart.rows) == {
        "images of task 1": 2, "new images": 2, "decoded exemplars": 4, "made up": 4, "decoded after the task": 6
    }  # fmt: skip
    assert len(chart.figure.layout.images) == 2 + 2 + 2 + 4 + 4 + 4 + 2


def test_what_is_replayed_is_cut_from_the_galleries(tmp_path: Path) -> None:
    classes, grey, bright = [f"class {j}" for j in range(8)], 90, 200
    for method, kept in (("hr", True), ("mfcl", False), ("lwf", None)):
        folder = write_run(tmp_path, method)
        gallery = Gallery(folder)
        for t in range(4):
            seen = {j: torch.full((1, 8, 8), grey + j, dtype=torch.uint8) for j in range(2 * t + 2)}
            made_up = {j: torch.full((1, 8, 8), bright, dtype=torch.uint8) for j in seen}
            gallery.add(t, {j: p for j, p in seen.items() if j >= 2 * t}, seen if kept else {}, made_up)
        if kept is not None:
            gallery.save(classes, 4)
            with Image.open(folder / "replay.png") as page:  # what keeps nothing has no columns for it
                assert page.width == LABELS + (6 if kept else 5) * (48 + GAP)
                assert page.getpixel((LABELS + 52 + 20, HEADER + 20))[0] == (grey if kept else bright)
    (write_run(tmp_path, "glfc") / "replay.png").write_bytes(b"torn")
    chart = made(what_is_replayed(evidence(tmp_path)))
    assert [row["method"] for row in rows(chart)] == ["mfcl", "hr"]
    texts = [note.text for note in chart.figure.layout.annotations]
    assert texts[:3] == ["real images (hr)", "mfcl", "hr"]
    strips = [Image.open(io.BytesIO(base64.b64decode(i.source.split(",")[1]))) for i in chart.figure.layout.images]
    assert len(strips) == 4, "of the real images and of mfcl one, of hr two"
    assert [strip.getpixel((3 * (48 + 4) + 20, 20))[0] for strip in strips] == [grey + 3, bright, grey + 3, bright]
    assert "is left out" in str(what_is_replayed(evidence(tmp_path / "digits" / "lwf")))


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")
def test_figures_are_written_as_png_and_pdf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs", "hr")
    torn = write_run(tmp_path / "runs", "lwf")
    (torn / "ledger.jsonl").write_bytes(b"")
    monkeypatch.setattr(charts, "CHARTS", (charts.accuracy, charts.forgetting))  # what a browser needs a second for
    monkeypatch.setattr(sys, "argv", ["fcil", "figures", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    said = capsys.readouterr()
    assert f"left out: {torn}" in said.err and "Traceback" not in said.err
    files = sorted(path.name for path in (tmp_path / "out" / "digits-quick").iterdir())
    assert files == [f"{name}.{kind}" for name in ("accuracy", "figure-1", "forgetting") for kind in ("pdf", "png")]
    with Image.open(tmp_path / "out/digits-quick/forgetting.png") as picture:
        assert picture.size == (2 * WIDTH, 2 * 460) and len(picture.convert("RGB").getcolors(100_000)) > 20
    assert (tmp_path / "out/digits-quick/accuracy.pdf").read_bytes().startswith(b"%PDF")
    assert "6 files" in said.out


def test_a_figure_in_a_file_says_what_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs", "hr", 0)
    write_run(tmp_path / "runs", "hr", 1)
    write_run(tmp_path / "runs", "lwf", 0)
    drawn: list[Any] = []
    monkeypatch.setattr("fcil.report.figures._render", lambda figures, files: drawn.extend(figures))
    write_figures([tmp_path / "runs"], tmp_path / "out")
    assert {figure.layout.title.subtitle.text for figure in drawn} == {"digits, quick protocol; 1 to 2 seeds a method"}
    assert all("?:" not in figure.layout.title.text for figure in drawn) and len(drawn) > 20


def test_without_a_browser_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs", "hr")
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    said = "drawn by a browser, Chrome or Chromium, and none could be started; .*apt-get install chromium"
    with pytest.raises(UserError, match=said):
        write_figures([tmp_path / "runs"], tmp_path / "out")
    (tmp_path / "here").mkdir()
    with pytest.raises(UserError, match=said):
        write_figures([tmp_path / "runs"], tmp_path / "here")
    assert not (tmp_path / "out").exists() and list((tmp_path / "here").iterdir()) == []


def test_without_kaleido_one_sentence_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs", "hr")
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(UserError, match=r"figures need the package kaleido; .*constraints.txt -e '\.\[report\]'"):
        write_figures([tmp_path / "runs"], tmp_path / "out")


def test_no_run_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no run to draw: .*nowhere"):
        write_figures([tmp_path / "nowhere"], tmp_path / "out")
    (tmp_path / "file").write_text("")
    write_run(tmp_path / "runs", "hr")
    with pytest.raises(UserError, match="cannot write to"):
        write_figures([tmp_path / "runs"], tmp_path / "file" / "out")
