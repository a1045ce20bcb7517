"""Everything a user can get wrong: one sentence, an exit code, no traceback, and nothing damaged."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fcil import cli, terminal
from fcil.methods import finetune, joint
from tests.typed import TINY, class_folders, done, fingerprint, typed


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and everything that can be wrong with one, with data, and with files."""
    here = tmp_path_factory.mktemp("material")
    done(f"run finetune {TINY} --out {here}/done")
    for name in ("good", "one", "all-bad", "no-test"):
        class_folders(here / name, classes=1 if name == "one" else 4, images=1 if name == "no-test" else 5)
    for picture in (here / "all-bad").rglob("*.png"):
        picture.write_bytes(b"not a picture")
    (here / "empty").mkdir()
    (here / "flat").mkdir()
    Image.new("RGB", (8, 8)).save(here / "flat" / "picture.png")
    (here / "torn.parquet").write_bytes(b"PAR1" + b"x" * 100)
    pq.write_table(pa.table({"a": [1, 2], "b": [3, 4]}), here / "columns.parquet")
    for name, text in {
        "text.txt": "hello",
        "broken.toml": "dataset = \n",
        "key.toml": 'dataset = "digits"\ntask = 3\n',
        "value.toml": 'dataset = "digits"\ntasks = 0\n',
        "type.toml": 'dataset = "digits"\ntasks = ["a"]\n',
        "no-data.toml": "tasks = 2\n",
        "gone.toml": 'dataset = "./gone"\n',
        "base.toml": 'base = "digitz"\n',
        "wrong-data.toml": 'dataset = "cifar10"\n',
        "self.toml": 'base = "self.toml"\n',
        "circle.toml": 'base = "./round.toml"\n',
        "round.toml": 'base = "circle.toml"\n',
        "timing.toml": 'base = "digits"\nrounds = 3\n',
        "rate.toml": 'base = "digits"\nlr = 0.1\n',
        "syntax.py": "def f(:\n",
        "no_method.py": "x = 1\n",
        "other_method.py": "METHOD = 3\n",
        "raises.py": "raise RuntimeError('no luck')\n",
        "imports.py": "import no_such_package\n",
        "hoard.py": Path(joint.__file__).read_text(),
    }.items():
        (here / name).write_text(text)

    def changed(name: str, file: str, old: str, new: str) -> None:
        shutil.copytree(here / "done", here / name)
        text = (here / name / file).read_text()
        assert old in text
        (here / name / file).write_text(text.replace(old, new))

    changed("other-version", "config.toml", "format = 1", "format = 9")
    changed("other-result", "result.json", '"format": 1', '"format": 9')
    changed("bad-config", "config.toml", "format = 1", "format = = 1")
    changed("bad-value", "config.toml", "rounds = 1", "rounds = 0")
    changed("half-config", "config.toml", "[protocol]", "[elsewhere]")
    changed("bad-result", "result.json", "{", "[[")
    changed("lied", "result.json", '"final": ', '"final": 1')
    changed("cooked", "ledger.jsonl", '"lost": 0', '"lost": 1')
    for name, gone in {"unfinished": ["model.safetensors"], "no-ledger": ["ledger.jsonl"], "no-model": []}.items():
        shutil.copytree(here / "done", here / name)
        for file in ("result.json", *gone):
            (here / name / file).unlink()
    (here / "no-model" / "model.safetensors").write_bytes(b"x")
    return here


WRONG = [
    # commands and options
    ("rn", "no command 'rn'", "did you mean 'run'", "methods, benchmarks"),
    ("--nope", "--nope", "fcil --help"),
    ("run --bench digits", "--bench", "did you mean '--benchmark'", "fcil run --help"),
    ("run finetune extra", "extra", "fcil run --help"),
    ("run --seed", "--seed", "requires an argument"),
    ("run --active", "--active", "requires an argument"),
    ("run finetune --rounds 3", "no option --rounds", "--set rounds=3. See: fcil run --help"),
    ("sweep --batch-size=8", "no option --batch-size", "--set batch_size=8. See: fcil sweep --help"),
    ("run --lr --seed 3", "--set lr=VALUE"),
    ("table done --rounds 3", "no such option", "--rounds"),
    # names
    ("run jont", "no method 'jont'", "did you mean 'joint'", "finetune, joint", "a .py file"),
    ("run HR", "no method 'HR'", "did you mean 'hr'"),
    ("methods jont", "no method 'jont'", "did you mean 'joint'"),
    ("run --benchmark cifar10", "no benchmark 'cifar10'", "did you mean 'cifar100-5x4'", "a .toml file"),
    ("benchmarks nope", "no benchmark 'nope'", "allowed: digits"),
    ("benchmarks digits --set code_bytes=9", "no knobs of methods", "no setting 'code_bytes'", "rounds"),
    ("benchmarks digits --set clientz=3", "did you mean 'clients'"),
    ("benchmarks digits --set protocol=short", "no setting 'protocol'"),
    ("benchmarks --set clients=3", "say whose knobs", "fcil benchmarks NAME --set"),
    ("benchmarks digits --seed 3", "without --show", "leave out --seed"),
    ("benchmarks digits --show --seed -1", "seed=-1 is not allowed", "at least 0"),
    ("benchmarks --show", "which benchmark", "fcil benchmarks NAME --show"),
    ("run --protocol fast", "no protocol 'fast'", "allowed: brief, quick, short, paper"),
    ("run --protocol shrt", "did you mean 'short'"),
    ("run --device gpu", "device=gpu is not allowed", "auto, cpu, cuda"),
    # values
    ("run --set rounds", "--set rounds is not allowed", "KEY=VALUE"),
    ("run --set =3", "--set =3 is not allowed", "KEY=VALUE"),
    ("run --set lr=", "--set lr= is not allowed", "KEY=VALUE"),
    ("run --set lr=abc", "lr=abc is not allowed", "numbers above 0"),
    ("run --set rounds=0", "rounds=0 is not allowed", "whole numbers at least 1"),
    ("run --set rounds=1.5", "rounds=1.5 is not allowed", "whole numbers at least 1"),
    ("run --set memory=nan", "memory=nan is not allowed", "numbers at least 0"),
    ("run --set partition=foo", "partition=foo is not allowed", "lda_equal, dirichlet_class"),
    ("run --set round=3", "no setting 'round'", "did you mean 'rounds'"),
    ("sweep --methods hr-literal,finetune --set code_bits=4", "finetune: there is no setting 'code_bits'"),
    ("run icarl --set exemplar_codec=gif:9", "exemplar_codec=gif:9 is not allowed", "such as webp:300"),
    ("run mfcl --set norm=group", "norm=group keeps none", "set norm=batch"),
    ("run --tasks 2 --set tasks=4", "--tasks and --set tasks=... say the same", "give one of them"),
    ("run --set dataset=cifar10", "no dataset 'cifar10'", "did you mean 'cifar100'"),
    ("run --set dataset=/" + "a" * 300, "cannot be read", "a folder of class folders"),
    ("run --set class_order=0,0,1", "class_order=0,0,1 is not allowed", "1993, natural"),
    ("run --seed -1", "seed=-1 is not allowed", "at least 0"),
    ("run --seed x", "'x' is not a valid integer", "--seed"),
    ("run --seed 1.5", "'1.5' is not a valid integer", "--seed"),
    ("run --tasks 6", "6 tasks of 2 classes need 12", "digits has 10", "at most 10"),
    ("run --set quorum=9", "quorum=9 is not allowed with active=5", "quorum takes 0 to 5"),
    ("run --set lost=1", "lost=1.0 is not allowed", "at least 0 and below 1"),
    ("run --active 20", "active=20 is not allowed with clients=10", "1 to 10"),
    # a benchmark of one's own
    ("run --benchmark nope.toml", "no benchmark file nope.toml"),
    ("run --benchmark broken.toml", "broken.toml is not a readable TOML file", "line 1"),
    ("run --benchmark key.toml", "no setting 'task'", "did you mean 'tasks'"),
    ("run --benchmark value.toml", "tasks=0 is not allowed", "at least 1"),
    ("run --benchmark type.toml", "tasks=['a'] is not allowed", "whole numbers"),
    ("run --benchmark no-data.toml", "no-data.toml names no dataset", 'dataset = "cifar100"'),
    ("run --benchmark self.toml", "self.toml: self.toml is its own base", "base takes a known benchmark"),
    ("benchmarks self.toml", "self.toml is its own base"),
    ("sweep --benchmarks circle.toml", "circle.toml is its own base"),
    ("run --benchmark timing.toml", "rounds is a knob of the protocol", "--set rounds=3"),
    ("run --benchmark rate.toml", "lr is a knob of methods", "--set lr=0.1"),
    ("run --benchmark gone.toml", "gone does not exist", "a folder of class folders"),
    ("run --benchmark base.toml", "no benchmark 'digitz'", "did you mean 'digits'"),
    ("run --benchmark wrong-data.toml", "no dataset 'cifar10'", "did you mean 'cifar100'"),
    # data of one's own
    ("run --data good --benchmark digits", "--data and --benchmark exclude each other"),
    ("run --data missing", "missing does not exist", "a folder of class folders, a parquet file"),
    ("run --data text.txt", "text.txt is another kind of file", "a parquet file"),
    ("run --data empty", "empty has no class folders", "a folder of its own"),
    ("run --data flat", "flat has no class folders", "a folder of its own"),
    ("run --data one", "one has one class only", "at least two"),
    ("run --data all-bad", "none of the 20 images in", "PNG or JPEG"),
    ("run --data no-test", "has only one image that can be read, and needs two", "add images or remove the class"),
    ('run --data ""', "--data is empty", "give it a path"),
    ("run --data torn.parquet", "torn.parquet is not a readable parquet file"),
    ("run --data columns.parquet", "column img or image", "fine_label or label", "it has a, b"),
    ("run --data good --tasks 5", "good has 4 classes", "tasks=5 is not allowed", "1 to 4"),
    ("run --data good --tasks 0", "tasks=0 is not allowed", "1 to 4"),
    ("run --data good --clients 0", "clients=0 is not allowed", "at least 1"),
    ("run --data good --clients 2 --active 3", "active=3 is not allowed with clients=2", "1 to 2"),
    ("run --benchmark cifar100-10x10", "cifar100 is not here", "train*.parquet and test*.parquet", "FCIL_DATA"),
    ("run --benchmark tinyimagenet-10x5", "is not here", "train*.parquet and valid*.parquet", "FCIL_DATA"),
    ("run --benchmark imagenet-subset-10x20", "ImageNet is not here", "train/SYNSET/ and val/SYNSET/", "FCIL_DATA"),
    # a method of one's own
    ("run nope.py", "no method file nope.py"),
    ("run syntax.py", "syntax.py cannot be loaded", "line 1"),
    ("run raises.py", "raises.py cannot be loaded", "no luck"),
    ("run imports.py", "imports.py cannot be loaded", "no_such_package"),
    ("run no_method.py", "no_method.py defines no METHOD", "METHOD = Method(Config, Server, Client, Memory)"),
    ("run other_method.py", "other_method.py defines no METHOD", "METHOD = Method(Config, Server, Client, Memory)"),
    # run folders
    (f"run lwf {TINY} --out done", "done holds another run (fcil run finetune", "choose a different --out"),
    (f"run finetune {TINY} --set lag=1 --out done", "done holds another run: lag was 0, now 1; choose"),
    (f"run finetune {TINY} --seed 2 --protocol short --out done", "protocol was quick, now short", "seed was 0, now 2"),
    (f'run finetune {TINY} --out ""', "--out is empty", "give it a path"),
    (f"run finetune {TINY} --out=", "--out is empty", "give it a path"),
    ('run --resume ""', "--resume is empty"),
    ('run --nodes ""', "--nodes is empty"),
    ('run --nodes good ""', "--nodes is empty"),
    ('certs ""', "DIR is empty"),
    ('table done ""', "RUNS is empty"),
    ('export done --onnx ""', "--onnx is empty"),
    (f"run finetune {TINY} --out text.txt", "text.txt is a file", "choose a different --out"),
    (f"run finetune {TINY} --out text.txt/below", "is a file or lies below one", "choose a different --out"),
    (f"run finetune {TINY} --out good", "good holds other files and no run", "choose a different --out"),
    (f"run finetune {TINY} --out /sys/nowhere", "cannot write /sys/nowhere", "choose a different --out"),
    (f"run finetune {TINY} --tensorboard /sys/nowhere", "cannot write to /sys/nowhere", "a folder you can write"),
    (f"run finetune {TINY} --tensorboard text.txt", "cannot write to text.txt", "a folder you can write"),
    ("run --resume done --seed 3", "--resume reads all else from done", "leave out --seed"),
    ("run finetune --resume done", "leave out METHOD"),
    ("run --resume nowhere", "nowhere does not exist", "what `fcil run` leaves"),
    ("run --resume good", "good is not a run folder", "what `fcil run` leaves"),
    ("run --resume text.txt", "text.txt is not a run folder"),
    ("run --resume other-version", "other-version is of format 9", "reads format 1"),
    ("run --resume bad-config", "config.toml is damaged", "line 1", "another folder"),
    ("run --resume half-config", "config.toml is damaged", "protocol", "another folder"),
    ("run --resume bad-value", "config.toml: rounds=0 is not allowed", "at least 1"),
    ("run --resume bad-result", "result.json is not readable", "remove it"),
    ("run --resume no-ledger", "there is no ledger"),
    # sweeps
    ("sweep --methods jint", "no method 'jint'", "did you mean 'joint'"),
    ("sweep --benchmarks digits,digitz", "no benchmark 'digitz'", "did you mean 'digits'"),
    ("sweep --seeds abc", "--seeds abc is not allowed", "0-9 or 0,3,5-7"),
    ("sweep --seeds 5-3", "--seeds 5-3 is not allowed", "0-9 or 0,3,5-7"),
    ("sweep --seeds 0-99999999999", "at most 10,000 seeds"),
    ("sweep --set rounds=1,0", "rounds=0 is not allowed", "at least 1"),
    ("sweep --out text.txt", "is a file or lies below one", "choose a different --out"),
    # tables
    ("table", "RUNS...", "fcil table --help"),
    ("table --hybrids done", "compares methods, not runs", "RUNS..."),
    ("table --hybrids --verify", "compares methods, not runs"),
    ("table --hybrids --csv --latex", "exclude each other"),
    ("table nowhere", "no folder nowhere"),
    ("table empty", "empty holds no run", "`fcil run` leaves"),
    ("table unfinished", "no run has finished yet", "fcil run --resume unfinished"),
    ("table bad-result", "result.json is not readable"),
    ("table other-result", "has format 9", "reads format 1"),
    ("table done --markdown --csv", "exclude each other"),
    ("table lied --verify", "1 difference between result and ledger in 1 run"),
    ("table cooked --verify", "1 difference between result and ledger in 1 run"),
    # models
    ("predict done", "IMAGE...", "fcil predict --help"),
    ("predict done nope.png", "no image nope.png"),
    ("predict done text.txt", "text.txt is not an image", "PNG, JPEG"),
    ("predict done flat", "flat is not a readable image"),
    ("predict done flat/picture.png --top 0", "--top", "fcil predict --help"),
    ("predict unfinished flat/picture.png", "has no model yet", "fcil run --resume unfinished"),
    ("predict no-model flat/picture.png", "model.safetensors is not a readable safetensors file"),
    ("predict good flat/picture.png", "good is not a run folder"),
    ("export done", "--onnx FILE, --safetensors FILE"),
    ("export nowhere --onnx x.onnx", "nowhere does not exist"),
    ("export unfinished --safetensors x.safetensors", "has no model yet", "fcil run --resume unfinished"),
    ("export done --safetensors /sys/x", "cannot write /sys/x", "choose a place you can write"),
    ("export done --safetensors nowhere/x", "cannot write nowhere/x", "there is no folder nowhere"),
    ("export done --safetensors empty", "empty is a folder", "a file"),
    ("benchmarks digits --show --out /sys/x.png", "/sys/x.png cannot be written"),
]


@pytest.mark.parametrize(
    ("line", "fragments"), [(line, rest) for line, *rest in WRONG], ids=[line[0] for line in WRONG]
)
def test_it_is_said_in_one_sentence(
    material: Path, line: str, fragments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(material)
    monkeypatch.delenv("FCIL_DATA", raising=False)
    before = fingerprint(material)
    said = typed(line)
    assert said.code == 2
    assert said.err.count("\n") == 1 and said.err.startswith("fcil: "), said.err
    assert "Traceback" not in said.out + said.err
    assert said.out == "" or not line.startswith("run "), "what a run will do is said when nothing is wrong with it"
    for fragment in fragments:
        assert fragment.lower() in said.err.lower()
    after = fingerprint(material)
    locks = {name for name in after.keys() - before.keys() if name.endswith("/lock")}
    assert {name: digest for name, digest in after.items() if name not in locks} == before


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = class_folders(tmp_path / "secret")
    allowed = Path.iterdir

    def iterdir(self: Path) -> Iterator[Path]:  # root may read everything, so chmod would test nothing here
        if self == data:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return allowed(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    said = typed(f"run --data {data} --out {tmp_path}/run")
    assert said.code == 2 and said.err.count("\n") == 1
    assert f"{data} cannot be read (Permission denied); data may be a folder of class folders" in said.err


def test_a_gpu_is_asked_for_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = typed(f"run finetune {TINY} --device cuda --out {tmp_path}/run")
    assert (said.code, said.err) == (2, "fcil: there is no usable CUDA device here; choose --device cpu or auto\n")
    assert os.listdir(tmp_path) == []


def test_a_machine_that_is_too_small_says_so(tmp_path: Path) -> None:
    said = typed(f"run finetune {TINY} --set batch_size={10**15} --workers 1 --out {tmp_path}/run")
    assert said.code == 2 and said.err.count("\n") == 1
    assert "there is not enough memory for this" in said.err and "a smaller batch_size" in said.err


def test_a_sweep_goes_on_where_one_run_was_too_large(tmp_path: Path) -> None:
    said = typed(f"sweep --methods finetune --seeds 0 {TINY} --set batch_size={10**15},8 --workers 1 --out {tmp_path}")
    assert said.code == 2 and "there is not enough memory for this" in said.err
    assert "1 of 2 runs did not finish" in said.err and len(list(tmp_path.rglob("result.json"))) == 1


def test_training_that_diverges_says_so(tmp_path: Path) -> None:
    said = typed(f"run finetune {TINY} --set lr=1e6 --set clip=0 --set steps=20 --out {tmp_path}/run")
    assert said.code == 2 and said.err.count("\n") == 1
    assert "training diverged in task 1, round 1" in said.err and "smaller lr" in said.err


def test_a_method_of_ones_own_may_not_keep_more_than_the_benchmark_allows(material: Path, tmp_path: Path) -> None:
    said = typed(f"run {material}/hoard.py {TINY} --out {tmp_path}/run")
    assert said.code == 2 and said.err.count("\n") == 1
    assert "keeps 1,856 bytes after remember of task 1; the benchmark allows 256" in said.err
    assert "set memory" in said.err


def test_the_verifier_names_what_differs(material: Path) -> None:
    said = typed(f"table {material}/lied --verify")
    assert "final is 1" in said.out and "but the ledger gives" in said.out
    said = typed(f"table {material}/cooked --verify")
    assert "SHA-256 differs" in said.out
    said = typed(f"table {material}/bad-result {material}/cooked {material}/done --verify")
    assert "result.json is not readable" in said.out and "SHA-256 differs" in said.out
    assert "2 differences between result and ledger in 3 runs" in said.err


def test_a_sweep_goes_on_after_a_run_that_fails(tmp_path: Path) -> None:
    said = typed(
        f"sweep --methods finetune --seeds 0 {TINY} --set steps=20 --set clip=0 --set lr=1e6,0.1 --out {tmp_path}"
    )
    assert said.code == 2
    diverged, summary = said.err.splitlines()
    assert "training diverged" in diverged and "1 of 2 runs did not finish" in summary
    assert "lr=0.1" in said.out  # the table of those that did


def test_a_sweep_goes_on_after_a_bug_in_ones_own_method(tmp_path: Path) -> None:
    text = Path(finetune.__file__).read_text()
    line = "        self.state.seen = mask(task.seen, len(self.state.seen))\n"
    assert line in text
    (tmp_path / "bad.py").write_text(text.replace(line, "        raise KeyError('no luck')\n"))
    said = typed(f"sweep --methods {tmp_path}/bad.py,lwf --seeds 0 {TINY} --workers 1 --out {tmp_path}/runs")
    assert said.code == 2 and "KeyError: 'no luck'" in said.err and "bad.py" in said.err
    assert "fcil/cli.py" not in said.err, "what leads to one's own code is left out"
    assert said.err.endswith("fcil: 1 of 2 runs did not finish; the same command tries them again\n")
    assert "lwf" in said.out.rpartition("test accuracy")[2] and len(list(tmp_path.rglob("result.json"))) == 1


@pytest.mark.parametrize("stop", [KeyboardInterrupt, BrokenPipeError])
def test_a_sweep_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]) -> None:
    def stopped(*_: object) -> None:
        raise stop

    monkeypatch.setattr(cli, "_execute", stopped)
    monkeypatch.setattr(terminal, "_silence", lambda: None)  # which is for a process that ends
    said = typed(f"sweep --methods finetune,lwf --seeds 0 {TINY} --out {tmp_path}")
    assert said.code and "run 1 of 2" in said.out and "run 2 of 2" not in said.out and "did not finish" not in said.err


def test_a_sweep_leaves_out_what_a_folder_refuses(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(Path(finetune.__file__).read_text())
    line = f"--seeds 0 {TINY} --workers 1 --out {tmp_path}/runs"
    done(f"sweep --methods {mine} {line}")
    mine.write_text(mine.read_text() + "# mended\n")
    for before in (0, 2):
        said = typed(f"sweep --methods finetune,{mine},joint {line}")
        assert said.code == 2 and said.out.startswith(f"3 runs, {before} of them finished before\n")
        clash, summary = said.err.splitlines()
        assert "1 run left out: mine.py has changed since" in clash and "1 of 3 runs did not finish" in summary
        assert "finetune" in said.out.rpartition("test accuracy")[2] and "joint" in said.out
    said = typed(f"sweep --methods {mine} {line}")
    assert said.err.startswith("fcil: mine.py has changed since") and said.err.count("\n") == 1 and said.out == ""
    assert "none of 3 runs can begin, the first because" in typed(f"sweep --out {mine}").err


@pytest.mark.parametrize("key", ["matrix", "per_class", "classes", "engine"])
def test_a_damaged_result_is_named(material: Path, tmp_path: Path, key: str) -> None:
    shutil.copytree(material / "done", tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    (tmp_path / "run" / "result.json").write_text(json.dumps({**result, key: 3}))
    for line in (f"run --resume {tmp_path}/run", f"table {tmp_path}/run"):
        said = typed(line)
        assert said.code == 2 and f"{key!r} is missing or of the wrong kind" in said.err and "Trace" not in said.err


def test_unreadable_images_and_empty_clients_are_counted(tmp_path: Path) -> None:
    data = class_folders(tmp_path / "mine")
    for number in range(2):
        (data / "class0" / f"{number}.png").write_bytes(b"not a picture")
    asked = "--tasks 2 --clients 30 --active 2 --set network=small --set partition=dirichlet_class"
    said = done(f"run finetune --data {data} {asked} --set rounds=1 --set steps=1 --out {tmp_path}/run")
    assert "note: 2 images are left out of mine, which could not be read: class0/0.png, class0/1.png\n" in said.out
    assert "of 30 clients have no image in some task" in said.out
    assert "of 30 clients have no image in some task" in done(f"run --resume {tmp_path}/run").out


def test_fcil_run_alone_means_the_default_method_on_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("in its way")
    said = typed("run")
    assert said.code == 2 and "runs/digits/hr/0 is a file or lies below one" in said.err
