"""What audits found, side by side: the chart has their numbers, and the order of what is kept is a measurement."""

import json
from pathlib import Path
from typing import Any

import pytest

from fcil.bench.page import made_up_run
from fcil.report.drawing import Chart
from fcil.report.evidence import Evidence, gather
from fcil.report.told import Step, steps, what_audits_tell


def audited(root: Path, method: str, seed: int, kept: dict[str, Any] | None, told: float, **settings: Any) -> Path:
    """Write a made-up run and its audit, by which exemplars are told at `told` and all images at 0.5."""
    folder = root / ",".join([method, *(f"{k}-{v}" for k, v in settings.items())]) / str(seed)
    made_up_run(folder, method, seed, tasks=3, clients=4, settings=settings)
    rows = [{"images": "all training images", "attack": "loss", "value": 0.5, "low": 0.4, "high": 0.6}]
    if kept:
        row = {"images": "sources of exemplars", "attack": "distance to what is kept", "low": 0.4, "high": 1.0}
        rows.append({**row, "value": told})
    (folder / "audit.json").write_text(json.dumps({"kept": kept, "membership": rows}))
    return folder


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    for seed, spread in enumerate((-0.01, 0.0, 0.01)):
        audited(tmp_path, "icarl", seed, {"identical": 1.0}, 1.0)
        audited(tmp_path, "icarl", seed, {"identical": 0.0}, 0.9 + spread, exemplar_codec="webp:64")
        audited(tmp_path, "hr", seed, {"identical": 0.0}, 0.95 - spread)
        audited(tmp_path, "remind", seed, {"identical": 0.0}, 0.87 + 3 * spread)
        audited(tmp_path, "mfcl", seed, None, 0.0)
    made_up_run(tmp_path / "lwf/0", "lwf", 0, tasks=3, clients=4)
    (found,), left_out = gather([tmp_path])
    assert left_out == []
    return found


def test_the_order_of_what_is_kept_is_measured_seed_by_seed(evidence: Evidence) -> None:
    raw, webp, codes = steps(evidence.groups)
    assert raw[:2] == ("raw images", "WebP files") and raw.mean == pytest.approx(0.1)
    half = 4.30265273 * 0.01 / 3**0.5  # Student's t of two degrees, and the standard error of three seeds
    assert (raw.low, raw.high) == pytest.approx((0.1 - half, 0.1 + half)) and raw.verdict == "holds"
    assert webp[:2] == ("WebP files", "codes") and webp.mean == pytest.approx(-0.01)  # codes: hr and remind alike
    assert webp.low < 0 < webp.high or webp.verdict == "fails"
    assert codes[:2] == ("codes", "nothing") and codes.verdict == "holds" and codes.mean == pytest.approx(0.41)


@pytest.mark.parametrize(("low", "high", "verdict"), [(0.1, 0.3, "holds"), (-0.1, 0.3, "not seen"), (-2, -1, "fails")])
def test_a_verdict_is_what_the_interval_allows(low: float, high: float, verdict: str) -> None:
    assert Step("a", "b", (low + high) / 2, low, high).verdict == verdict


def test_the_chart_has_every_audit_and_no_other_run(evidence: Evidence) -> None:
    drawn = what_audits_tell(evidence)
    assert isinstance(drawn, Chart)
    by_distance, by_loss, everyone = drawn.figure.data
    shown = dict(zip([label for label, _ in by_distance.customdata], by_distance.x, strict=True))
    assert shown["icarl"] == 1.0 and shown["hr"] == pytest.approx(0.95) and "mfcl" not in shown
    assert len(by_loss.x) == 0 and set(everyone.x) == {0.5} and len(everyone.x) == 5
    assert len(drawn.rows) == 3 * (4 * 2 + 1) and {row[0] for row in drawn.rows} == {"icarl", "hr", "remind", "mfcl"}
    assert "raw images above WebP files by 0.100" in drawn.says


def test_without_audits_there_is_no_chart_and_a_torn_one_is_named(tmp_path: Path) -> None:
    folder = audited(tmp_path, "hr", 0, {"identical": 0.0}, 0.9)
    for content in (b"{", b"[]", b'{"membership": 3}', b'{"membership": [{"value": "high"}, 4]}', b"\xff"):
        (folder / "audit.json").write_bytes(content)
        (found,), (sentence,) = gather([tmp_path])
        assert "no run here was audited" in str(what_audits_tell(found))
        assert str(folder / "audit.json") in sentence and f"`fcil audit {folder}` makes it again" in sentence
    (folder / "audit.json").unlink()
    assert gather([tmp_path])[1] == []
