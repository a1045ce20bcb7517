"""What a round costs beside its training, on three nodes over TLS: `python -m tests.deployment.overhead`.

The same plan is simulated in this process, which tells what the training itself takes. The load of the machine is
printed before and after: on a busy one, most of what is measured is waiting for a core.
"""

import os
import statistics
import tempfile
from pathlib import Path

from fcil.results.ledger import read
from tests.deployment.conftest import digits_of_three
from tests.deployment.federation import LONG, NODES, ROOT, Link, descendants, simulated, until

ROUNDS = 6
PLAN = f'method = "finetune"\nrounds = {ROUNDS}\nsteps = 3\nbatch_size = 16\nimage_size = 8\ntasks = 1\n'


def main() -> None:
    os.environ["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        print(f"load {_load()} on {os.cpu_count()} cores", flush=True)
        made = Link(place, digits_of_three(place / "data")[0].parent)
        try:
            for name in NODES:
                made.join(name)
            run = made.submit("run", PLAN)
            until((run / "result.json").exists, LONG, "the run is finished")
            spent = sum(_seconds(pid) for name in NODES for pid in descendants(made.processes[name].pid))
        finally:
            made.close()
        here = simulated(place / "here", place / "run.toml", made.folders)
        there, alone = (_rounds(folder) for folder in (run, here))
        each = statistics.median(alone) / len(NODES)
        print(f"seconds of each round: {', '.join(f'{s:.1f}' for s in there)}; load {_load()}")
        print(
            f"of which a node trains {each:.2f} s; {statistics.median(there) - each:.1f} s are overhead in the median"
        )
        messages = ROUNDS + 2
        print(
            f"{messages} messages to each node in all: who it is, {ROUNDS} trainings, an evaluation; "
            f"each took {spent / messages / len(NODES):.1f} s of a core on its node"
        )


def _rounds(run: Path) -> list[float]:
    return [line["seconds"]["train"] for line in read(run / "ledger.jsonl") if line["kind"] == "round"]


def _seconds(pid: int) -> float:
    """Return what the processes that one has started and seen end took of a core: its clients, one a message."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
