"""The report page: its numbers are the ledgers', no folder can break it, and a browser draws it without a network."""

import csv
import io
import json
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import reduce
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fcil.bench.page import TERMS, made_up_run, measure
from fcil.blocks.centroids import REST
from fcil.cli import main
from fcil.errors import UserError
from fcil.files import sha256
from fcil.methods import METHODS
from fcil.records import write_tensors
from fcil.report import charts
from fcil.report.apart import change_later
from fcil.report.centroid_map import flattened
from fcil.report.drawing import Chart
from fcil.report.evidence import Evidence, Group, gather
from fcil.report.figures import all_charts
from fcil.report.page import page_of, pictures_of, write_page
from fcil.report.views import FEW, kind_of, selections
from fcil.report.watch import Live, served
from fcil.results.ledger import read, result_of

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


def write_run(
    root: Path, method: str, seed: int = 0, tasks: int = 3, clients: int = 4, old: bool = False, finish: bool = True,
    **settings: Any,
) -> Path:  # fmt: skip
    """Write a run folder such as `fcil run` leaves, with made-up numbers."""
    folder = root / "made-up" / ",".join([method, *(f"{k}={v}" for k, v in settings.items())]) / str(seed)
    made_up_run(folder, method, seed, tasks, clients, apart=not old, settings=settings)
    if not finish:
        (folder / "result.json").unlink()
    if method == "hr":
        points = torch.randn(2 * tasks, 5, generator=torch.Generator().manual_seed(seed))
        write_tensors(
            folder / "model.safetensors", {"centroids": points, "seen": torch.ones(2 * tasks, dtype=torch.bool)}, {}
        )
        (folder / "config.toml").write_text("[config]\nspacing = 5.0\n")
        Image.effect_noise((320, 200), 60).convert("RGB").save(folder / "replay.png")
    return folder


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    for method in ("finetune", "joint", "hr", "icarl"):
        for seed in range(3):
            write_run(tmp_path, method, seed)
    write_run(tmp_path, "hr", 0, memory=4)
    (found,), left_out = gather([tmp_path])
    assert left_out == []
    return found


def table(chart: Chart) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(chart.csv)))


def view(chart: Chart, name: str) -> Any:
    return next(view.figure for view in chart.views if view.name == name)


def made(draw: Callable[[Evidence], Chart | str], evidence: Evidence) -> Chart:
    chart = draw(evidence)
    assert isinstance(chart, Chart), chart
    return chart


def test_groups_keep_all_seeds_and_name_only_what_differs(evidence: Evidence) -> None:
    assert [g.label for g in evidence.groups] == ["finetune", "icarl", "hr", "hr (memory=4)", "joint"]
    assert [len(g.trials) for g in evidence.groups] == [3, 3, 3, 1, 3]


def test_settings_that_all_share_stand_in_the_title(tmp_path: Path) -> None:
    for method in ("hr", "icarl"):
        write_run(tmp_path, method, alpha=0.1, **({"memory": 2} if method == "hr" else {}))
    (found,), _ = gather([tmp_path])
    assert [g.label for g in found.groups] == ["icarl", "hr (memory=2)"]
    assert found.title == "made-up, quick protocol, with alpha=0.1"


def test_accuracy_is_that_of_the_results(evidence: Evidence) -> None:
    chart = made(charts.accuracy, evidence)
    final, average = chart.figure.data[:2]
    assert list(final.x) == [g.row.final.mean for g in evidence.groups]
    assert list(final.error_x.array) == [g.row.final.sem for g in evidence.groups] and final.error_x.array[3] is None
    assert list(average.x) == [g.row.average.mean for g in evidence.groups]
    lines = {shape.name: shape.x0 for shape in chart.figure.layout.shapes}
    bounds = {g.label: g.row.final.mean for g in evidence.groups}
    assert lines == {"lower bound: finetune": bounds["finetune"], "upper bound: joint": bounds["joint"]}
    results = [trial.run.result["final"] for trial in evidence.groups[2].trials]
    assert float(table(chart)[2]["final"]) == pytest.approx(sum(results) / 3)


@pytest.mark.parametrize(
    ("draw", "column", "value"),
    [
        (charts.accuracy_after_each_task, "accuracy", lambda result, t: result["overall"][t]),
        (charts.forgetting, "forgetting", lambda result, t: result["forgetting"] if t == 2 else None),
    ],
)
def test_curves_are_those_of_the_results(
    draw: Callable[[Evidence], Chart | str], column: str, value: Callable[[Any, int], float | None], evidence: Evidence
) -> None:
    rows = table(made(draw, evidence))
    results = {
        (g.row.method, trial.seed): trial.run.result
        for g in evidence.groups
        for trial in g.trials
        if not g.row.settings
    }
    assert len(rows) == 13 * 3
    compared = 0
    for row in rows:
        t = int(row["after_task"]) - 1
        expected = None if row["settings"] else value(results[row["method"], int(row["seed"])], t)
        if expected is not None:
            assert float(row[column]) == pytest.approx(expected)
            compared += 1
    assert compared >= 12


def test_matrix_bytes_seconds_and_clients_are_those_of_the_results(evidence: Evidence) -> None:
    one = evidence.groups[3]  # a single run, so its means are its values
    result = one.trials[0].run.result
    (heat,) = view(made(charts.matrices, evidence), "hr (memory=4)").data
    assert [[v for v in row if v is not None] for row in heat.z] == result["matrix"]
    (whole,) = view(made(charts.matrices, evidence), "all methods").data
    assert list(whole.z[3]) == result["matrix"][-1]
    rows = [r for r in table(made(charts.traffic, evidence)) if r["settings"] == "memory=4"]
    assert sum(int(r["down"]) for r in rows) == result["down"] and sum(int(r["up"]) for r in rows) == result["up"]
    assert max(int(r["kept_max"]) for r in rows) == result["memory_bytes"] == 640
    rows = [r for r in table(made(charts.time_by_part, evidence)) if r["settings"] == "memory=4"]
    assert sum(float(r["seconds"]) for r in rows) == pytest.approx(result["seconds"]["total"])
    box = made(charts.accuracy_by_client, evidence).figure.data[3]
    assert list(box.x) == [v for v in result["per_client"] if v is not None] and len(box.x) == 3


def test_what_keeps_nothing_has_a_place_beside_the_logarithm(evidence: Evidence) -> None:
    chart = made(charts.accuracy_against_memory, evidence)
    by_name = {trace.name: trace for trace in chart.figure.data}
    assert list(by_name["finetune"].x) == ["0 B"] and list(by_name["icarl"].x) == [640.0]
    assert list(by_name["hr, by memory"].y) == [g.row.final.mean for g in evidence.groups[2:4]]


def test_forgetting_taken_apart_is_that_of_the_ledger(evidence: Evidence) -> None:
    trial = evidence.groups[3].trials[0]
    last = [line for line in read(trial.run.folder / "ledger.jsonl") if line["kind"] == "task"][-1]["decomposition"]
    row = next(
        r
        for r in table(made(charts.local_and_global, evidence))
        if r["settings"] == "memory=4" and r["after_task"] == "3"
    )
    assert {key: float(row[key]) for key in ("local", "global", "total", *TERMS)} == last["parts"]
    assert row["mean_prior"] == "" and float(row["mean_inter"]) == last["means"]["inter"]
    (heat,) = view(made(charts.confusion, evidence), "hr (memory=4)").data
    assert [[v for v in row if v is not None] for row in heat.z] == last["between"]
    (whole,) = view(made(charts.confusion, evidence), "all methods").data
    (_, (first, _), (second, _, _)) = last["between"]
    assert whole.z[3][0] == pytest.approx((first + second) / 2)
    ends = view(made(charts.local_and_global, evidence), "all methods, after the last task")
    assert [trace.x[3] for trace in ends.data] == [last["parts"]["local"], last["parts"]["global"]]
    mended = [r for r in table(made(charts.mended_later, evidence)) if r["settings"] == "memory=4"]
    assert [r["task"] for r in mended] == ["1", "2"] and float(mended[1]["one_task_later"]) == last["across_before"]


def test_confusion_is_mended_or_grown_where_seeds_agree(evidence: Evidence) -> None:
    falls = {"finetune": (0.3, 0.31, 0.29), "joint": (-0.3, -0.31, -0.29), "icarl": (0.3, -0.3, 0.1), "hr": (0.0, 0.0)}

    def told(group: Group) -> Group:
        """Return the method with these falls from a task's end to the next one's, seed by seed."""
        trials = []
        for trial, fall in zip(group.trials, falls[group.row.method], strict=False):
            apart = [replace(one, across=0.4, across_before=0.4 - fall) for one in trial.apart if one]
            trials.append(replace(trial, apart=apart))
        return replace(group, trials=tuple(trials))

    groups = tuple(told(group) for group in evidence.groups)
    changes = {group.label: change_later(group) for group in groups}
    assert changes["finetune"] == pytest.approx((-0.3, -0.32484, -0.27516), abs=1e-5), "4.3027 times 0.01 / sqrt(3)"
    assert {name: change.verdict for name, change in changes.items() if change} == {
        "finetune": "mended", "joint": "grown", "icarl": "neither", "hr": "neither",
    }  # fmt: skip
    assert changes["hr (memory=4)"] is None, "one seed says nothing"
    says = made(charts.mended_later, replace(evidence, groups=groups)).says
    assert "it is mended in: finetune. It has grown in: joint." in says


def test_centroids_are_measured_in_rest_distances(evidence: Evidence, tmp_path: Path) -> None:
    chart = made(charts.centroids, evidence)
    points = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).double()
    distances = torch.cdist(points, points).fill_diagonal_(torch.inf) / (REST * 5.0)
    nearest = [float(row["nearest_distance"]) for row in table(chart) if row["seed"] == "0"][:6]
    assert nearest == pytest.approx(distances.amin(1).tolist(), rel=1e-6)
    assert [row["task"] for row in table(chart)][:6] == ["1", "1", "2", "2", "3", "3"]


def test_points_of_a_plane_keep_their_distances() -> None:
    points = torch.tensor([[0.0, 0], [3, 0], [0, 4], [3, 4], [1, 1]]).double()
    distances = torch.cdist(points, points)
    flat = flattened(distances)
    assert torch.allclose(torch.cdist(flat, flat), distances, atol=1e-3)
    same = flattened(1 - torch.eye(4).double())  # as far apart as a plane allows: a square, by symmetry
    assert torch.pdist(same).min() > 0.5


def test_every_chart_has_title_axes_hover_and_data(evidence: Evidence) -> None:
    for draw in charts.CHARTS:
        chart = made(draw, evidence)
        assert chart.says.endswith(".") and chart.rows and all(len(row) == len(chart.columns) for row in chart.rows)
        assert len({view.name for view in chart.views}) == len(chart.views)
        for figure in (view.figure for view in chart.views):
            layout = figure.layout
            assert layout.title.text.startswith(chart.title)
            assert layout.xaxis.title.text or layout.xaxis2.title.text
            assert layout.yaxis.title.text or layout.yaxis.ticktext
            assert figure.data and all(trace.hovertemplate or trace.hoverinfo for trace in figure.data)


def test_many_methods_are_a_table_and_lines_by_family(tmp_path: Path) -> None:
    for method in ("finetune", "joint", "icarl", "glfc", "target", "mfcl", "remind", "hr", "hr-no-kd", "own.py"):
        write_run(tmp_path, method)
    (found,), _ = gather([tmp_path])
    chosen = {name: [group.label for group in groups] for name, groups in selections(found.groups)}
    assert len(found.groups) > FEW and len(list(chosen.values())[-1]) == 10
    assert chosen["with exemplars"] == ["finetune", "icarl", "glfc", "joint"]
    finals = {g.label: g.row.final.mean for g in found.groups}
    assert max(("icarl", "glfc"), key=lambda m: finals[m]) in chosen["the best of each family"]
    assert {"hr", "own.py", "remind"} < set(chosen["the best of each family"])
    assert "hr-no-kd" not in chosen["the best of each family"] and kind_of("hr-no-kd") == "hr and its ablations"
    over = made(charts.accuracy_after_each_task, found)
    assert over.views[0].name == "all methods" and over.figure.data[0].type == "heatmap"
    assert list(over.figure.data[0].z[1]) == found.groups[1].trials[0].overall
    lines = {trace.name: trace.line.color for trace in view(over, "the best of each family").data}
    assert len(set(lines.values())) == len(lines) - 1, "all colours differ, but those of the two bounds"
    memory = made(charts.accuracy_against_memory, found)
    legend = [trace.name for trace in memory.figure.data if trace.showlegend]
    assert sorted(legend) == sorted({kind_of(g.row.method) for g in found.groups})


def test_the_loss_is_that_of_the_rounds(evidence: Evidence) -> None:
    chart = made(charts.training_loss, evidence)
    assert [view.name for view in chart.views] == [g.label for g in evidence.groups]
    one = evidence.groups[3]
    lines = [line for line in read(one.trials[0].run.folder / "ledger.jsonl") if line["kind"] == "round"]
    figure = view(chart, one.label)
    assert list(figure.data[0].y) == [line["loss"] for line in lines] and len(figure.layout.shapes) == 2
    rows = [row for row in table(chart) if row["settings"] == "memory=4"]
    assert [(row["round"], row["task"]) for row in rows[-2:]] == [("5", "3"), ("6", "3")]


def test_every_seed_has_its_gallery_and_every_method_comes_first_with_one(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path, "hr", seed)
        shutil.copy(tmp_path / f"made-up/hr/{seed}/replay.png", write_run(tmp_path, "glfc", seed) / "replay.png")
    (found,), _ = gather([tmp_path])
    pictures, missing = pictures_of(found, 10**7)
    assert [(p.label, p.seed) for p in pictures] == [("glfc", 0), ("glfc", 1), ("hr", 0), ("hr", 1)] and not missing
    three = sum(len(p.url) for p in pictures) - min(len(p.url) for p in pictures[1::2])
    few, (sentence,) = pictures_of(found, three - 10)
    assert [(p.label, p.seed) for p in few] == [("glfc", 0), ("hr", 0)]
    assert sentence.startswith("2 of 4 galleries are left out")


def test_older_ledgers_leave_a_chart_out_and_say_so(tmp_path: Path) -> None:
    write_run(tmp_path, "icarl", old=True)
    (found,), _ = gather([tmp_path])
    for draw in (charts.local_and_global, charts.mended_later, charts.confusion, charts.centroids):
        sentence = draw(found)
        assert isinstance(sentence, str) and "is left out:" in sentence
    page = page_of([found], [])
    assert "no ledger here has its decomposition" in page and "no run here has a replay.png" in page


def test_one_task_and_one_run_are_enough(tmp_path: Path) -> None:
    write_run(tmp_path, "hr", tasks=1)
    (found,), _ = gather([tmp_path])
    assert charts.forgetting(found) == "Forgetting is left out: it takes two tasks."
    assert "<h1>hr on made-up</h1>" in page_of([found], [])


def tear(folder: Path) -> None:
    ledger = (folder / "ledger.jsonl").read_bytes()
    (folder / "ledger.jsonl").write_bytes(ledger[:-40])


def foreign_decomposition(folder: Path) -> None:
    lines = read(folder / "ledger.jsonl")
    lines[-1]["decomposition"] = {"parts": 3}
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = json.loads((folder / "result.json").read_text())
    result["ledger_sha256"] = sha256(folder / "ledger.jsonl")
    (folder / "result.json").write_text(json.dumps(result))


BROKEN: dict[str, Callable[[Path], object]] = {
    "torn": tear,
    "empty ledger": lambda folder: (folder / "ledger.jsonl").write_bytes(b""),
    "no ledger": lambda folder: (folder / "ledger.jsonl").unlink(),
    "foreign": lambda folder: (folder / "result.json").write_text('{"score": 3}'),
    "not JSON": lambda folder: (folder / "result.json").write_bytes(b"\x00\xff"),
    "unfinished": lambda folder: (folder / "result.json").unlink(),
    "foreign decomposition": foreign_decomposition,
    "other format": lambda folder: (folder / "result.json").write_text('{"format": 99}'),
    "emptied": lambda folder: [file.unlink() for file in folder.iterdir()],
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_run_is_named_and_skipped(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = write_run(tmp_path, "icarl"), write_run(tmp_path, "lwf")
    BROKEN[kind](bad)
    monkeypatch.setattr(sys, "argv", ["fcil", "report", str(good), str(bad), "--out", str(tmp_path / "page.html")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    said = capsys.readouterr()
    (sentence,) = said.err.strip().splitlines()
    assert sentence.startswith("fcil: left out: ") and str(bad) in sentence and "Traceback" not in sentence
    page = (tmp_path / "page.html").read_text()
    assert "Left out: 1" in page and str(bad) in page and "icarl on made-up" in page


ODD = [None, True, -1, 2.5, 1e308, 10**400, float("nan"), float("inf"), "</script>", [], [None], [[]], {}, {"a": 1}]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where something stands in a JSON value, by the keys that lead there."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


@settings(max_examples=40)
@given(data=st.data())
def test_whatever_a_ledger_says_the_charts_are_drawn_or_it_is_named(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("odd")
    write_run(root, "lwf")
    folder = write_run(root, "icarl")
    lines = read(folder / "ledger.jsonl")
    *path, last = data.draw(st.sampled_from(list(places(lines))))
    changed = reduce(lambda value, key: value[key], path, lines)
    changed[last] = data.draw(st.sampled_from(ODD))
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with suppress(UserError):  # else the result no longer fits the ledger, which is seen, too
        result = json.loads((folder / "result.json").read_text()) | result_of(read(folder / "ledger.jsonl"))
        (folder / "result.json").write_text(json.dumps(result | {"ledger_sha256": sha256(folder / "ledger.jsonl")}))
    (found, *_), left_out = gather([root])
    assert len(found.groups) + len(left_out) == 2 and all(str(folder) in sentence for sentence in left_out)
    for draw in all_charts():
        chart = draw(found)
        assert isinstance(chart, str) or all(json.loads(view.figure.to_json())["data"] for view in chart.views)


def test_a_missing_folder_is_named_and_a_repeated_one_counts_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "icarl")
    (found,), left_out = gather([folder, tmp_path, tmp_path / "nowhere"])
    assert len(found.groups[0].trials) == 1
    assert len(left_out) == 1 and "there is no folder" in left_out[0] and "nowhere" in left_out[0]


def test_two_results_of_one_seed_show_the_first(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", "icarl")
    other = write_run(tmp_path / "b", "icarl", tasks=4)
    (found,), left_out = gather([one, other])
    assert found.groups[0].trials[0].run.folder == one
    assert left_out == [f"{other}: the same method, settings and seed as {one}, but another result; the first is shown"]


def test_nothing_left_is_one_clear_error(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "icarl", finish=False)
    with pytest.raises(UserError, match="there is no run to report: .*has not finished"):
        write_page([folder], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    with pytest.raises(UserError, match="is a folder"):
        write_page([folder], tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        write_page([folder], tmp_path / "no" / "page.html")


@pytest.mark.parametrize("package", ["plotly", "jinja2"])
def test_without_the_extra_one_sentence_names_it(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "icarl")
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("charts", "courses"):
        monkeypatch.delitem(sys.modules, f"fcil.report.{name}")
    told = rf"a page needs the package {package}.*; .*constraints.txt -e '\.\[report\]'"
    with pytest.raises(UserError, match=told):
        write_page([tmp_path], tmp_path / "page.html")
    (tmp_path / "made-up/icarl/0/result.json").unlink()
    with pytest.raises(UserError, match=told), served(tmp_path / "made-up/icarl/0"):
        pass


def test_a_torn_picture_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "hr")
    content = (folder / "replay.png").read_bytes()
    (folder / "replay.png").write_bytes(content[: len(content) // 2])
    write_page([folder], tmp_path / "page.html")
    assert "is not a readable picture" in (tmp_path / "page.html").read_text()


def test_a_page_of_one_run_does_not_speak_of_a_view_of_all_methods(tmp_path: Path, evidence: Evidence) -> None:
    (one,), _ = gather([write_run(tmp_path / "alone", "hr")])
    assert "All methods:" in page_of([evidence], []) and "All methods:" not in page_of([one], [])


def test_little_forgetting_looks_little(evidence: Evidence) -> None:
    drawn = charts.forgetting(evidence)
    assert isinstance(drawn, charts.Chart)
    lines = drawn.views[0].figure.layout.yaxis
    assert lines.autorangeoptions.include == (0, 5), "five points, or as many as there are"


def test_a_name_cannot_become_a_part_of_the_page(tmp_path: Path) -> None:
    write_run(tmp_path, "hr", note="</script><script>alert(1)</script><img src=x onerror=alert(2)>".replace("/", "\\"))
    (found,), _ = gather([tmp_path])
    page = page_of([found], ["<b>left</b>"])
    assert "<script>alert" not in page and "<img src=x" not in page and "<b>left" not in page


def test_the_same_runs_give_the_same_page(evidence: Evidence) -> None:
    assert page_of([evidence], []) == page_of([evidence], [])


def test_twenty_methods_with_ten_seeds_stay_small(tmp_path: Path) -> None:
    for place, method in enumerate(list(METHODS)[:19]):
        for seed in range(10):
            folder = write_run(tmp_path, method, seed, tasks=10, clients=50)
            if seed == 0 and place < 8:
                Image.effect_noise((770, 1000), 90).convert("RGB").save(folder / "replay.png")  # noise packs worst
    for seed in range(10):
        write_run(tmp_path, "own.py", seed, tasks=10, clients=50)
    out = tmp_path / "page.html"
    assert write_page([tmp_path], out) == []
    page = out.read_text()
    assert "20 methods on made-up" in page and "galleries are left out to keep this page small" in page
    assert 5e6 < out.stat().st_size < 15e6


def test_a_run_is_watched_while_it_goes_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "hr", tasks=2)
    result = (folder / "result.json").rename(tmp_path / "result.json")
    ledger = folder / "ledger.jsonl"
    whole = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(whole[:2]))

    def get(path: str, host: str = "") -> str:
        address = f"http://127.0.0.1:{server.server_port}{path}"
        with urllib.request.urlopen(urllib.request.Request(address, headers={"Host": host} if host else {})) as answer:
            return str(answer.read().decode())

    with served(folder) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            assert "Training loss, round by round" in get("/") and "task 1, round 1 of 2" in get("/")
            assert "Left out" not in get("/")
            losses = json.loads(get("/loss"))["views"][0]["data"][0]["y"]
            assert losses == [json.loads(whole[1])["loss"]]
            ledger.write_bytes(b"".join(whole[:5]) + whole[5][:10])  # the last line is still being written
            assert json.loads(get("/state")) == {"drawn": "1", "rounds": 3, "now": "task 2, round 1 of 2"}
            page = get("/")
            assert '<span id="now">task 2, round 1 of 2</span>' in page and "connect-src &#39;self&#39;" in page
            ledger.write_bytes(b"".join(whole))
            assert json.loads(get("/state")) == {"drawn": "2", "rounds": 4, "now": "task 3 begins"}
            assert 'state.drawn !== "2"' in get("/")
            result.rename(folder / "result.json")
            assert json.loads(get("/state"))["now"] == "finished" and "/state" not in get("/")
            for path, host, code in (("/ledger.jsonl", "", 404), ("/", "elsewhere.example", 403)):
                with pytest.raises(urllib.error.HTTPError) as refused:
                    get(path, host)
                assert refused.value.code == code
                refused.value.close()
        finally:
            server.shutdown()
            thread.join()


def test_a_foreign_ledger_is_said_and_not_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "hr", tasks=2, finish=False)
    (folder / "ledger.jsonl").write_text('{"kind": "round", "task": "first"}\n')
    page = Live(folder).page()
    assert "There is nothing to draw yet" in page and f"the ledger of {folder} is not one of ours" in page


def test_what_has_not_begun_is_not_watched(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run that has begun"), served(tmp_path):
        pass


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")
def test_the_page_of_many_runs_is_timed() -> None:
    found = measure(methods=6, seeds=2, turns=1)
    assert found.runs == 12 and len(found.many) == len(found.one) == 1 and found.ratio > 0
    assert 6e6 < found.size < 15e6 and "times as long as that of one run" in str(found)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every chart and a gallery, and a folder for what is downloaded beside it."""
    root = tmp_path_factory.mktemp("page")
    for method in ("finetune", "joint", "hr", "icarl"):
        for seed in range(2):
            write_run(root / "runs", method, seed)
    write_page([root / "runs"], root / "page.html")
    (root / "downloads").mkdir()
    return root / "page.html"


@pytest.fixture(params=[(360, "light"), (1280, "dark")], ids=["phone", "desktop"])
def browser(request: pytest.FixtureRequest, page: Path) -> Iterator[Any]:
    """The page, opened from its file in headless Chromium."""
    with chromium(*request.param) as driver:
        where = {"behavior": "allow", "downloadPath": str(page.parent / "downloads")}
        driver.execute_cdp_cmd("Browser.setDownloadBehavior", where)
        driver.get(page.as_uri())
        waited(driver, lambda: driver.execute_script("return document.documentElement.dataset.drawn"))
        yield driver


@contextmanager
def chromium(width: int, scheme: str) -> Iterator[Any]:
    if not CHROMIUM or not DRIVER:
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    quiet = Service(DRIVER, log_output=os.devnull)
    driver = webdriver.Chrome(options=options, service=quiet)
    try:
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        colours = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", colours)
        yield driver
    finally:
        driver.quit()


def waited(driver: Any, what: Callable[[], Any]) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(driver, 60, poll_frequency=0.05).until(lambda _: what())


MARKS = ".scatterlayer .point, .barlayer .point path, .heatmaplayer image, .boxlayer path.box, .boxlayer .point"


def test_the_page_in_a_browser(browser: Any, page: Path) -> None:
    shown = browser.execute_script("return [...document.querySelectorAll('.chart')].map(chart => chart.id)")
    assert len(shown) == len(charts.CHARTS)
    scheme = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert scheme in ("rgb(255, 255, 255)", "rgb(27, 27, 27)")
    wide = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1], "the page must not scroll sideways"
    for name in shown:
        marks = browser.execute_script(f"return document.getElementById('{name}').querySelectorAll('{MARKS}').length")
        assert marks > 0, f"{name} is empty"
        assert any(letter.isdigit() for letter in hovered(browser, name)), f"{name} shows no value under the mouse"
    assert_pictures_and_csv(browser, page, shown)
    assert_charts_keep_their_height(browser)
    assert_views_and_runs_can_be_chosen(browser)
    errors = [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert errors == []
    assert asked(browser) == {page.as_uri()}


def assert_charts_keep_their_height(driver: Any) -> None:
    """Make the window lower, as a phone does whose address bar comes back: no chart may flow into the next."""
    width = driver.execute_script("return innerWidth")
    size = {"width": width, "height": 650, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    waited(driver, lambda: driver.execute_script("return innerHeight") == 650)
    sizes = driver.execute_async_script(
        """const size = element => [element.clientHeight, element.clientWidth];
        const sizes = () => charts.map(chart => [...size(chart), ...size(chart.querySelector(".main-svg"))]);
        setTimeout(() => arguments[0](sizes()), 400)"""
    )
    assert all(high >= drawn_high and wide == drawn_wide for high, wide, drawn_high, drawn_wide in sizes), sizes


def assert_views_and_runs_can_be_chosen(driver: Any) -> None:
    choices = driver.find_elements("css selector", "[data-view]")
    assert len(choices) >= 6
    for select in choices:
        name = select.get_attribute("data-view")
        for place in range(len(select.find_elements("tag name", "option"))):
            choose(driver, select, place)
            inside = f"document.getElementById('{name}')"
            marks, drawn, meant = driver.execute_script(
                f"""const data = traces => JSON.stringify(traces.map(trace => [trace.type, trace.x, trace.y, trace.z]));
                return [{inside}.querySelectorAll('{MARKS}').length, data({inside}.data),
                        data(contents.get('{name}').views[{place}].data)]"""
            )
            assert marks > 0 and drawn == meant, f"{name}, view {place}"
    select = driver.find_element("css selector", "[data-pictures]")
    first = driver.execute_script("return document.images[0].src")
    choose(driver, select, 1 - int(select.get_attribute("value")))
    assert driver.execute_script("return document.images[0].src") != first


def choose(driver: Any, select: Any, place: int) -> None:
    driver.execute_script(
        "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))", select, place
    )


def test_a_run_is_watched_in_a_browser(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "hr", tasks=2, finish=False)
    ledger = folder / "ledger.jsonl"
    whole = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(whole[:2]))
    points = "return document.querySelectorAll('#now-training-loss .scatterlayer .point').length"
    with chromium(1280, "light") as driver, served(folder) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            driver.get(f"http://127.0.0.1:{server.server_port}")
            assert waited(driver, lambda: driver.execute_script(points)) == 1
            ledger.write_bytes(b"".join(whole[:3]))
            waited(driver, lambda: driver.execute_script(points) == 2)
            assert driver.find_element("id", "now").text == "task 1, round 2 of 2"
            ledger.write_bytes(b"".join(whole[:4]))
            waited(driver, lambda: driver.find_elements("id", "part-1-accuracy"))  # a task has ended: all else is there
            assert [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
        finally:
            driver.get("about:blank")
            server.shutdown()
            thread.join()


def hovered(driver: Any, name: str) -> str:
    """Move the mouse over a mark of a chart, and return what is shown."""
    x, y = driver.execute_script(
        """const mark = [...document.getElementById(arguments[0]).querySelectorAll(arguments[1])].at(-1);
        mark.scrollIntoView({block: "center"});
        const box = mark.getBoundingClientRect();
        return [box.x + box.width / 2, mark.tagName === "image" ? box.y + box.height - 6 : box.y + box.height / 2]""",
        name,
        MARKS,
    )
    text = "return document.querySelector(`#${arguments[0]} .hoverlayer`).textContent"

    def moved() -> str:
        for step in (3, 0):
            driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x + step, "y": y})
        return str(driver.execute_script(text, name))

    return str(waited(driver, moved))


def assert_pictures_and_csv(driver: Any, page: Path, shown: list[str]) -> None:
    sizes = driver.execute_script("return [...document.images].map(image => image.naturalWidth)")
    assert sizes == [320, 320]
    (found,), _ = gather([page.parent / "runs"])
    for place, (name, draw) in enumerate(zip(shown, charts.CHARTS, strict=True)):
        expected = made(draw, found).csv
        assert driver.execute_script(f"return contents.get('{name}').csv") == expected
        if place % 3 == 0:  # a browser refuses more than ten files in a second
            driver.find_element("css selector", f"[data-csv={name}]").click()
            file = page.parent / "downloads" / f"{name}.csv"
            waited(driver, lambda file=file, expected=expected: file.exists() and file.read_text() == expected)
            file.unlink()


def asked(driver: Any) -> set[str]:
    """Return all addresses that the browser has asked for, what is inside the page aside."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert sent
    return {url for url in sent if not url.startswith(("data:", "blob:"))}
