"""Live progress of a run: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fcil.federation.loop import Line
from fcil.plan import Plan

QUIET = 15.0  # seconds between two lines where there is no terminal


def follow(lines: Iterator[Line], wanted: Plan, console: Console) -> None:
    """Consume the lines of a run and show where it stands: task, round, accuracy so far, time left."""
    clock = Clock(wanted)
    if not console.is_terminal:
        for line in lines:
            if clock.take(line) or clock.quiet_for() > QUIET:
                console.print(clock.sentence(), highlight=False, soft_wrap=True)
                clock.spoke()
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(f"{wanted.name}: first round", total=clock.work, left="")
        for line in lines:
            if clock.take(line):
                console.print(Text(clock.sentence()))
            progress.update(bar, completed=clock.done, description=f"{wanted.name}: {clock.place()}", left=clock.left())


class Clock:
    """How far a run has come, and how long the rest may take."""

    def __init__(self, wanted: Plan):
        self.tasks = wanted.benchmark.stop_after or wanted.benchmark.tasks
        self.rounds = wanted.protocol.rounds
        self.classes = wanted.benchmark.classes_per_task
        self.work, self.done, self.first = self.tasks * self.rounds, 0, -1
        self.task, self.round, self.of, self.stage = 0, 0, self.rounds, "train"
        self.row: tuple[list[int], list[int]] | None = None
        self.begun = self.said = time.monotonic()
        self.at_task_end = False

    def take(self, line: Line) -> bool:
        """Read a line; tell whether a task has ended."""
        if line["kind"] == "run":
            return False
        self.task, self.at_task_end = line["task"], line["kind"] == "task"
        if "correct" in line:
            self.row = line["correct"], line["total"]
        if line["kind"] == "round":
            self.round, self.of, self.stage = line["round"] + 1, line["rounds"], line["stage"]
            if self.stage != "train":  # rounds beside the protocol's: how long the rest takes is told by those
                return False
        self.done = (
            (self.task + 1) * self.rounds
            if self.at_task_end
            else self.task * self.rounds + min(self.round, self.rounds)
        )
        if self.first < 0:  # a resumed run does not start at nought
            self.first, self.begun = self.done, time.monotonic()
        return self.at_task_end

    def place(self) -> str:
        """Say where the run stands, in few words."""
        return f"task {self.task + 1}/{self.tasks} {self.beside()}round {self.round}/{self.of} {self.accuracy()}"

    def beside(self) -> str:
        """Name the stage, where it is not the usual one."""
        return "" if self.stage == "train" else f"{self.stage}, "

    def accuracy(self) -> str:
        """Say the accuracy on all classes so far, as last measured."""
        return "" if self.row is None else f"{overall_of(*self.row):.1f} %"

    def left(self) -> str:
        """Say how long the rest may take."""
        if self.done <= self.first:
            return ""
        seconds = (time.monotonic() - self.begun) / (self.done - self.first) * (self.work - self.done)
        return "" if self.done >= self.work else f"about {duration(seconds)} left"

    def sentence(self) -> str:
        """Say where the run stands, on one line."""
        left = self.left()
        after = f", {left}" if left else ""
        if not self.at_task_end or self.row is None:
            so_far = f", {self.accuracy()} so far" if self.row else ""
            where = f"task {self.task + 1} of {self.tasks}, {self.beside()}round {self.round} of {self.of}"
            return where + so_far + after
        seen = (self.task + 1) * self.classes
        what = "the only class" if seen == 1 else f"all {seen} classes"
        return f"task {self.task + 1} of {self.tasks} learned: {self.accuracy()} on {what} so far{after}"

    def quiet_for(self) -> float:
        """Return the seconds since something was said."""
        return time.monotonic() - self.said

    def spoke(self) -> None:
        """Note that something was said now."""
        self.said = time.monotonic()


def overall_of(correct: list[int], total: list[int]) -> float:
    """Return the accuracy on the union of all tasks so far, in percent."""
    return 100 * sum(correct) / sum(total)


def duration(seconds: float) -> str:
    """Say a time span as a person would."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
