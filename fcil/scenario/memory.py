"""How many bytes a client may keep: part of the benchmark, the same for every method."""

from dataclasses import dataclass

from fcil.scenario.benchmarks import Benchmark
from fcil.scenario.tasks import Task

NODES = "nodes"  # the dataset of a deployment: each node's own images


@dataclass(frozen=True)
class Budget:
    """A client's memory in bytes, task by task."""

    per_client: int  # bytes, when all classes are known
    rule: str  # fixed or growing
    classes: int

    def at(self, task: Task) -> int:
        """Return the bytes a client may keep when `task` has been learned."""
        if self.rule == "fixed":
            return self.per_client
        return self.per_client * len(task.seen) // self.classes


def budget(benchmark: Benchmark, image_bytes: int) -> Budget:
    """Return the memory that a benchmark grants for its classes and images; clients that join later get the same.

    A deployment cannot know how many classes will come: there, `memory` is what a node keeps of all of them; or, where
    it is growing, of each.
    """
    classes = 1 if benchmark.dataset == NODES else benchmark.tasks * benchmark.classes_per_task
    sharers = benchmark.clients if benchmark.memory_scope == "federation" else 1
    return Budget(int(benchmark.memory * classes * image_bytes / sharers), benchmark.memory_rule, classes)
