"""The lists of runs for a borrowed GPU: a word misspelt there would cost its time."""

import io
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tarfile
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fcil.plan import Plan, plan
from fcil.terminal import settings_of

LISTS = sorted((Path(__file__).parents[1] / "benchmarks" / "h200").glob("*.txt"))


def planned(line: str) -> Plan:
    words = ArgumentParser()
    words.add_argument("method")
    words.add_argument("--benchmark", required=True)
    words.add_argument("--protocol")
    words.add_argument("--seed", type=int, required=True)
    words.add_argument("--set", action="append", default=[])
    given = words.parse_args(shlex.split(line.replace("lr=chosen", "lr=0.1")))
    return plan(given.method, given.benchmark, given.protocol, given.seed, settings_of(given.set))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_line_is_a_run_of_its_own(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    folders = [planned(line).folder() for line in lines]
    assert lines and len(set(folders)) == len(folders)


def test_an_unfinished_run_comes_home_in_slices_and_travels_again(tmp_path: Path) -> None:
    """With what it takes to go on; a run that has ended, or never began, stays, and nothing kept is lost by mistake."""
    tools, there = tmp_path / "here/benchmarks/h200", tmp_path / "there"
    tools.mkdir(parents=True)
    for name in ("session.sh", "dense.py"):
        (tools / name).write_bytes((LISTS[0].parent / name).read_bytes())
    (tmp_path / "data/digits").mkdir(parents=True)

    def session(*words: str, out: str = "0") -> subprocess.CompletedProcess[str]:
        (tmp_path / out).mkdir(exist_ok=True)
        places = {"HOME": str(there), "OUT": str(tmp_path / out), "FCIL_DATA": str(tmp_path / "data")}
        places["PYTHON"] = sys.executable
        command = ["bash", "benchmarks/h200/session.sh", *words]
        return subprocess.run(command, cwd=tmp_path / "here", env=os.environ | places, capture_output=True, text=True)

    run = "runs/digits/hr/0"
    large = random.Random(0).randbytes(70_000_000)  # more than comes back at once
    states = {n: f"checkpoint/state-{n}.safetensors" for n in (9, 10, 11)}  # the last has no manifest yet
    files = {"config.toml": b"", "checkpoint/9.json": b"{}", "checkpoint/10.json": b"{}"}
    files |= {"checkpoint/memories-3.safetensors": large} | {path: path.encode() for path in states.values()}
    for name, content in files.items():
        path = there / "fcil" / run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for other in ("ended/0/checkpoint", "unborn/0/checkpoint"):
        (there / "fcil/runs/digits" / other).mkdir(parents=True)
    (there / "fcil/runs/digits/ended/0/result.json").touch()
    (there / "fcil/runs/digits/ended/0/checkpoint/1.json").touch()

    assert session("save", "0", "digits").stdout == "2 times, from save 0\n"
    assert session("save", "1", "digits", out="1").returncode == 0
    slices = [path for out in "01" for path in (tmp_path / out).iterdir()]
    assert len(slices) == 5 and max(path.stat().st_size for path in slices) <= 2**24
    assert session("keep", str(tmp_path / "0"), str(tmp_path / "1")).returncode == 0
    assert session("keep", str(tmp_path / "none")).returncode != 0
    kept = tmp_path / "here/carry/kept"
    found = {str(path.relative_to(kept / run)): path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    assert found == {name: content for name, content in files.items() if name not in (states[9], states[11])}

    assert session("pack", "digits").returncode == 0
    parts = sorted((tmp_path / "here/carry").glob("part.*"))
    assert [path.name for path in parts] == ["part.0", "part.1"]
    assert all(session("take", path.suffix[1:]).returncode == 0 for path in parts)
    taken = b"".join(path.read_bytes() for path in sorted((there / "parts").iterdir()))
    with tarfile.open(fileobj=io.BytesIO(taken)) as packed:
        assert f"kept/{run}/checkpoint/state-10.safetensors" in packed.getnames() and "digits" in packed.getnames()


def test_results_stay_here_while_parts_travel_and_are_known_to_git_again(tmp_path: Path) -> None:
    def shell(*words: str) -> str:
        return subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    tool, result = tmp_path / "benchmarks/h200/session.sh", tmp_path / "results/run/result.json"
    for path, content in ((tool, (LISTS[0].parent / "session.sh").read_bytes()), (result, b"{}")):
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    shell("git", "init", "--quiet")
    shell("git", "add", ".")
    shell("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "all")
    shell("bash", str(tool), "aside")
    travels = shell("git", "ls-files", "--cached", "--others", "--exclude-standard")
    assert "session.sh" in travels and "results" not in travels and result.exists()
    (tmp_path / "runs/hr/0").mkdir(parents=True)
    (tmp_path / "runs/hr/0/result.json").touch()
    (tmp_path / "came").mkdir()
    shell("tar", "--create", "--gzip", "--remove-files", "--file", "came/runs.tgz", "runs")
    who = "export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b"
    arrived = "results/arrived/hr/0/result.json"
    assert shell("bash", "-c", f"{who}; bash {tool} home {tmp_path}/came") == arrived + "\n"
    shutil.rmtree(tmp_path / "came")
    held = shell("git", "ls-tree", "-r", "--name-only", "HEAD").split()
    assert held == ["benchmarks/h200/session.sh", arrived, "results/run/result.json"]
    shell("bash", str(tool), "back")
    assert shell("git", "status", "--porcelain") == ""
    (result.parent / "more.json").touch()
    assert "more.json" in shell("git", "status", "--porcelain", "--untracked-files=all")


def test_a_rate_is_chosen_by_what_held_out_images_say_and_sought_beyond_the_last_tried(tmp_path: Path) -> None:
    def tried(method: str, rate: float, final: float, holdout: float = 0.1, stop_after: int = 1) -> None:
        folder = tmp_path / "runs" / f"{method},{rate},{holdout},{stop_after}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({"final": final}))
        said = f"holdout = {holdout}\nstop_after = {stop_after}\n"
        (folder / "config.toml").write_text(f'method = "{method}"\n[benchmark]\n{said}[config]\nlr = {rate}\n')

    def said(*words: str) -> subprocess.CompletedProcess[str]:
        tool = [sys.executable, str(LISTS[0].parent / "chosen.py"), *words]
        return subprocess.run(tool, cwd=tmp_path, capture_output=True, text=True)

    for method, finals in (("icarl", (70, 75, 71)), ("podnet", (40, 42, 45)), ("dde", (50, 49, 40)), ("bic", (1, 2))):
        for rate, final in zip((0.1, 0.3, 1.0), finals, strict=False):
            tried(method, rate, final)
    tried("icarl", 9.0, 99, holdout=0.0)
    tried("icarl", 27.0, 99, stop_after=5)
    end = "--benchmark digits --seed 0"
    names = ("icarl", "podnet", "dde")
    (tmp_path / "list.txt").write_text(
        "\n".join(["# which", *(f"{m} {end} --set lr=chosen" for m in names), f"hr {end}"])
    )
    rates = (f"{method} {end} --set lr=5 --set holdout=0.1" for method in (*names, "bic"))
    (tmp_path / "rates.txt").write_text("\n".join(rates))
    (tmp_path / "untried.txt").write_text(f"ssil {end} --set lr=chosen\n")

    filled = [f"icarl {end} --set lr=0.3", f"podnet {end} --set lr=1", f"dde {end} --set lr=0.1", f"hr {end}"]
    assert said("list.txt", "runs").stdout.splitlines() == filled
    beyond = [f"dde {end} --set lr=0.033 --set holdout=0.1", f"podnet {end} --set lr=3 --set holdout=0.1"]
    assert said("--further", "rates.txt", "none", "runs").stdout.splitlines() == beyond
    wrong = said("untried.txt", "runs")
    assert wrong.returncode == 1 and wrong.stdout == "" and wrong.stderr.startswith("no rate of ssil was tried")


def test_images_travel_as_pictures_of_a_hundred_and_are_the_same_again(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (103, 7, 7, 3), dtype=np.uint8)
    for name, kind in (("train", "PNG"), ("test", "PNG"), ("val", "JPEG")):
        files = [io.BytesIO() for _ in pixels]
        for image, file in zip(pixels, files, strict=True):
            Image.fromarray(image).save(file, kind)
        rows = pa.StructArray.from_arrays([pa.array([file.getvalue() for file in files])], ["bytes"])
        table = pa.table({"img": rows, "label": list(range(103))}).replace_schema_metadata({"huggingface": "names"})
        (tmp_path / "here").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / f"here/{name}-0.parquet")

    (tmp_path / "here/words.json").write_text("{}")
    for name in ("train", "test"):  # where the labels come first, the folders below
        table = pq.read_table(tmp_path / f"here/{name}-0.parquet")
        (tmp_path / "here/data").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / f"here/data/{name}-0.parquet")
        pq.write_table(table.select(["label", "img"]), tmp_path / f"here/{name}-0.parquet")
    for words in (("pack", "here", "between"), ("unpack", "between", "there"), ("unpack", "between", "there")):
        subprocess.run([sys.executable, str(LISTS[0].parent / "dense.py"), *words], cwd=tmp_path, check=True)

    assert {path.name for path in (tmp_path / "there").iterdir()} == {
        *(f"{name}-0.parquet" for name in ("train", "test", "val")), "words.json", "data"
    }  # fmt: skip
    assert len(list((tmp_path / "between/train-0.img").glob("*.webp"))) == 2
    assert (tmp_path / "there/val-0.parquet").read_bytes() == (tmp_path / "here/val-0.parquet").read_bytes()
    for name in ("train", "test"):
        table = pq.read_table(tmp_path / f"there/{name}-0.parquet")
        found = [np.asarray(Image.open(io.BytesIO(image["bytes"]))) for image in table["img"].to_pylist()]
        assert np.array_equal(np.stack(found), pixels) and table["label"].to_pylist() == list(range(103))
        assert table.schema.metadata[b"huggingface"] == b"names" and table.column_names == ["label", "img"]
        below = Path(f"data/{name}-0.parquet")
        assert (tmp_path / "there" / below).read_bytes() == (tmp_path / "here" / below).read_bytes()
