"""Trains on a Ray cluster: python scripts/ray_train.py WORKERS [TOPOLOGY TYPE] -- --config FILE log.dir=…

WORKERS processes have a GPU each, or with TOPOLOGY and TYPE (as 4x4 TPU-V6E) the TPUs of a host each. Ray joins them
and, when one fails, starts all again, up to 10 times; the run resumes from its newest checkpoint. There is no launcher.
FILE must be readable on every worker, and log.dir in a bucket or on a shared disk. Needs a Ray with JaxTrainer.
"""

import sys
from typing import Any

_USAGE = "python scripts/ray_train.py WORKERS [TOPOLOGY TYPE] -- --config FILE log.dir=… [section.key=value …]"


def train(settings: dict[str, Any]) -> None:
    """Train in a worker, whose process Ray has joined with the others."""
    from moe_jax.cli import train as command

    sys.argv = ["moe_jax.train", "--distributed=off", *settings["arguments"]]
    command.main()


def main() -> None:
    """Parse the command line, and train until the last step."""
    words = sys.argv[1:]
    there = words.index("--") if "--" in words else len(words)
    own, arguments = words[:there], words[there + 1 :]
    if len(own) not in (1, 3) or not own[0].isdigit() or not arguments:
        print(f"error: {' '.join(words) or 'nothing'} was given: use {_USAGE}", file=sys.stderr)
        sys.exit(2)
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    devices: dict[str, Any] = {"use_gpu": True}
    if len(own) == 3:
        devices = {"use_tpu": True, "topology": own[1], "accelerator_type": own[2]}
    trainer = JaxTrainer(
        train_loop_per_worker=train,
        train_loop_config={"arguments": arguments},
        scaling_config=ScalingConfig(num_workers=int(own[0]), **devices),
        run_config=RunConfig(name="moe_jax", failure_config=FailureConfig(max_failures=10)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
