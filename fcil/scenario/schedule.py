"""Who takes part: the clients present in each task and those that train in each round."""

import numpy as np
from numpy.typing import NDArray

from fcil.errors import UserError
from fcil.seeds import seed_of


class Schedule:
    """The clients' comings and goings, drawn from one seed and equal for every method."""

    def __init__(
        self, tasks: int, clients: int, active: int, joining: int = 0, leaving: int = 0, seed: int = 0
    ) -> None:
        if active > clients:
            raise UserError(f"active={active} is not allowed with clients={clients}; active takes 1 to {clients}")
        self.active, self.seed = active, seed
        self.total = clients + joining * (tasks - 1)
        self._present = [np.arange(clients)]
        for t in range(1, tasks):
            staying = _without(self._present[-1], leaving, np.random.default_rng(seed_of(seed, "leaving", t)))
            newcomers = np.arange(clients + joining * (t - 1), clients + joining * t)
            self._present.append(np.concatenate([staying, newcomers]))
            if len(self._present[-1]) < active:
                raise UserError(
                    f"leaving={leaving} leaves {len(self._present[-1])} clients in task {t + 1}, fewer than "
                    f"active={active}; lower leaving or active, or raise clients or joining"
                )

    def present(self, task_index: int) -> list[int]:
        """Return the clients that are there in a task, in order."""
        found: list[int] = self._present[task_index].tolist()
        return found

    def sample(self, task_index: int, name: str, round: int) -> list[int]:
        """Return the clients that train in a round, in order; depends on nothing but the seed and the arguments."""
        rng = np.random.default_rng(seed_of(self.seed, "sample", task_index, name, round))
        chosen = rng.choice(self._present[task_index], self.active, replace=False, shuffle=False)
        found: list[int] = np.sort(chosen).tolist()
        return found


def _without(clients: NDArray[np.int64], leaving: int, rng: np.random.Generator) -> NDArray[np.int64]:
    return np.sort(rng.permutation(clients)[leaving:])
