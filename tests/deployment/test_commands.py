"""The commands of a deployment: what is wrong is one sentence, and nothing is begun."""

import json
import os
import shlex
import socket
import ssl
import subprocess
import sys
import time
from contextlib import chdir
from datetime import UTC, datetime
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

from cryptography import x509

from fcil.deploy.certificates import check, make
from fcil.deploy.plans import MEANINGLESS, deployed
from fcil.deploy.processes import KEY_IN_USE, Address, environment, flwr, not_registered, shim
from fcil.deploy.script import Terms
from fcil.deploy.serving import Seat, _admit, why_not
from fcil.errors import UserError
from fcil.knobs import knobs
from fcil.scenario.benchmarks import Benchmark
from tests.deployment.conftest import digits_into
from tests.deployment.federation import ROOT
from tests.typed import Said, typed


def fcil(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fcil", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(command, env=env, capture_output=True, text=True, cwd=cwd, timeout=600)


@pytest.fixture
def tls(tmp_path: Path) -> Path:
    make(tmp_path / "tls", ["127.0.0.1"], ["anna"], 30)
    return tmp_path / "tls"


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    return done.stderr


def refused(*words: str | Path, cwd: Path) -> Said:
    """Type a command, in this process, that must be refused in one sentence."""
    with chdir(cwd):
        done = typed(shlex.join(map(str, words)))
    assert done.code == 2 and done.err.count("\n") == 1, done
    return done


def test_what_is_wrong_with_serve_is_one_sentence(tmp_path: Path, tls: Path) -> None:
    (tmp_path / "hr.toml").write_text('method = "hr"\n')
    (tmp_path / "bad.toml").write_text('method = "hrr"\n')
    (tmp_path / "lost.toml").write_text("lost = 0.5\n")
    (tmp_path / "true.toml").write_text("seed = true\n")
    for words, expected in (
        ([], "say what to serve"),
        (["none.toml", "--insecure"], "there is no file none.toml"),
        (["bad.toml", "--insecure"], "did you mean 'hr'"),
        (["lost.toml", "--insecure"], "lost is not allowed here"),
        (["true.toml", "--insecure"], "seed is a whole number"),
        (["hr.toml"], "give the certificates with --tls DIR"),
        (["hr.toml", "--tls", "nowhere"], "there is no certificate"),
        (["hr.toml", "--insecure", "--listen", "here"], "takes HOST:PORT"),
        (["hr.toml", "--insecure", "--timeout", "nan"], "--timeout nan is not allowed; it takes a number of seconds"),
        (["hr.toml", "--insecure", "--task-every", "inf"], "--task-every inf is not allowed"),
        (["--resume", "nowhere"], "nowhere does not exist"),
    ):
        assert expected in refused("serve", *words, cwd=tmp_path).err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.toml", "hr.toml", "lost.toml", "tls", "true.toml"]


def test_a_port_in_use_is_said_before_anything_begins(tmp_path: Path, tls: Path) -> None:
    (tmp_path / "hr.toml").write_text('method = "hr"\n')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        done = fcil("serve", "hr.toml", "--tls", "tls", "--listen", listen, cwd=tmp_path)
    assert f"cannot listen on {listen}: another program listens there" in said(done)
    assert not (tmp_path / "runs").exists()


def test_what_is_wrong_with_join_is_one_sentence(tmp_path: Path, tls: Path) -> None:
    key = tls / "nodes" / "anna" / "anna.key"
    (tmp_path / "data").mkdir()
    (tmp_path / "no.key").write_text("nothing")
    (tmp_path / "alone.key").write_bytes(key.read_bytes())
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose" / "photo.png").write_text("")
    good = {"--server": "127.0.0.1:9", "--data": "data", "--state": "state", "--key": str(key), "--patience": "0"}
    for change, expected in (
        ({"--server": "nowhere"}, "takes HOST:PORT"),
        ({}, "cannot reach 127.0.0.1:9: Connection refused; is the server running"),
        ({"--patience": "nan"}, "--patience nan is not allowed; it takes a number of seconds"),
        ({"--data": "missing"}, "there is no folder missing"),
        ({"--data": "loose"}, "the images in loose are of no class; put those of each class into a folder of its name"),
        ({"--key": "missing.key"}, "there is no key missing.key; `fcil certs` makes one"),
        ({"--key": "alone.key"}, "there is no certificate ca.crt"),
        ({"--key": "no.key", "--ca": str(tls / "ca.crt")}, "is not a private key"),
        ({"--key": str(key), "--ca": str(key)}, "is not a readable certificate"),
        ({"--state": "data/file"}, "cannot write to data/file"),
    ):
        (tmp_path / "data" / "file").write_text("")
        words = [word for pair in {**good, **change}.items() for word in pair]
        assert expected in refused("join", *words, cwd=tmp_path).err
    words = [word for name, value in good.items() if name != "--key" for word in (name, value)]
    assert "give this node's key with --key" in refused("join", *words, cwd=tmp_path).err


def test_an_expired_certificate_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Past(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime(2010, 1, 1, tzinfo=UTC)

    with monkeypatch.context() as then:
        then.setattr("fcil.deploy.certificates.datetime", Past)
        make(tmp_path / "tls", ["127.0.0.1"], ["anna"], 30)
    with pytest.raises(UserError, match=r"server.crt expired on 2010-01-31; make a new one"):
        check(tmp_path / "tls" / "server.crt")
    (tmp_path / "hr.toml").write_text('method = "hr"\n')
    assert "ca.crt expired on 2019-12-30" in said(fcil("serve", "hr.toml", "--tls", "tls", cwd=tmp_path))
    assert "name the server's hosts too" in said(fcil("certs", "tls", "--node", "dora", cwd=tmp_path))
    anew = fcil("certs", "tls", "--host", "127.0.0.1", cwd=tmp_path)  # as that sentence says
    assert anew.returncode == 0 and "copy ca.crt to every node again" in anew.stdout
    for name in ("ca.crt", "server.crt", "nodes/anna/ca.crt"):
        check(tmp_path / "tls" / name)
    assert (tmp_path / "tls" / "ca.crt").read_bytes() == (tmp_path / "tls" / "nodes" / "anna" / "ca.crt").read_bytes()


def test_what_is_wrong_with_certs_is_one_sentence(tmp_path: Path, tls: Path) -> None:
    long = f"{'a' * 40}.{'b' * 40}.example.org"
    assert fcil("certs", tmp_path / "long", "--host", long).returncode == 0
    assert "--host is empty" in said(fcil("certs", tmp_path / "none", "--host", ""))
    assert "--host bad host! is not allowed" in said(fcil("certs", tmp_path / "none", "--host", "bad host!"))
    assert not (tmp_path / "none").exists()
    assert "--days 9999999 is not allowed" in said(fcil("certs", tmp_path / "none", "--days", "9999999"))
    (tls / "ca.key").write_text("junk")
    assert "ca.key is not a readable key" in said(fcil("certs", tls, "--host", "x.org"))


NO_HOSTS = (
    "bad host!", "example.org:9092", "http://example.org", "-x.org", "x-.org", "x..org", "x.org.", "*.x.org", "x.org\n",
    "256.1.1.1", "1.2.3", "[::1]", "m\xfcller.org", "a" * 64, ".".join(["a" * 49] * 6), "a/b", " ",
)  # fmt: skip


@pytest.mark.parametrize("host", NO_HOSTS)
def test_what_is_neither_a_host_name_nor_an_address_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it takes a host name or an IP address"):
        make(tmp_path / "tls", ["example.org", host], [], 30)
    assert not (tmp_path / "tls").exists()


@pytest.mark.parametrize("host", ["localhost", "7.example.org", "a-b.c", "my_server", "192.0.2.1", "::1", "3com.com"])
def test_a_host_name_or_an_address_is_in_the_certificate(host: str, tmp_path: Path) -> None:
    make(tmp_path / "tls", [host], [], 30)
    found = x509.load_pem_x509_certificate((tmp_path / "tls" / "server.crt").read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == [host]


def test_a_bad_public_key_is_said_once_and_keeps_no_other_node_out(
    tmp_path: Path, tls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tls, [], ["berta"], 30)
    bad, whole = tls / "nodes" / "anna" / "anna.pub", (tls / "nodes" / "anna" / "anna.pub").read_bytes()
    bad.write_bytes(whole[:30])
    registered: list[str] = []
    monkeypatch.setattr("fcil.deploy.serving.register", lambda place, key: registered.append(key.stem))
    told, tried = list[str](), set[tuple[Path, int]]()
    for _ in range(3):
        _admit(tmp_path, tls, tried, told.append)
    assert registered == ["berta"] and len(told) == 2
    assert "anna.pub is not a public key of `fcil certs`" in told[0] and told[1] == "node berta may join"
    bad.write_bytes(whole)
    os.utime(bad, (1, 1))
    _admit(tmp_path, tls, tried, told.append)
    assert registered == ["berta", "anna"]


def test_a_flower_that_does_not_end_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"flwr supernode register did not end within 0 s"):
        flwr(tmp_path, "supernode", "register", "x", patience=0.01)


def test_why_a_node_was_not_admitted_is_read_from_flowers_own_code() -> None:
    seat = Seat(Address("h", 1), "anna", Path(), Path(), None, None)
    id = "INFO :      Receiving: query.fcil message (ID: 4cbd2af6d32001c00d2004)\n"
    key = "ERROR :     Exit Code: 305\n[code: 2001] SuperNode registration is disabled.\n"
    late = "ERROR :     Exit Code: 305\n[code: 2004] Failed to activate SuperNode.\n"
    assert "admits nodes with a key only" in why_not(id + key, seat)[0]
    assert "did not admit node anna" in why_not(id + late, seat)[0] and why_not(id + late, seat)[1]
    assert "SuperNode ended: it was killed" in why_not(id + "it was killed", seat)[0]
    assert "SuperNode ended: it was killed" in why_not(late + 100 * id + "it was killed", seat)[0]


def test_whether_a_key_was_registered_is_read_from_flowers_own_answer() -> None:
    assert not_registered('{"success": true, "node-id": 12002}', "") == ""
    before = '{"success": false, "error-message": "Using SuperLink: fcil\\n\\n[code: 23] Public key already in use."}'
    assert KEY_IN_USE in not_registered(before, "")
    other = '{"success": false, "error-message": "[code: 2002] no port 23 is already in use"}'
    assert not_registered(other, "") == "[code: 2002] no port 23 is already in use"
    assert KEY_IN_USE not in not_registered(other, "")
    assert not_registered("Usage: flwr", "no such\noption") == "Usage: flwr no such option"
    assert not_registered("", "") == "Flower said nothing" and not_registered("[]", "") == "[]"


def test_status_says_how_old_it_is_and_who_is_online_only_while_that_is_known(tmp_path: Path) -> None:
    Terms().write(tmp_path)
    seen = {"name": "anna", "classes": {}, "last": 1.0, "down": 0, "up": 0, "answers": 0, "refused": 0, "why": ""}
    for age, now in ((30, "online"), (300, "unknown")):
        found = {"nodes": [{**seen, "online": True}], "written": time.time() - age}
        (tmp_path / "nodes.json").write_text(json.dumps(found))
        shown = fcil("status", tmp_path).stdout
        assert now in shown and "as the server saw it" in shown
        assert ("online" in shown) == (now == "online")
    for damage in ('{"nodes": [{}], "written": 1}', '{"nod', "[]", "{}"):
        (tmp_path / "nodes.json").write_text(damage)
        assert "nodes.json cannot be read" in said(fcil("status", tmp_path))


def test_certificates_are_made_once_and_only_their_owner_reads_keys(tmp_path: Path) -> None:
    first = fcil("certs", tmp_path / "tls", "--host", "example.org", "--host", "192.0.2.1", "--node", "anna")
    assert first.returncode == 0 and first.stdout.count("written:") == 7
    before = {path: path.read_bytes() for path in (tmp_path / "tls").rglob("*") if path.is_file()}
    again = fcil("certs", tmp_path / "tls", "--node", "anna", "--node", "berta")
    assert again.returncode == 0 and again.stdout.count("written:") == 3
    assert all(path.read_bytes() == content for path, content in before.items())
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "tls").rglob("*.key"))
    server = x509.load_pem_x509_certificate((tmp_path / "tls" / "server.crt").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["example.org"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.1"]
    context = ssl.create_default_context(cafile=str(tmp_path / "tls" / "ca.crt"))
    assert context.cert_store_stats()["x509_ca"] == 1
    assert "no name for a node" in said(fcil("certs", tmp_path / "tls", "--node", "../x"))


def test_nodes_take_all_folders_that_follow(tmp_path: Path) -> None:
    folders = [digits_into(tmp_path / name, (0, 1), 20 * n) for n, name in enumerate(("anna", "berta"))]
    short = ["--set", "rounds=1", "--set", "steps=1", "--set", "image_size=8"]
    done = fcil("run", "finetune", "--nodes", *folders, *short, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "finetune on 2 nodes" in done.stdout and "task 1, learned" in done.stdout
    again = fcil("run", "--resume", "run", cwd=tmp_path)
    assert again.returncode == 0 and "is finished" in again.stdout
    shown = fcil("status", "run", cwd=tmp_path)
    assert "anna" in shown.stdout and "berta" in shown.stdout and "2 classes so far" in shown.stdout
    assert "is a simulation" in said(fcil("serve", "--resume", "run", cwd=tmp_path))
    assert "images and memories are its nodes' own" in said(fcil("audit", "run", cwd=tmp_path))


def test_a_run_on_other_nodes_is_another_run(tmp_path: Path) -> None:
    for n, name in enumerate(("anna", "berta", "carla")):
        digits_into(tmp_path / name, (0, 1), 20 * n)
    short = ["--set", "rounds=1", "--set", "steps=1", "--set", "image_size=8", "--out", "run"]

    def run(*nodes: str) -> list[str]:
        done = fcil("run", "finetune", "--nodes", *nodes, *short, cwd=tmp_path)
        return [done.stdout.splitlines()[0] if done.stdout else "", done.stderr]

    assert run("berta", "carla/", "anna")[1] == ""
    config = tmp_path / "run" / "config.toml"
    assert f'nodes = ["{tmp_path}/anna", "{tmp_path}/berta", "{tmp_path}/carla"]' in config.read_text()
    other = ["", "fcil: run holds another run (nodes anna, berta, carla); choose a different --out, or remove it\n"]
    for older in (False, True):
        if older:  # as it was when only deploy.json had the nodes
            config.write_text("".join(li for li in config.read_text().splitlines(True) if not li.startswith("nodes")))
        assert run("berta", "anna") == run("anna") == other
        assert run("anna/", "berta", "carla")[0] == "run is finished; this is what came out"
    (tmp_path / "run" / "result.json").unlink()
    assert run("carla", "berta") == other
    resumed = fcil("run", "--resume", "run", cwd=tmp_path)
    assert resumed.returncode == 0 and "going on in task 2 after question" in resumed.stdout, resumed.stderr


def test_what_is_wrong_with_nodes_is_one_sentence(tmp_path: Path) -> None:
    data = digits_into(tmp_path / "anna", (0, 1), 0)
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose" / "photo.png").write_text("")
    (tmp_path / "empty").mkdir()
    for words, expected in (
        (["--nodes", tmp_path / "missing"], "there is no folder"),
        (["--nodes", data, tmp_path / "loose"], "are of no class"),
        (["--nodes", tmp_path / "empty"], "no class folder of these nodes has an image"),
        (["--nodes"], "--nodes takes folders of class folders"),
        (["--nodes", "--seed", "3"], "--nodes takes folders of class folders"),
        (["--nodes", data, "--benchmark", "digits"], "leave out --benchmark"),
        (["--nodes", data, "--set", "partition=lda_equal"], "partition is not allowed here"),
        (["--nodes", data, "--set", "image_size=0"], "image_size=0 is not allowed here"),
        (["--nodes", data, data], "are called 'anna'"),
        (["--nodes", data, "--set", "quorum=2"], "quorum=2 is not allowed with 1 node; quorum takes 0 to 1"),
        (["--nodes", data, "--set", "norm=group"], "norm=group keeps none"),
        (["--capacity", "4"], "--capacity belongs to --nodes"),
    ):
        done = refused("run", "mfcl", *words, cwd=tmp_path)
        assert expected in done.err and done.out == "" and not (tmp_path / "runs").exists()
    assert "is not the folder of a deployment" in said(fcil("status", tmp_path))


def test_what_only_a_simulation_decides_is_a_knob_of_the_benchmark() -> None:
    assert set(MEANINGLESS) <= set(knobs(Benchmark))
    for name in MEANINGLESS:
        with pytest.raises(UserError, match="not allowed here"):
            deployed("hr", None, 0, {name: "1"}, 8)
    with pytest.raises(UserError, match="there is no method 'hrr'; did you mean 'hr'") as refused:
        deployed("hrr", None, 0, {}, 8)
    assert ".py" not in str(refused.value)
    with pytest.raises(UserError, match="there is no setting 'rouns'; did you mean 'rounds'") as refused:
        deployed("hr", None, 0, {"rouns": "1"}, 8)
    allowed = str(refused.value).partition("allowed: ")[2].split(", ")
    assert "code_bytes" in allowed and not set(allowed) & set(MEANINGLESS)


def test_flower_sends_nothing_home_and_installs_nothing(tmp_path: Path) -> None:
    seen = environment(tmp_path)
    assert seen["FLWR_TELEMETRY_ENABLED"] == "0" and seen["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert seen["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1" and seen["FLWR_HOME"] == str(tmp_path)


def test_addresses_are_read_as_people_write_them() -> None:
    assert str(Address.read("[::1]:9092", "--listen")) == "[::1]:9092"
    assert Address.read("0.0.0.0:9092", "--listen").near.host == "127.0.0.1"
    for wrong in ("", "host", "host:", ":1", "host:0", "host:70000", "host:x", "host:²", "host:٣"):
        with pytest.raises(UserError, match="takes HOST:PORT"):
            Address.read(wrong, "--listen")


def test_the_flower_app_is_where_it_is_looked_for() -> None:
    assert (shim() / "fcil_app" / "__init__.py").is_file()
