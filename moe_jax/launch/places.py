"""The places of a run, i.e. the numbers of its processes when none is missing, and which of them are in use."""

import argparse
from collections.abc import Collection, Sequence

from moe_jax.config.yaml_io import load_draft


class Places:
    """The places of a run, numbered host by host: `per_host` each, or all on one host if None.

    A place is out of use if its host is missing, or if its process has failed repeatedly. At least `least` are in use.
    """

    def __init__(self, processes: int, least: int, per_host: int | None = None) -> None:
        self._all, self._least, self._per_host = range(processes), least, per_host or processes
        self._blamed: set[int] = set()  # places that failed first in a generation
        self._left_out: set[int] = set()
        self.hosts = {self.host(place) for place in self._all}  # those with places in use

    @property
    def count(self) -> int:
        """The number of all places."""
        return len(self._all)

    @property
    def used(self) -> list[int]:
        """The places in use."""
        return [place for place in self._all if place not in self._left_out and self.host(place) in self.hosts]

    @property
    def some_are_missing(self) -> bool:
        """Whether some places are not in use."""
        return len(self.used) < len(self._all)

    def host(self, place: int) -> int:
        """Return the host of a place."""
        return place // self._per_host

    def use_hosts(self, hosts: Collection[int]) -> None:
        """Use only places of these hosts; if the hosts have changed, use all of their places."""
        if self.hosts != set(hosts):
            self.refill()
            self.hosts = set(hosts)

    def refill(self) -> None:
        """Clear the record of failures, and use all places of the present hosts again."""
        self._blamed.clear()
        self._left_out.clear()

    def blame(self, place: int) -> None:
        """Record that a place was the first to fail in a generation."""
        self._blamed.add(place)

    def leave_out(self, no_mesh: bool) -> bool:
        """Use one place less: the only one that was blamed or, if no mesh fits their number (`no_mesh`), the last one.

        Returns False, and changes nothing, if too few are left or several are blamed.
        """
        used = self.used
        if len(used) <= self._least or (len(self._blamed) > 1 and not no_mesh):
            return False
        self._left_out.add(used[-1] if no_mesh else self._blamed.pop())
        self._blamed.clear()
        return True


def settings_of_fewer(command: Sequence[str], used: int, of: int) -> list[str]:
    """Return settings with which training continues in `used` of `of` processes: the planner chooses a new mesh."""
    parser = argparse.ArgumentParser(add_help=False)
    for name in ("--config", "--join-timeout", "--distributed"):  # the arguments of these flags are not settings
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
