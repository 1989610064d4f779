"""Which of a run's places have a process: all, or those that are left where one fails at every start."""

import argparse
from collections.abc import Sequence

from moe_jax.config_files import load_draft


class Places:
    """Numbers of the processes that a run has when none is missing; on a machine with GPUs also those of the GPUs."""

    def __init__(self, processes: int, least: int) -> None:
        self._all, self._least = range(processes), least
        self._blamed: set[int] = set()
        self.used = list(self._all)

    @property
    def some_are_missing(self) -> bool:
        return len(self.used) < len(self._all)

    def refill(self) -> None:
        """Blame nobody any more, and use all again."""
        self._blamed.clear()
        self.used = list(self._all)

    def blame(self, place: int) -> None:
        """Remember which one failed first."""
        self._blamed.add(place)

    def leave_out(self, no_mesh: bool) -> bool:
        """Use one less: the only one that was blamed, or any where so many can form no mesh. False: it cannot be."""
        if len(self.used) <= self._least or (len(self._blamed) > 1 and not no_mesh):
            return False
        self.used.remove(self.used[-1] if no_mesh else self._blamed.pop())
        self._blamed.clear()
        return True

    def overrides(self, command: Sequence[str]) -> list[str]:
        """Settings with which a training of all places goes on in those that are used: the planner cuts it anew."""
        parser = argparse.ArgumentParser(add_help=False)
        parser.add_argument("--config")
        parser.add_argument("settings", nargs="*")
        arguments, _ = parser.parse_known_intermixed_args(command)
        if arguments.config is None or not self.some_are_missing:
            return []
        found = ["mesh.data=auto", "mesh.expert=auto"]
        devices = load_draft(arguments.config, arguments.settings).mesh.cpu_devices
        if devices is not None:
            found.append(f"mesh.cpu_devices={devices * len(self.used) // len(self._all)}")
        return found
