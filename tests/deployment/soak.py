"""More than twenty faults in one sitting, nothing lost: `make soak` writes results/soak.txt.

One half hurts the server only, and must end with the weights of an uninterrupted run, to the bit. The other hurts
nodes: the run goes on without them, they come back, and what each remembers is whole. Both go on at the same time.
"""

import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.deployment.federation import ROOT
from tests.deployment.node_faults import hurt_the_nodes
from tests.deployment.server_faults import hurt_the_server
from tests.deployment.sitting import Sitting

HALVES: dict[str, Callable[[Sitting], None]] = {"server": hurt_the_server, "nodes": hurt_the_nodes}


def main(asked: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        soak = Sitting(Path(place), ROOT / "results" / f"{'-'.join(['soak', *asked])}.txt")
        with ThreadPoolExecutor() as pool:
            for half in [pool.submit(HALVES[name], soak) for name in asked or HALVES]:
                half.result()
        soak.say(f"{soak.faults} faults, nothing lost")


if __name__ == "__main__":
    main(sys.argv[1:])
