"""The tasks of a step by number: what simulations and merges of streams look up, in lists instead of mappings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from moe_jax.schedule.actions import Action
from moe_jax.schedule.dependencies import Needs, task_graph
from moe_jax.schedule.shape import StepShape


@dataclass(frozen=True, kw_only=True)
class NumberedTasks:
    """Tasks and their dependencies. Sequences have an entry for each task, by its number.

    Tasks that are needed but not there have numbers, too, after all others.
    """

    tasks: Sequence[Action]
    number: Mapping[Action, int]
    needs: Sequence[tuple[int, ...]]
    followers: Sequence[tuple[int, ...]]  # the tasks that need it
    waiting: Sequence[int]  # how many tasks it needs

    @staticmethod
    def of(needs: Needs) -> "NumberedTasks":
        """Number the tasks of a mapping from each task to those that it needs."""
        number: dict[Action, int] = {task: place for place, task in enumerate(needs)}
        different = dict.fromkeys(needs.values())  # all buckets of an owner need the same tasks
        of_set = {some: tuple([number.setdefault(need, len(number)) for need in some]) for some in different}
        numbered = [of_set[some] for some in needs.values()]
        followers: list[list[int]] = [[] for _ in number]
        for task, some in enumerate(numbered):
            for need in some:
                followers[need].append(task)
        return NumberedTasks(
            tasks=tuple(number),
            number=number,
            needs=numbered,
            followers=list(map(tuple, followers)),
            waiting=list(map(len, needs.values())),
        )

    def numbers(self, actions: Iterable[Action]) -> list[int]:
        """The numbers of these tasks."""
        return list(map(self.number.__getitem__, actions))

    def actions(self, numbers: Iterable[int]) -> list[Action]:
        """The tasks with these numbers."""
        return list(map(self.tasks.__getitem__, numbers))

    def with_needs(self, more: Mapping[int, int]) -> "NumberedTasks":
        """The same tasks, of which some need one more task."""
        if not more:
            return self
        needs, followers, waiting = list(self.needs), list(self.followers), list(self.waiting)
        for task, need in more.items():
            needs[task] += (need,)
            followers[need] += (task,)
            waiting[task] += 1
        return replace(self, needs=needs, followers=followers, waiting=waiting)


@lru_cache(maxsize=64)
def numbered_tasks(shape: StepShape) -> NumberedTasks:
    """All tasks of a shape."""
    return NumberedTasks.of(task_graph(shape))
