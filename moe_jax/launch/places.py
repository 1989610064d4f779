"""Which of a run's places have a process: all, or those that are left where a host is missing or a place is broken."""

import argparse
from collections.abc import Collection, Sequence

from moe_jax.config.yaml_io import load_draft


class Places:
    """Numbers of the processes that a run has when none is missing, host by host."""

    def __init__(self, processes: int, least: int, per_host: int | None = None) -> None:
        self._all, self._least, self._per_host = range(processes), least, per_host or processes
        self._blamed: set[int] = set()
        self._left_out: set[int] = set()
        self.hosts = {self.host(place) for place in self._all}  # that are used

    @property
    def count(self) -> int:
        """Of all places."""
        return len(self._all)

    @property
    def used(self) -> list[int]:
        return [place for place in self._all if place not in self._left_out and self.host(place) in self.hosts]

    @property
    def some_are_missing(self) -> bool:
        return len(self.used) < len(self._all)

    def host(self, place: int) -> int:
        """The host that a place is on."""
        return place // self._per_host

    def use_hosts(self, hosts: Collection[int]) -> None:
        """Use places of these hosts only; if they are others than before, all of theirs."""
        if self.hosts != set(hosts):
            self.refill()
            self.hosts = set(hosts)

    def refill(self) -> None:
        """Blame nobody any more, and use all again that hosts are there for."""
        self._blamed.clear()
        self._left_out.clear()

    def blame(self, place: int) -> None:
        """Remember which one failed first."""
        self._blamed.add(place)

    def leave_out(self, no_mesh: bool) -> bool:
        """Use one less: the only one that was blamed, or any where so many can form no mesh. False: it cannot be."""
        used = self.used
        if len(used) <= self._least or (len(self._blamed) > 1 and not no_mesh):
            return False
        self._left_out.add(used[-1] if no_mesh else self._blamed.pop())
        self._blamed.clear()
        return True


def settings_of_fewer(command: Sequence[str], used: int, of: int) -> list[str]:
    """Settings with which a training of `of` processes goes on in `used` of them: the planner cuts it anew."""
    parser = argparse.ArgumentParser(add_help=False)
    for name in ("--config", "--join-timeout", "--distributed"):  # what stands after these is no setting
        parser.add_argument(name)
    parser.add_argument("settings", nargs="*")
    arguments, _ = parser.parse_known_intermixed_args(command)
    if arguments.config is None or used == of:
        return []
    found = ["mesh.data=auto", "mesh.expert=auto"]
    devices = load_draft(arguments.config, arguments.settings).mesh.cpu_devices
    if devices is not None:
        found.append(f"mesh.cpu_devices={devices * used // of}")
    return found
