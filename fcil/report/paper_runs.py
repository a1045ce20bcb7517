"""Which runs the tables and the memory sweep of the paper take, by our names: `fcil sweep --paper` runs them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from fcil.errors import UserError, unknown
from fcil.plan import Plan
from fcil.report.comparison import BOUNDS, Row
from fcil.report.paper import PAPER_FINAL, PAPER_TABLE_3, STAND_IN, table_3
from fcil.report.paper_curves import BY_MEMORY, MEMORIES, MEMORYLESS, SWEPT
from fcil.scenario import benchmarks as known

TABLES = ("table2", "table3", "memory")
TABLE_2 = (*list(PAPER_FINAL["cifar100-10x10"]), "hr-literal")  # as printed, beside ours
RATES = {  # on natural images: chosen on held-out ones of the first task, or finetune's if so is the loss (RESULTS.md)
    "icarl": "0.3", "bic": "0.01", "podnet": "0.03", "dde": "0.01", "geodl": "0.01", "ssil": "0.01", "glfc": "0.6",
    "remind": "0.01",
}  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """A run that a table takes, but for its seed."""

    benchmark: str
    method: str
    settings: dict[str, str] = field(default_factory=dict)


def runs_of(table: str, only: Sequence[str] = (), protocol: str = "") -> list[Wanted]:
    """Return the runs of a table, on those of its benchmarks that are asked for, or on all; the bounds come first.

    Table 3 may also be asked for on what stands in for one of its benchmarks.
    """
    if table not in TABLES:
        raise unknown("table", table, TABLES)
    columns = {"table2": list(PAPER_FINAL), "table3": list(PAPER_TABLE_3), "memory": list(BY_MEMORY)}[table]
    allowed = [*columns, *(STAND_IN if table == "table3" else ())]
    for name in only:
        if name not in allowed:
            raise UserError(f"--paper {table} is not about {name}; it takes {', '.join(allowed)}")
    return [wanted for name in allowed if name in (only or columns) for wanted in _on(name, table, protocol)]


def tuned(benchmark: str, method: str) -> dict[str, str]:
    """Return the learning rate that a method has on one of the paper's benchmarks; nothing where its default stands."""
    return {"lr": RATES[method]} if benchmark in PAPER_FINAL and method in RATES else {}


def advice(wanted: Plan) -> str:
    """Return what to say to whoever begins a run with the default rate where another did best for the default loss."""
    best = tuned(wanted.benchmark.name, wanted.method).get("lr")
    own = asdict(wanted.config).keys() - {"exemplar_codec"}
    if best is None or wanted.settings.keys() & own or wanted.benchmark.holdout:  # rates are chosen on what is held out
        return ""
    ours = f"{wanted.method} runs with lr={wanted.config.lr:g}"
    return f"{ours}; on held-out images of cifar100-10x10 lr={best} did best: --set lr={best}"


def row_of(rows: Iterable[Row], benchmark: str, method: str, settings: Mapping[str, str] | None = None) -> Row | None:
    """Return the row of a method with the settings that a table takes: with its own learning rate, or without one."""
    found = [({name: str(value) for name, value in row.settings.items()}, row) for row in rows if row.method == method]
    for rate in (tuned(benchmark, method), {}):
        for own, row in found:
            if own == {**rate, **(settings or {})}:
                return row
    return None


def _on(benchmark: str, table: str, protocol: str) -> list[Wanted]:
    bounds = [Wanted(benchmark, bound) for bound in BOUNDS]
    if table == "table2":
        return [*bounds, *(Wanted(benchmark, method, tuned(benchmark, method)) for method in TABLE_2)]
    if table == "table3":
        methods = ("hr", "hr-literal", *(m for m in table_3(benchmark) if m != "hr"))
        return [*bounds, *(Wanted(benchmark, method, _budget(benchmark, method, protocol)) for method in methods)]
    fixed = [Wanted(benchmark, method, tuned(benchmark, method)) for method in MEMORYLESS]
    swept = [method for method in (*SWEPT, "hr-literal") if method not in MEMORYLESS]
    sizes = [(m, {**tuned(benchmark, m), "memory": str(n)}) for m in swept for n in MEMORIES]
    return [*bounds, *fixed, *(Wanted(benchmark, method, settings) for method, settings in sizes)]


def _budget(benchmark: str, method: str, protocol: str) -> dict[str, str]:
    """Return what Table 3 takes from Hybrid Replay for its decoder: codes, and as the paper has it, epochs."""
    claims = table_3(benchmark)
    if not method.startswith("hr"):
        return tuned(benchmark, method)
    timing = known.protocol(protocol or known.benchmark(benchmark).protocol)
    share = claims["hr"].exemplars / 200  # Table 2 has 200, and charges no decoder
    rounds = round(timing.rounds * claims["hr"].epochs / claims["glfc"].epochs)
    return {"memory_share": f"{share:g}", "rounds": str(rounds)}
