"""A server as real processes, over TLS: killed at any moment, it goes on, and so do its nodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

from tests.deployment.federation import HR, LONG, NODES, Federation, environment, same, simulated, text_of, until

pytestmark = pytest.mark.processes


@pytest.fixture
def federation(tmp_path: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Federation]:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    made = Federation(tmp_path, three[0].parent)
    yield made
    made.close()


def test_a_server_that_is_killed_resumes_to_the_weights_of_an_uninterrupted_run(
    federation: Federation, tmp_path: Path, three: list[Path]
) -> None:
    (tmp_path / "hr.toml").write_text(HR)
    words = ["--listen", str(federation.listen), "--tls", "tls", "--min-nodes", "3", "--capacity", "8", "--out", "run"]
    federation.start("server", "serve", "hr.toml", *words)
    for name in reversed(NODES):
        federation.join(name)
    log, result = tmp_path / "run" / "server.log", tmp_path / "run" / "result.json"
    until(lambda: "task 2 begins" in text_of(log), LONG, "the first task")
    federation.kill("server")
    assert not result.exists()
    federation.start("server again", "serve", "--resume", "run")
    here = simulated(tmp_path / "here", tmp_path / "hr.toml", three)
    until(result.exists, LONG, "hr is finished")
    assert "going on in task 2" in text_of(log)
    assert same(tmp_path / "run", here)
    assert federation.processes["server again"].wait(LONG) == 0
    assert "final" in federation.said("server again")
