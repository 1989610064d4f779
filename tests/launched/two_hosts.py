"""Launchers of two hosts, both on this machine."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

from moe_jax.launch.start import TOKEN

ROOT = Path(__file__).parents[2]


class Hosts:
    """Their launchers, and what each has printed since its start. A context: leaving it kills them."""

    def __init__(self, folder: Path, module: str = "tests.launched.script", address: str = "127.0.0.1") -> None:
        with socket.create_server((address, 0)) as free:
            self.address = f"{address}:{free.getsockname()[1]}"
        self._folder, self._module = folder, module
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self.launchers.values():
            launcher.kill()
            launcher.wait()

    def start(self, host: int, *arguments: str) -> None:
        flags = ["--processes=1", "--hosts=2", f"--host={host}", f"--rendezvous={self.address}"]
        command = [sys.executable, "-m", "moe_jax.launch", *flags, f"--module={self._module}", *arguments]
        environ = {**os.environ, TOKEN: "a secret of the tests"}
        if host in self.launchers:
            self.launchers[host].wait(timeout=120)
        with self.log(host).open("wb") as log:
            self.launchers[host] = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)

    def start_both(self, *arguments: str) -> None:
        """Host 1 comes only when host 0 has reported that it waits: its next lines are then always the same."""
        self.start(0, *arguments)
        self.wait_for(0, "waits for host 1")
        self.start(1, *arguments)

    def log(self, host: int) -> Path:
        return self._folder / ("output" if host == 0 else f"output{host}")

    def output(self, host: int) -> str:
        return self.log(host).read_text()

    def launcher_said(self, host: int) -> list[str]:
        return [line[8:] for line in self.output(host).splitlines() if line.startswith("launch: ")]

    def wait_for(self, host: int, text: str, times: int = 1, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while self.output(host).count(text) < times:
            assert time.monotonic() < deadline, f"{text!r} is not in {self.output(0)!r} and {self.output(1)!r}"
            time.sleep(0.02)

    def ids(self, host: int) -> list[int]:
        """The process IDs that were reported, in their order."""
        return [int(text) for text in re.findall(r"runs as (\d+)", self.output(host))]

    def codes(self, seconds: float = 120) -> list[int]:
        return [self.launchers[host].wait(timeout=seconds) for host in (0, 1)]
