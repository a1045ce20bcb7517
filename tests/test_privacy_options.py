"""Differential privacy of class statistics: how much noise, from whom it protects, and what a run says it cost."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from fcil.errors import UserError
from fcil.experiment import execute
from fcil.federation import privacy
from fcil.federation.calls import Call
from fcil.federation.replies import Replies
from fcil.method import answers, reply_type
from fcil.methods import method
from fcil.methods.hr import Client
from fcil.methods.podnet import Proposal as Centres
from fcil.parts import assemble
from fcil.plan import plan
from fcil.records import ByClass, Done, Update, Weights, flatten, read_tensors, record
from fcil.results.ledger import verify
from fcil.results.runs import read_result
from fcil.scenario.benchmarks import Protocol
from fcil.terminal import show_result
from tests.conftest import FILES, tiny_plan

pytest.importorskip("opacus")
WIDE = 20_000  # numbers of a statistic: enough to measure the noise in one draw


@record
class Said:
    sums: ByClass
    counts: ByClass
    count: int


def said(value: float, count: int = 4, classes: tuple[int, ...] = (0, 1), width: int = WIDE) -> Said:
    return Said({j: torch.full((width,), value) for j in classes}, {j: torch.tensor(count) for j in classes}, count)


def replies(ups: list[Any], *key: int, kind: type = Said, **protocol: Any) -> tuple[Replies[Any], list[str]]:
    """Replies under a protocol with privacy, and what they book as released."""
    chosen, released = Protocol(**protocol), list[str]()
    return Replies(kind, iter(ups), Done(), chosen, privacy.Sums(kind, chosen, key, released.append)), released


# -- how much ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeded", [True, False])
def test_the_noise_in_a_sum_has_the_deviation_asked_for(seeded: bool) -> None:
    came, _ = replies([said(0.0)] * 5, dp="central", dp_noise=2.5, dp_clip="sums:4,counts:1", dp_seeded=seeded)
    noise = torch.cat(list(came.sum("sums").values())).double()
    assert abs(noise.std().item() / (2.5 * 4) - 1) < 0.03 and abs(noise.mean().item()) < 0.5
    assert stats.kstest((noise / 10).numpy(), "norm").pvalue > 1e-6


def test_noise_of_the_operating_system_is_normal_and_never_the_same() -> None:
    drawn = privacy.normal((200, 500), None)
    assert drawn.shape == (200, 500) and drawn.isfinite().all()
    assert stats.kstest(drawn.flatten().numpy(), "norm").pvalue > 1e-6
    assert not torch.equal(drawn, privacy.normal((200, 500), None)) and privacy.normal((), None).shape == ()


def test_noise_in_every_reply_adds_up_over_clients() -> None:
    protocol = Protocol(dp="local", dp_noise=2.0, dp_clip="3")
    left = [privacy.said(said(0.0), protocol, 0, client, 1) for client in range(9)]
    each = torch.stack([torch.cat(list(reply.sums.values())) for reply in left]).double()
    assert all(abs(one.std().item() / 6 - 1) < 0.03 for one in each)
    assert abs(each.sum(0).std().item() / (6 * 3) - 1) < 0.03, "as of independent noise: nine times the variance"
    came, released = replies(left, dp="local", dp_noise=2.0, dp_clip="3")
    assert torch.allclose(came.sum("sums")[0], each.sum(0)[:WIDE].float(), atol=1e-3), "the server adds none"
    assert released == []


def test_a_client_can_move_a_sum_by_no_more_than_the_clip() -> None:
    how: dict[str, Any] = {"dp": "central", "dp_clip": "sums:7,counts:2", "dp_seeded": True}
    honest = [said(0.001, 1), said(0.002, 1)]
    before, after = replies(honest, **how)[0], replies([*honest, said(1e6, 10**6)], **how)[0]
    for field, limit in (("sums", 7.0), ("counts", 2.0)):
        # the same noise in both, which thus tells nothing of the difference
        one, other = (torch.cat([t.flatten() for t in came.sum(field).values()]) for came in (before, after))
        assert float((one - other).double().norm()) <= limit * 1.001
    sums = torch.cat([after.sum("sums")[j] - before.sum("sums")[j] for j in (0, 1)])
    assert float(sums.double().norm()) == pytest.approx(7.0, rel=1e-3), "over all classes together"


def test_what_is_small_enough_is_not_scaled() -> None:
    small = said(0.01, 1, width=3)
    clipped = privacy.Sums(Said, Protocol(dp="central", dp_clip="50"), (), print).clipped(flatten(small))
    assert all(torch.equal(clipped[name].double(), tensor.double()) for name, tensor in flatten(small).items())


@pytest.mark.parametrize(("noise", "least"), [(0.04, 1.0), (5.0, 100.0)])
def test_counts_stay_fit_to_divide_by(noise: float, least: float) -> None:
    many = [said(0.0, 1, tuple(range(200)), 1)]
    came, _ = replies(many, dp="central", dp_noise=noise, dp_clip="20")
    counts = torch.stack(list(came.sum("counts").values()))
    assert counts.min() == pytest.approx(least), "one image, or what the noise may have taken"
    assert counts.max() > least


def test_the_noise_of_many_replies_is_what_their_count_is_held_against() -> None:
    protocol = Protocol(dp="local", dp_noise=5.0, dp_clip="2")
    left = [privacy.said(said(0.0, 1, tuple(range(200)), 1), protocol, 0, client, 1) for client in range(9)]
    counts = torch.stack(list(replies(left, dp="local", dp_noise=5.0, dp_clip="2")[0].sum("counts").values()))
    assert counts.min() == pytest.approx(30.0) and counts.max() > 30


# -- once, and only what is covered -----------------------------------------------------------------------------------


def test_a_sum_is_released_once_however_often_it_is_looked_at() -> None:
    came, released = replies([said(1.0)] * 3, dp="central")
    first = came.sum("sums")
    first[0] += 100
    assert torch.equal(came.sum("sums")[1], first[1]) and not torch.equal(came.sum("sums")[0], first[0])
    assert released == ["sums"]


def test_an_average_would_tell_by_how_many_it_was_divided() -> None:
    with pytest.raises(UserError, match="dp=central protects sums, and this method's server averages sums"):
        replies([said(1.0)] * 3, dp="central")[0].mean("sums")
    assert replies([said(1.0)] * 3, dp="local")[0].mean("sums")[0][0] == 1.0


def test_networks_and_the_number_of_images_get_no_noise() -> None:
    ups = [Update({"w": torch.tensor([1.0, 3.0])}, 5), Update({"w": torch.tensor([3.0, 5.0])}, 5)]
    came, released = replies(ups, kind=Update, dp="central")
    assert came.mean("weights")["w"].tolist() == [2.0, 4.0] and released == []
    assert privacy.said(ups[0], Protocol(dp="local")) is ups[0]
    assert privacy.covered(Update) == () and privacy.covered(Said) == ("sums", "counts")


def test_a_reply_that_leaves_under_local_privacy_does_not_say_how_many_images_there_are() -> None:
    assert privacy.said(said(1.0, 812), Protocol(dp="local")).count == 1


def test_without_privacy_a_reply_leaves_as_it_is() -> None:
    reply = said(1.0)
    assert privacy.said(reply, Protocol(), 0, 1, 2) is reply
    assert privacy.said(reply, Protocol(dp="central"), 0, 1, 2) is reply


def test_seeded_noise_repeats_and_other_noise_does_not() -> None:
    def drawn(seeded: bool, *key: int) -> torch.Tensor:
        return replies([said(0.0)], *key, dp="central", dp_seeded=seeded)[0].sum("sums")[0]

    assert torch.equal(drawn(True, 1), drawn(True, 1)) and not torch.equal(drawn(True, 1), drawn(True, 2))
    assert not torch.equal(drawn(False, 1), drawn(False, 1))


def test_single_replies_are_shown_only_where_each_is_private() -> None:
    centres = Centres({0: torch.ones(2, 3)}, {0: torch.tensor([-5.0, 5.0])})
    with pytest.raises(UserError, match="dp=central protects sums, and this method's server looks at every Proposal"):
        list(replies([centres], kind=Centres, dp="central")[0])
    (shown,) = replies([centres], kind=Centres, dp="local")[0]
    assert shown.counts[0].tolist() == [1.0, 5.0]
    update = Update({"w": torch.ones(1)}, 1)
    assert list(replies([update], kind=Update, dp="central")[0]) == [update]


# -- what it cost -----------------------------------------------------------------------------------------------------


def renyi(sigma: float, steps: int, delta: float) -> float:
    """Epsilon of Gaussian mechanisms by Renyi differential privacy, worked out from the formulas."""
    orders = [1 + k / 100 for k in range(1, 20_000)]
    costs = (
        steps * a / (2 * sigma**2) + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1) for a in orders
    )
    return min(costs)


def exact(sigma: float, steps: int, delta: float) -> float:
    """Epsilon of the same without any loss: so many Gaussian mechanisms are one of sigma / sqrt(steps)."""
    mu, phi = math.sqrt(steps) / sigma, stats.norm.cdf
    low, high = 0.0, 1000.0
    for _ in range(100):
        middle = (low + high) / 2
        found = phi(mu / 2 - middle / mu) - math.exp(min(middle, 700)) * phi(-mu / 2 - middle / mu)
        low, high = (middle, high) if found > delta else (low, middle)
    return high


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 10), (5.0, 40), (20.0, 3), (4.0, 1)])
def test_epsilon_is_what_opacus_and_the_formulas_say(sigma: float, steps: int) -> None:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for _ in range(steps):
        accountant.step(noise_multiplier=sigma, sample_rate=1.0)
    told = privacy.spent(Protocol(dp="central", dp_noise=sigma), {"a.sums": steps - 1, "a.counts": 1})
    assert told["epsilon"] == accountant.get_epsilon(1e-5) == pytest.approx(renyi(sigma, steps, 1e-5), rel=0.01)
    assert exact(sigma, steps, 1e-5) <= told["epsilon"] < 1.5 * exact(sigma, steps, 1e-5)


def test_epsilon_of_a_known_case() -> None:
    assert privacy.spent(Protocol(dp="local"), {"x.sums": 10})["epsilon"] == pytest.approx(19.0536, abs=1e-4)
    assert privacy.spent(Protocol(dp="local"), {})["epsilon"] == 0


# -- whole runs -------------------------------------------------------------------------------------------------------


def weights(folder: Path) -> Weights:
    return read_tensors(folder / "model.safetensors")[0]


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def done(method: str, folder: Path, workers: int = 1, **settings: Any) -> dict[str, Any]:
    for _ in execute(tiny_plan(method, **settings), folder, "cpu", workers=workers):
        pass
    return read_result(folder)


EXPECTED = {
    "hr": {f"propose.{part}": 3 for part in ("sums", "firsts", "seconds", "counts")},
    "icarl": {"remember.sums": 3, "remember.counts": 3},
    "remind": {f"measure.{part}": 10 for part in ("sums", "squares", "counts")},
    "ictrl": {f"measure.{part}": 3 for part in ("counts", "sums", "products")},
}


@pytest.mark.parametrize("dp", ["central", "local"])
@pytest.mark.parametrize("method", EXPECTED)
def test_a_run_says_what_its_privacy_cost(
    method: str, dp: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = done(method, tmp_path / "run", dp=dp, dp_clip="30", dp_noise=4.0)
    told, expected = result["privacy"], EXPECTED[method]
    assert told["releases"] == result["releases"] == expected and "refused" not in result
    assert told["epsilon"] == pytest.approx(renyi(4.0, sum(expected.values()), 1e-5), rel=0.01)
    assert (told["dp"], told["clip"], told["noise"], told["delta"]) == (dp, "30", 4.0, 1e-5)
    assert verify(tmp_path / "run") == []
    show_result(tmp_path / "run")
    shown = " ".join(capsys.readouterr().out.split())
    assert f"epsilon {told['epsilon']:.2f} at delta 1e-05 for one client's {', '.join(told['releases'])}" in shown


def test_a_method_without_class_statistics_says_that_nothing_was_protected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert done("finetune", tmp_path / "run", dp="central", stop_after=1)["privacy"]["epsilon"] == 0
    show_result(tmp_path / "run")
    assert "dp=central protected nothing" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("method", ["hr", "icarl"])
def test_off_is_off_to_the_bit(method: str, tmp_path: Path) -> None:
    result = done(method, tmp_path / "off", dp="off", dp_noise=9.0, dp_clip="0.001", stop_after=2)
    done(method, tmp_path / "plain", stop_after=2)
    done(method, tmp_path / "on", dp="central", dp_noise=9.0, dp_clip="0.001", stop_after=2)
    assert same(weights(tmp_path / "off"), weights(tmp_path / "plain")) and "privacy" not in result
    assert not same(weights(tmp_path / "on"), weights(tmp_path / "plain"))


@pytest.mark.parametrize("dp", ["central", "local"])
def test_a_seeded_run_repeats_to_the_bit_with_workers_too(dp: str, tmp_path: Path) -> None:
    settings = {"dp": dp, "dp_clip": "30", "dp_seeded": True, "stop_after": 2}
    done("hr", tmp_path / "one", **settings)
    done("hr", tmp_path / "two", workers=2, **settings)
    assert same(weights(tmp_path / "one"), weights(tmp_path / "two"))


def test_what_was_released_before_a_crash_counts_though_the_run_does_not_remember_it(tmp_path: Path) -> None:
    wanted = tiny_plan("hr", dp="central", dp_clip="30", stop_after=1)
    lines = execute(wanted, tmp_path / "run", "cpu", every=1e9, workers=1)
    while next(lines)["kind"] != "round":
        pass
    lines.close()  # type: ignore[attr-defined]
    result = done("hr", tmp_path / "run", dp="central", dp_clip="30", stop_after=1)
    parts = ("sums", "firsts", "seconds", "counts")
    assert result["releases"] == {f"propose.{part}": 1 for part in parts}
    assert result["privacy"]["releases"] == {f"propose.{part}": 2 for part in parts}


def test_what_leaves_a_client_has_its_noise_already() -> None:
    def proposed(**settings: Any) -> Any:
        parts = assemble(tiny_plan("hr", **settings), "cpu", workers=1)
        task = parts.scenario.tasks[0]
        parts.scenario.begin(task)
        parts.server.state.codec = parts.server.codec.fitted(None)
        data, message = parts.scenario.local(0, task), parts.server.broadcast()
        return parts.engine.answer(0, Client.propose, parts.method.memory(), data, message, Call(0, 0, 1)).reply

    plain, private = proposed(), proposed(dp="local", dp_clip="1e6", dp_noise=1e-4)
    for field in ("sums", "firsts", "seconds", "counts"):
        for j, tensor in getattr(private, field).items():
            off = tensor.double() - getattr(plain, field)[j].double()
            assert off.abs().min() > 0 and off.abs().max() < 600, "a deviation of 100, and nothing clipped"
    assert private.count == 1


# -- what a user can get wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", ["", "none", "sums:", "sums:-1", "0", "sums:inf", "1,,2", "a:b:1,x"])
def test_a_wrong_clip_is_said_before_the_run_begins(clip: str) -> None:
    with pytest.raises(UserError, match="dp_clip takes a number above 0, or fields and numbers"):
        assemble(replace(tiny_plan("hr"), protocol=Protocol(dp="central", dp_clip=clip)), "cpu", workers=1)


def test_a_field_without_a_clip_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="dp_clip=sums:1 says nothing of firsts; add firsts:NUMBER"):
        done("hr", tmp_path / "run", dp="central", dp_clip="sums:1")


def test_a_field_without_a_clip_is_named_before_the_run_begins() -> None:
    with pytest.raises(UserError, match="dp_clip=sums:1,counts:1 says nothing of centres; add centres:NUMBER"):
        plan("podnet", settings={"dp": "local", "dp_clip": "sums:1,counts:1"})  # it would be told in task 2


SPEAKING = [name for name in FILES if any(privacy.covered(reply_type(a)) for a in answers(method(name).client))]


@pytest.mark.parametrize("name", [*SPEAKING, "hr-literal with centroids of clients"])
def test_what_central_privacy_cannot_protect_is_refused_before_the_run_begins(name: str, tmp_path: Path) -> None:
    name, *of_clients = name.split(" with ")
    settings = {"rounds": 1, "steps": 1, "stop_after": 2, **({"centroids": "per_client"} if of_clients else {})}

    def refusal(step: Callable[[], Any]) -> str:
        try:
            step()
        except UserError as error:
            return str(error)
        return ""

    private = {"dp": "central", "dp_clip": "30"}
    planned = refusal(lambda: tiny_plan(name, **settings, **private))
    unasked = tiny_plan(name, **settings)
    unasked = replace(unasked, protocol=replace(unasked.protocol, **private))
    assert planned == refusal(lambda: [*execute(unasked, tmp_path / "run", "cpu", workers=1)])
    assert ("set dp=local" in planned) == (name in ("podnet", "fedftg") or bool(of_clients))


def test_a_clip_for_one_field_leaves_the_others_theirs() -> None:
    limit = privacy.clips(Protocol(dp_clip="20, counts:3"))
    assert (limit("counts"), limit("sums")) == (3.0, 20.0)


def test_outliers_would_undo_central_privacy() -> None:
    with pytest.raises(UserError, match="dp=central and outliers exclude each other"):
        assemble(tiny_plan("hr", dp="central", outliers=10), "cpu", workers=1)
    assemble(tiny_plan("hr", dp="local", outliers=10), "cpu", workers=1)


def test_the_accountant_is_asked_for_before_the_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"constraints.txt -e '\.\[privacy\]'"):
        assemble(tiny_plan("hr", dp="local"), "cpu", workers=1)
    assemble(tiny_plan("hr"), "cpu", workers=1)


@pytest.mark.parametrize("setting", ["dp=yes", "dp_noise=0.0", "dp_delta=0.0", "dp_delta=0.6"])
def test_values_that_make_no_sense_are_refused(setting: str) -> None:
    key, _, value = setting.partition("=")
    with pytest.raises(UserError, match=f"{setting} is not allowed; {key} takes"):
        plan("hr", settings={key: value})
