"""What the README shows is run: the complete method, the Python example, the files it points to."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from fcil.errors import UserError
from fcil.experiment import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_method_in_the_readme_runs_and_forgets_less_than_finetune(tmp_path: Path) -> None:
    (code,) = [block for block in blocks("python") if "METHOD = Method(" in block]
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    own = tmp_path / "frozen.py"
    own.write_text(code)
    short = {"tasks": 3, "rounds": 8}
    frozen = run(str(own), settings=short, out=tmp_path / "frozen", device="cpu")
    finetune = run("finetune", settings=short, out=tmp_path / "finetune", device="cpu")
    assert frozen["final"] > finetune["final"] + 10
    assert frozen["forgetting"] < finetune["forgetting"] - 50
    before = (tmp_path / "frozen" / "result.json").stat().st_mtime_ns
    assert run(str(own), settings=short, out=tmp_path / "frozen", device="cpu") == frozen
    assert (tmp_path / "frozen" / "result.json").stat().st_mtime_ns == before
    own.write_text(code.replace("0.01", "0.02"))
    with pytest.raises(UserError, match="has changed since"):
        run(str(own), settings=short, out=tmp_path / "frozen", device="cpu")


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["quickstart.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(r"joint: 9\d\.\d % of all classes at the end", said)
    assert "task 3 brings" in said


def test_every_file_the_readme_points_to_is_there() -> None:
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    linked = re.findall(r"\]\((?!http)([^)#]+)\)", prose)
    assert linked and all((ROOT / name).exists() for name in linked)


def test_the_benchmark_file_in_the_readme_is_read(tmp_path: Path) -> None:
    from fcil.scenario.benchmarks import benchmark

    (toml,) = blocks("toml")
    (tmp_path / "mine.toml").write_text(toml)
    made = benchmark(str(tmp_path / "mine.toml"))
    assert (made.name, made.partition, made.class_share, made.joining, made.lag, made.tasks) == (
        "mine",
        "class_subset",
        0.3,
        5,
        1,
        10,
    )


def test_every_command_in_the_readme_exists() -> None:
    from typer.main import get_command

    from fcil.cli import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    typed = set(re.findall(r"(?:^|`)fcil ([a-z]+)", README, re.MULTILINE))
    assert typed and typed <= known


def test_what_the_demo_is_said_to_show_is_the_run_in_results() -> None:
    result = json.loads((ROOT / "results/digits/hr/0/result.json").read_text())
    for name in ("final", "average"):
        assert float(re.findall(rf"^{name} +(\S+)$", README, re.MULTILINE)[0]) == round(result[name], 1)


def test_no_document_was_left_in_the_middle_of_a_merge() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    marked = [path.name for path in documents if re.search(r"^(<{7}|={7}|>{7})( |$)", path.read_text(), re.MULTILINE)]
    assert len(documents) > 8 and marked == []
