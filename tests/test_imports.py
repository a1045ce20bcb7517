"""Who may import whom: design.md section 1, read from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fcil

ROOT = Path(fcil.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

ASSEMBLY = {"experiment", "parts", "run_folder", "plan", "model", "deploy"}  # put a run together from all the rooms
PEOPLE = {"report", "cli", "cli_deploy", "cli_known", "cli_results", "terminal", "__main__"}  # talk to people
ROOMS = {"scenario", "networks", "blocks", "federation", "method", "methods", "results", "analysis"}

FORBIDDEN = {
    "errors": ROOMS | ASSEMBLY | PEOPLE | {"records", "knobs", "seeds"},
    "seeds": ROOMS | ASSEMBLY | PEOPLE | {"records", "knobs", "errors"},
    "knobs": ROOMS | ASSEMBLY | PEOPLE | {"records", "seeds"},
    "records": ROOMS | ASSEMBLY | PEOPLE | {"knobs", "seeds"},
    "scenario": (ROOMS - {"scenario"}) | ASSEMBLY | PEOPLE,
    "networks": (ROOMS - {"networks"}) | ASSEMBLY | PEOPLE,
    "blocks": (ROOMS - {"blocks", "networks", "scenario"}) | ASSEMBLY | PEOPLE,
    "method": {"federation", "methods", "results", "analysis", "blocks"} | ASSEMBLY | PEOPLE,
    "federation": {"methods", "results", "analysis"} | ASSEMBLY | PEOPLE,
    "methods": {"results", "analysis"} | ASSEMBLY | PEOPLE,
    "results": {"federation", "methods", "method", "networks", "blocks", "analysis"} | ASSEMBLY | PEOPLE,
    "analysis": PEOPLE,
    "parts": {"experiment", "run_folder", "deploy"} | PEOPLE,
    "run_folder": {"experiment", "deploy"} | PEOPLE,
    "experiment": {"deploy"} | PEOPLE,
    "deploy": PEOPLE,
    "report": {"cli", "cli_deploy", "cli_known", "cli_results", "__main__"},
}
EXCEPTIONS = {  # pure functions of counts and scores, whose results are lines of the ledger
    ("federation/loop.py", "fcil.results.metrics"),
    ("federation/loop.py", "fcil.analysis.decomposition"),
}
FOR_PEOPLE = {"rich", "typer", "click", "matplotlib", "plotly", "jinja2", "tensorboard"}
CARRIERS_OF_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def imports(source: str) -> Iterator[str]:
    """Yield every module a source names, wherever it stands; `from a import b` as a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written out in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def ours(file: Path) -> str:
    """Return the room that a file of fcil is in."""
    first = file.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def trespasses(where: str, relative: str, source: str) -> list[str]:
    return [
        name
        for name in imports(source)
        if name.startswith("fcil.")
        and room(name) in FORBIDDEN.get(where, set())
        and not any(relative == file and name.startswith(module) for file, module in EXCEPTIONS)
    ]


def each_file(files: list[Path] = FILES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files, ids=lambda f: str(f.relative_to(ROOT)))


def test_there_is_something_to_read() -> None:
    assert len(FILES) > 40 and {ours(file) for file in FILES} >= {"scenario", "federation", "methods", "blocks"}


@each_file()
def test_data_flows_one_way(file: Path) -> None:
    assert trespasses(ours(file), file.relative_to(ROOT).as_posix(), file.read_text()) == []


@each_file(sorted((ROOT / "methods").glob("*.py")))
def test_a_method_imports_no_other_method_and_of_the_federation_only_its_rounds(file: Path) -> None:
    if file.name != "__init__.py":
        named = list(imports(file.read_text()))
        assert [name for name in named if room(name) == "methods"] == []
        assert [n for n in named if room(n) == "federation" and not n.startswith("fcil.federation.rounds")] == []


@each_file([file for file in FILES if ours(file) not in PEOPLE])
def test_only_the_report_and_the_command_line_know_about_people(file: Path) -> None:
    roots = {name.split(".")[0] for name in imports(file.read_text())}
    assert roots & FOR_PEOPLE == set()


@each_file()
def test_flower_stays_behind_its_transport(file: Path) -> None:
    assert file.name == "flower.py" or not any(name.startswith("flwr") for name in imports(file.read_text()))


@each_file()
def test_nothing_is_read_that_could_run(file: Path) -> None:
    tree = ast.parse(file.read_text())
    roots = {name.split(".")[0] for name in imports(file.read_text())}
    assert roots & CARRIERS_OF_CODE == set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save")}, node.lineno
        if isinstance(node, ast.keyword):
            assert node.arg != "allow_pickle", node.value.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec"}, node.lineno


@each_file()
def test_names_say_what_a_thing_is(file: Path) -> None:
    parts = {part.removesuffix(".py").rstrip("s") for part in file.relative_to(ROOT).parts}
    assert parts & {"util", "helper", "manager", "base", "common", "misc"} == set()


def test_a_trespass_would_be_seen() -> None:
    hidden = "def f():\n    from fcil.methods import lwf\n"
    assert trespasses("blocks", "blocks/x.py", hidden) == ["fcil.methods.lwf"]
    assert trespasses("scenario", "scenario/x.py", "import fcil.federation.loop") == ["fcil.federation.loop"]
    assert trespasses("federation", "federation/x.py", "from fcil.results import metrics") == ["fcil.results.metrics"]
    assert trespasses("federation", "federation/loop.py", "from fcil.results.metrics import final") == []
    assert trespasses("methods", "methods/x.py", "from fcil.blocks import losses") == []
