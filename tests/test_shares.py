import io
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fcil.errors import UserError
from fcil.report.shares import COLUMNS, describe, draw_shares, shares_rows, shares_table
from fcil.scenario.benchmarks import BENCHMARKS, PARTITIONS
from fcil.scenario.datasets import load
from fcil.scenario.scenario import Scenario


@pytest.fixture(scope="module")
def digits():
    return load("digits")


@pytest.fixture
def scenario(digits):
    return Scenario(BENCHMARKS["digits"], 0, digits)


def test_rows_tell_the_shares(scenario):
    rows = shares_rows(scenario)
    assert len(rows) == 5 and all(len(row) == len(COLUMNS) for row in rows)
    first, sizes = scenario.shares()[0], scenario.shares()[0].sum(axis=1)
    assert rows[0][:4] == ("1", str(first.sum()), "10", "0")
    assert rows[0][4] == f"{sizes.min():g}/{np.median(sizes):g}/{sizes.max():g}"
    assert rows[0][6].endswith(f"/{first.max():g}") and rows[0][6].startswith(f"{np.median(first[:, :2]):g}/")


def test_empty_clients_are_counted(digits):
    many = Scenario(replace(BENCHMARKS["digits"], clients=400, active=5), 0, digits)
    row = shares_rows(many)[0]
    assert int(row[3]) == 400 - int(row[1]) and row[4] == "0/1/1"


def test_the_table_fits_a_terminal(scenario):
    page = io.StringIO()
    Console(width=80, file=page).print(shares_table(scenario))
    text = page.getvalue()
    assert "digits: lda_equal (alpha 1), seed 0" in text
    assert all(row[4] in text for row in shares_rows(scenario))


@pytest.mark.parametrize("kind", PARTITIONS)
def test_every_partition_is_described(digits, kind):
    scenario = Scenario(replace(BENCHMARKS["digits"], partition=kind, partition_seed=4), 0, digits)
    assert describe(scenario).startswith(f"digits: {kind} (") and describe(scenario).endswith("seed 4")


@pytest.mark.parametrize("clients", [1, 10, 300])
def test_the_picture(digits, tmp_path, clients):
    scenario = Scenario(replace(BENCHMARKS["digits"], clients=clients, active=1), 0, digits)
    draw_shares(scenario, tmp_path / "shares.png")
    with Image.open(tmp_path / "shares.png") as image:
        assert image.format == "PNG" and 600 < image.width < 3000 and 400 < image.height < 3000
        assert len(image.convert("RGB").getcolors(1_000_000)) > 50


def test_what_drawing_needs(scenario, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="cannot be written"):
        draw_shares(scenario, tmp_path / "nowhere" / "shares.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"constraints.txt -e .\.\[report\]"):
        draw_shares(scenario, tmp_path / "shares.png")
