"""Two and four real processes train exactly like one with the same devices."""

import subprocess
import sys

import numpy as np
import pytest

from tests.train.test_resume import config_in, losses_of

DEVICES = ["train.steps=6", "mesh.cpu_devices=4", "mesh.data=2", "mesh.expert=2", "checkpoint.every=0"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Losses of one process, which needs 4 devices of its own."""
    return run(tmp_path_factory.mktemp("one"), 1)


def run(folder, processes: int) -> dict[int, float]:
    config_in(folder)
    command = ["--config", folder / "experiment.yaml", f"log.dir={folder}", *DEVICES]
    launcher = [sys.executable, "-m", "moe_jax.launch", "--processes", str(processes)]
    subprocess.run([*launcher, *command], check=True, timeout=300, stdout=subprocess.DEVNULL)
    return losses_of(folder)


@pytest.mark.parametrize("processes", [2, 4])
def test_losses_do_not_depend_on_the_number_of_processes(processes, expected, tmp_path):
    losses = run(tmp_path, processes)
    assert losses.keys() == expected.keys()
    np.testing.assert_allclose(list(losses.values()), list(expected.values()), rtol=1e-5)
