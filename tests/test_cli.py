"""The command line as a newcomer types it, when all goes well."""

import csv
import json
import os
import pty
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from fcil.methods import METHODS, finetune
from fcil.report import progress
from fcil.scenario.benchmarks import benchmark
from tests.typed import TINY, class_folders, done, ended, fingerprint, matrix, start, typed

LONGER = "--set tasks=2 --set rounds=4 --set steps=2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, as a sweep leaves it."""
    folder = tmp_path_factory.mktemp("sweep") / "runs"
    said = done(f"sweep --methods finetune,lwf --seeds 0-1 {TINY} --set memory=1,2 --out {folder}")
    assert "8 runs, 0 of them finished before" in said.out
    return folder


def test_help_and_lists_do_not_import_torch() -> None:
    lines = [
        ["--help"],
        [],
        ["--version"],
        ["run", "--help"],
        ["methods"],
        ["benchmarks"],
        ["benchmarks", "digits"],
        ["rn"],
    ]
    code = (
        "import sys\n"
        "from fcil.cli import main\n"
        f"for words in {lines!r}:\n"
        "    sys.argv = ['fcil', *words]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'sklearn', 'PIL', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "Usage: fcil" in ran.stdout and "T tasks of K classes" in ran.stdout


def test_what_there_is_gets_listed() -> None:
    listed = done("methods").out
    assert all(name in listed for name in METHODS)
    assert "lr" in done("methods finetune").out and "learning rate" in done("methods finetune").out
    assert "cifar100-10x10" in done("benchmarks").out
    shown = done("benchmarks digits").out
    assert "classes_per_task" in shown and "Protocol quick" in shown
    assert done("--help").out == done("-h").out == done("").out
    assert done("--version").out.startswith("fcil 0.")


@pytest.mark.parametrize("command", ["run", "methods", "benchmarks", "table", "report", "predict", "certs", "status"])
def test_help_says_what_every_argument_is(command: str) -> None:
    said = done(f"{command} --help").out
    assert "Positional" not in said and said.count("Arguments:\n") == 1, "they are said once"
    told = said.partition("Arguments:\n")[2].partition("\nOptions:")[0]
    assert told
    for line in told.strip().splitlines():
        assert len(line.partition("  [required]")[0].partition("  [default")[0].split()) > 1, line


def test_the_partition_is_shown_and_drawn(tmp_path: Path) -> None:
    said = done(f"benchmarks digits --show --set tasks=2 --out {tmp_path}/shares.png")
    assert "lda_equal (alpha 1), seed 0" in said.out and "drawn in" in said.out
    assert (tmp_path / "shares.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_says_what_it_does_and_shows_what_came_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = done(f"run finetune --seed 3 {LONGER}")
    folder = Path("runs/digits/finetune,rounds=4,steps=2,tasks=2/3")
    assert "2 tasks of 2 classes; 10 clients, 5 of them in each round; 4 rounds a task, 2 steps of 32" in said.out
    assert "task 1 of 2 learned: " in said.out and "% on all 2 classes so far, about" in said.out
    assert f"saved in {folder}; compare runs with: fcil table runs/digits" in said.out
    result = json.loads((folder / "result.json").read_text())
    assert f"{result['final']:.1f}" in said.out and f"{result['forgetting']:.1f}" in said.out
    assert result["command"] == "fcil run finetune --seed 3 " + LONGER

    before = fingerprint(tmp_path)
    again = done(f"run finetune --seed 3 {LONGER}")
    assert f"{folder} is finished" in again.out and "learned" not in again.out
    assert again.out.splitlines()[1:] == said.out.splitlines()[-len(again.out.splitlines()) + 1 :]
    assert done(f"run --resume {folder}").out == again.out
    assert fingerprint(tmp_path) == before


def test_where_there_is_no_terminal_progress_is_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET", -1.0)
    said = done(f"run finetune {LONGER} --set evaluate_every=2 --out {tmp_path}/run")
    assert "task 1 of 2, round 3 of 4, " in said.out and "% so far, about" in said.out and "s left" in said.out
    assert "\x1b" not in said.out and "\r" not in said.out


def test_a_task_of_one_class_is_said_as_one(tmp_path: Path) -> None:
    said = done(f"run finetune {TINY} --set classes_per_task=1 --out {tmp_path}/run")
    assert "% on the only class so far" in said.out and "% on all 2 classes so far" in said.out


def test_a_terminal_shows_a_bar_and_keeps_no_trace_of_it(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    how = "TERM=xterm-256color COLUMNS=100 LINES=30"
    process = start(f"run finetune {LONGER} --out run", tmp_path, before=f"export {how};", stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # the other end has gone
            break
        if not piece:
            break
        shown += piece
    os.close(master)
    assert ended(process).code == 0
    text = shown.decode()
    bar, _, after = text.rpartition("\x1b[?25h")  # the cursor comes back when the bar goes
    assert "finetune: task 2/2 round 4/4" in bar and "━" in bar
    assert "task 2 of 2 learned" in bar
    assert after.startswith("\r\x1b[1A\x1b[2K")  # and its line is wiped
    assert "━" not in after and "saved in run" in after and "Traceback" not in text


def test_ones_own_images(tmp_path: Path) -> None:
    data = class_folders(tmp_path / "my images")
    short = "--set network=small --set rounds=1 --set steps=1"
    said = done(f"run finetune --data '{data}' --clients 3 {short} --out {tmp_path}/run")
    assert "finetune on my images" in said.out and "4 tasks of 1 class; 3 clients, 3 of them" in said.out
    picture = data / "class1" / "0.png"
    named = done(f"predict {tmp_path}/run '{picture}' '{picture}' --top 9").out.splitlines()
    assert len(named) == 2 and named[0] == named[1]
    assert all(f"class{j} (" in named[0] for j in range(4)) and named[0].startswith(f"{picture}: ")


def test_ones_own_method(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(Path(finetune.__file__).read_text())
    said = done(f"run {file} {TINY} --out {tmp_path}/own")
    assert "mine.py on digits: a method of your own" in said.out and "mine.py on digits, quick protocol" in said.out
    done(f"run finetune {TINY} --out {tmp_path}/theirs")
    assert matrix(tmp_path / "own") == matrix(tmp_path / "theirs")
    assert "mine.py (rounds=1" in done(f"table {tmp_path}/own --markdown").out
    assert "learning rate" in done(f"methods {file}").out


def test_ones_own_benchmark(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text('base = "digits"\ntasks = 2\nclients = 4\nactive = 2\n')
    said = done(f"run finetune --benchmark {tmp_path}/small.toml --set rounds=1 --set steps=1 --out {tmp_path}/run")
    assert "finetune on small" in said.out and "4 clients, 2 of them" in said.out


def test_a_benchmarks_paths_start_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below" / "digits").mkdir(parents=True)
    (tmp_path / "below" / "images").mkdir()
    for name, text in {
        "parent": 'base = "digits"\ntasks = 2\n',
        "child": 'base = "parent.toml"\nclients = 4\nactive = 2\n',
        "said": 'base = "parent.toml"\ndataset = "digits"\n',
        "own": 'base = "parent.toml"\ndataset = "images"\n',
        "heir": 'base = "../below/own.toml"\n',
        "made-up": 'dataset = "synthetic-20x10"\n',
    }.items():
        (tmp_path / "below" / f"{name}.toml").write_text(text)
    (tmp_path / "synthetic-20x10").mkdir()
    monkeypatch.chdir(tmp_path)
    child = benchmark("below/child.toml")
    assert (child.name, child.dataset, child.tasks, child.clients) == ("child", "digits", 2, 4)
    assert benchmark("below/said.toml").dataset == "digits"
    for name in ("own", "heir"):
        assert benchmark(f"below/{name}.toml").dataset == str(tmp_path.resolve() / "below" / "images")
    assert benchmark("below/made-up.toml").dataset == "synthetic-20x10"


def test_long_settings_have_a_folder_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    order = ",".join("0123456789")
    done(f"run finetune {TINY} --set class_order={order} --set memory={'0' * 300}5")
    (folder,) = (tmp_path / "runs" / "digits").iterdir()
    assert folder.name.startswith(f"finetune,class_order={order},memory=000")


def test_a_sweep_runs_what_is_missing(runs: Path) -> None:
    before = fingerprint(runs)
    said = done(f"sweep --methods finetune,lwf --seeds 0-1 {TINY} --set memory=1,2 --out {runs}")
    assert "8 runs, 8 of them finished before" in said.out and "run 1 of" not in said.out
    assert fingerprint(runs) == before
    folders = sorted(str(path.parent.relative_to(runs)) for path in runs.rglob("result.json"))
    assert folders[0] == "digits/finetune,memory=1,rounds=1,steps=1,tasks=2/0" and len(folders) == 8


def test_a_sweep_does_a_run_once_however_often_it_is_named(tmp_path: Path) -> None:
    said = done(f"sweep --methods finetune,finetune --seeds 0,0-0 {TINY} --set lr=0.1,0.1 --out {tmp_path}")
    assert said.out.startswith("1 run, 0 of them finished before\nrun 1 of 1: ")


def test_tables_in_every_format(runs: Path) -> None:
    shown = done(f"table {runs}").out
    assert "digits, quick protocol" in shown and "±" in shown and "finetune is the lower bound" in shown
    markdown = done(f"table {runs} --markdown").out
    assert "| method |" in markdown and "lwf (memory=1, rounds=1, steps=1, tasks=2)" in markdown
    latex = done(f"table {runs} --latex").out
    assert r"\toprule" in latex and r"$\pm$" in latex
    rows = list(csv.DictReader(done(f"table {runs} --csv").out.splitlines()))
    assert {(row["method"], row["seeds"]) for row in rows} == {("finetune", "2"), ("lwf", "2")} and len(rows) == 4
    results = [json.loads(path.read_text()) for path in runs.glob("digits/lwf,memory=2,*/*/result.json")]
    mine = next(row for row in rows if row["method"] == "lwf" and "memory=2" in row["settings"])
    assert float(mine["final"]) == pytest.approx(sum(result["final"] for result in results) / 2)
    assert done(f"table {runs} --verify").out == "8 runs verified: every result follows from its ledger\n"


def test_the_hybrids_in_every_format() -> None:
    told = " ".join(done("table --hybrids").out.split())  # columns break lines
    assert "ictrl" in told and "product quantisation: 256" in told and "subspace" in told
    assert done("table --hybrids --markdown").out.startswith("| method | classification |")
    assert r"\toprule" in done("table --hybrids --latex").out
    rows = list(csv.DictReader(done("table --hybrids --csv").out.splitlines()))
    assert {row["method"] for row in rows} == {"hr", "hr-literal", "remind", "remind-plus", "ictrl"} and all(
        int(row["lines"]) > 60 for row in rows
    )


def test_a_table_that_goes_into_a_file_is_not_cut(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    (runs.parent / "many").mkdir()
    settings = "--set rounds=1 --set steps=1 --set stop_after=2 --set class_order=9,8,7,6,5,4,3,2,1,0 --set alpha=0.5"
    done(f"run finetune {settings} --out {runs.parent}/many/finetune")
    wide = done(f"table {runs.parent}/many").out
    assert "BWT" in wide and "class_order=9,8,7,6,5,4,3,2,1,0" in wide
    monkeypatch.setenv("COLUMNS", "60")
    assert "narrow for: BWT" in done(f"table {runs.parent}/many").out


def test_a_table_names_what_is_unfinished(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "begun" / "checkpoint").mkdir(parents=True)
    (tmp_path / "begun" / "config.toml").write_text("")
    said = typed(f"table {runs} {tmp_path}")
    assert said.code == 0 and "lwf" in said.out
    assert said.err == f"fcil: 1 unfinished run left out; go on with: fcil run --resume {tmp_path}/begun\n"
    (tmp_path / "one more").mkdir()
    (tmp_path / "one more/config.toml").write_text("")
    more = typed(f"table {runs} {tmp_path}").err
    assert more.startswith("fcil: 2 unfinished runs left out") and f"(1 other: '{tmp_path}/one more')" in more
    shutil.rmtree(tmp_path / "one more")
    (tmp_path / "begun" / "checkpoint").rmdir()
    assert "begin again, for want of a checkpoint, with: fcil run" in typed(f"table {runs} {tmp_path}").err


def test_curves_for_tensorboard(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # of TensorBoard and what it imports
        done(f"run finetune {LONGER} --set evaluate_every=2 --out {tmp_path}/run --tensorboard {tmp_path}/curves")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        curves = EventAccumulator(str(tmp_path / "curves")).Reload()
    assert [event.step for event in curves.Scalars("loss")] == list(range(1, 9))
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "round"]
    assert [event.value for event in curves.Scalars("loss")] == pytest.approx(losses)
    final = json.loads((tmp_path / "run" / "result.json").read_text())
    assert curves.Scalars("accuracy/all")[-1].value == pytest.approx(final["final"])
    assert curves.Scalars("accuracy/task 1")[-1].value == pytest.approx(final["matrix"][1][0])
    assert {"bytes/down", "bytes/up", "bytes/kept"} <= set(curves.Tags()["scalars"])
    with warnings.catch_warnings(action="ignore"):
        done(f"run finetune {LONGER} --set evaluate_every=2 --out {tmp_path}/run --tensorboard {tmp_path}/later")
        later = EventAccumulator(str(tmp_path / "later")).Reload()
    for name in curves.Tags()["scalars"]:
        values = [[(event.step, event.value) for event in each.Scalars(name)] for each in (curves, later)]
        assert values[0] == values[1], name


@pytest.mark.parametrize("reader", ["head -1", "true"])
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path, reader: str) -> None:
    line = f"set -o pipefail; {sys.executable} -m fcil methods | {reader}"
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert ran.returncode in (0, 1) and ran.stderr == ""  # 1 as rich does it, where other tools die of SIGPIPE


def test_a_run_that_nobody_listens_to_says_how_to_go_on(tmp_path: Path) -> None:
    line = f"set -o pipefail; {sys.executable} -m fcil run finetune {LONGER} --out {tmp_path}/run | true"
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr == f"fcil: stopped, for nobody reads what it says; go on with: fcil run --resume {tmp_path}/run\n"
    assert done(f"run --resume {tmp_path}/run").code == 0


def test_a_terminal_without_the_letters_and_one_without_room() -> None:
    line = f"PYTHONIOENCODING=ascii {sys.executable} -m fcil methods; {sys.executable} -m fcil methods > /dev/full"
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert "finetune" in ran.stdout
    assert (ran.returncode, ran.stderr) == (2, "fcil: the output: No space left on device\n")


def test_advice_can_be_typed_where_a_folder_has_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "my runs" / "n° 1"
    said = done(f"run finetune {TINY} --out '{folder}'")
    advised = said.out.splitlines()[-1].partition("compare runs with: fcil ")[2]
    assert "finetune" in done(advised).out
    (folder / "result.json").unlink()
    for line in (f"table '{folder}'", f"audit '{folder}'"):
        advised = typed(line).err.strip().rpartition("with: fcil ")[2]
        assert advised == f"run --resume '{folder}'"
    assert "finetune on digits" in done(advised).out
