"""The sections of a run around its steps: `checkpoint`, `tune`, `migration`, `log` and `plan`."""

from dataclasses import dataclass
from typing import Literal

from moe_jax.config.ranges import ANY, EXPERTS, LARGE, PARTS, SAMPLED, Range, number
from moe_jax.config.sections.hashing import HashedOnce


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(HashedOnce):
    """Checkpoints of the training state, in log.dir, and its safety copies."""

    __hash__ = HashedOnce.__hash__

    every: int = number(500, Range(0, ANY))  # steps between two saves; 0: only at the end
    keep: int = number(2, Range(1, ANY))  # newest checkpoints to keep; older ones are deleted
    resume: bool = True  # resume from the newest checkpoint in log.dir, if there is one
    # steps between two safety copies of the state in the memory of two nodes, see docs/recovery.md; 0: none
    safety_copies_every: int = number(0, Range(0, ANY))
    safety_copies_dir: str = "/dev/shm"  # folder of safety copies on each node, in memory


@dataclass(frozen=True, kw_only=True)
class TuneConfig(HashedOnce):
    """Tuning of settings during training, by timed steps, see docs/tune.md."""

    __hash__ = HashedOnce.__hash__

    # schedule.bucket_cap_mb, schedule.microbatches, exchange.algorithm; none: no setting is tuned
    over: tuple[Literal["bucket_cap_mb", "microbatches", "algorithm"], ...] = ()
    samples: int = number(8, Range(2, PARTS))  # choices tried in one search
    iterations: int = number(10, Range(1, ANY))  # timed steps of a choice
    band: float = number(0.2, Range(0, 1e12, above=True))  # tolerated change of the step time, as a share of the best
    patience: int = number(50, Range(1, ANY))  # steps with a larger change before the next search
    cache: str | None = None  # file of results, which runs may share; null: tuned.json in log.dir


@dataclass(frozen=True, kw_only=True)
class MigrationConfig(HashedOnce):
    """Migration of experts between ranks during training, to balance their load, see docs/migration.md."""

    __hash__ = HashedOnce.__hash__

    enabled: bool = False  # whether experts migrate
    every: int = number(50, Range(1, ANY))  # steps between two checks of the ranks' load, which is summed over them
    # experts move if the load of the busiest rank / mean of all ranks, over those steps, is above this
    threshold: float = number(1.2, Range(1, LARGE))
    patience: int = number(2, Range(1, ANY))  # checks in a row that find a block above the threshold before a move
    # steps (at most those that the run has left) in which a move must save the time that it takes; null: moves are free
    payback_steps: int | None = number(1000, Range(1, ANY))
    # extra positions of each expert rank, for copies of other ranks' experts; with rank_speeds also for experts that
    # slower ranks do not hold
    replicas: int = number(0, Range(0, PARTS))
    # speeds of the expert ranks, of which only the ratios count: a rank's load is divided by its speed; null: all equal
    rank_speeds: tuple[float, ...] | None = number(None, Range(0, LARGE, above=True))


@dataclass(frozen=True, kw_only=True)
class LogConfig(HashedOnce):
    """The output of a run: its folder, records, alarms, traces and sample."""

    __hash__ = HashedOnce.__hash__

    dir: str = "runs/default"  # the folder of the run, also in a bucket (docs/object_stores.md)
    every: int = number(10, Range(1, ANY))  # steps between two records
    tensorboard: bool = True  # write TensorBoard files
    wandb_project: str | None = None  # Weights & Biases project for process 0, see docs/logging.md; null: none
    # name of the job for ml-goodput-measurement, in Google Cloud's log, see docs/logging.md; null: none
    goodput_job: str | None = None
    # every n-th record has the load of each expert of each block; null: n such that a record has at most 1,024 of
    # these numbers on average
    expert_load_every: int | None = number(None, Range(1, ANY))
    # alarms, each reported once until the block recovers; null: none. An expert that no token chose for this many steps
    alarm_unused_steps: int | None = number(100, Range(1, ANY))
    # a step's load whose entropy is below this share of an even load's
    alarm_entropy: float | None = number(0.5, Range(0, 1, below=True))
    # profile this step, or the steps from the first to the last ([10, 13]), into log.dir/trace; the first step of a
    # process cannot be traced, then the next one is
    trace_step: tuple[int, ...] | None = number(None, Range(2, ANY))
    sample_prompt: str = "\n"  # prompt of the text sampled at the end, for the report
    sample_tokens: int = number(400, SAMPLED)  # tokens of that text; 0: no sample


@dataclass(frozen=True, kw_only=True)
class PlanConfig(HashedOnce):
    """The cluster and the router for which `auto` settings are planned, see docs/plan.md."""

    __hash__ = HashedOnce.__hash__

    cluster: str | None = None  # h100x64, or the file of a measured profile; null: the devices of the run
    # rows of the busiest expert rank / mean of all ranks, for experts without a capacity; 1: the router is balanced
    load_factor: float = number(1.0, Range(1, EXPERTS))
