"""All processes of a run build the same programs, with collectives in the same order.

Python iterates over a set of strings in another order in each process: the first program that depended on it gathered
the head where another process gathered the last norm, and gloo aborted.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

PROCESS = textwrap.dedent(
    """
    import jax

    jax.config.update("jax_num_cpu_devices", 4)
    from moe_jax.parallel.mesh import make_mesh
    from moe_jax.step.compile import batch_shape
    from moe_jax.step.moving_average import evaluated
    from moe_jax.step.trainer import make_trainer
    from tests.step.test_races import config_of

    print(*{"head", "norm"})
    for settings in (
        "mesh.data=2 mesh.expert=2 optimizer.zero=3",
        "mesh.data=2 mesh.expert=2 optimizer.zero=2 optimizer.ema_decay=0.9",
        "mesh.data=2 mesh.expert=2 optimizer.zero=3 schedule.policy=unified schedule.microbatches=2",
        "mesh.data=2 mesh.expert=1 mesh.pipeline=2 optimizer.zero=3 train.grad_accumulation=2",
    ):
        config = config_of(settings)
        trainer = make_trainer(config, mesh := make_mesh(config.mesh))
        batch = batch_shape(config, mesh)
        print(trainer.step.lower(*trainer.step_shapes(batch)).as_text())
        print(trainer.evaluate.lower(evaluated(trainer.state_shapes), batch, None).as_text())
    """
)


def printed(seed: int) -> tuple[str, str]:
    """The order of a set of strings, and the programs, of a process with this seed of hashes."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", PROCESS]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env=environment)
    order, programs = run.stdout.split("\n", 1)
    return order, programs


def test_programs_do_not_depend_on_the_order_of_sets():
    (one, programs), (other, others) = printed(0), printed(1)
    assert one != other, "these seeds order sets differently"
    assert programs.count("all_gather") > 10
    assert programs == others
