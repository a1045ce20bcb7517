"""Who takes part: the clients present in each task and those that train in each round."""

import numpy as np

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
            before = self._present[-1]
            if leaving > len(before) or len(before) - leaving + joining < active:
                raise UserError(
                    f"leaving={leaving} is too many for task {t + 1}: of {len(before)} clients and {joining} new ones, "
                    f"active={active} must be there; lower leaving or active, or raise clients or joining"
                )
            rng = np.random.default_rng(seed_of(seed, "leaving", t))
            newcomers = np.arange(clients + joining * (t - 1), clients + joining * t)
            self._present.append(np.concatenate([np.sort(rng.permutation(before)[leaving:]), newcomers]))

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
