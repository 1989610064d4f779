"""The sections of training: `optimizer` and `train`."""

from dataclasses import dataclass
from typing import Literal

from moe_jax.config.facts import OptimizerFacts
from moe_jax.config.ranges import ANY, FINITE, LARGE, PARTS, SEEDS, Range, number
from moe_jax.config.registry import OPTIMIZER_FACTS
from moe_jax.config.sections.data import TOKEN_AXES
from moe_jax.config.sections.hashing import HashedOnce


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """The learning rate and the decay of some parameters."""

    match: str  # a regular expression that is found in the parameter's path, such as segments.0.0.moe.router
    learning_rate_factor: float = 1.0  # of the learning rate; 0: these parameters stay as they are
    weight_decay: float | None = None  # of all these arrays, vectors too; null: optimizer.weight_decay, of matrices


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(HashedOnce):
    """The optimizer, with a learning-rate schedule, weight decay, and gradients clipped by their global norm."""

    __hash__ = HashedOnce.__hash__

    # muon, lion or adafactor, see docs/optimizers.md, or package.module:name of a function, see docs/extend.md
    name: str = "adamw"
    learning_rate: float = number(1e-3, Range(0, LARGE))  # at the end of the warm-up
    # after the warm-up: down in all steps as a cosine or a line, constant, or wsd: constant, then down as a line
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: int = number(100, Range(0, ANY))  # before the first step at learning_rate
    final_fraction: float = number(0.1, Range(0, 1))  # of learning_rate, in the last step of train.steps
    decay_fraction: float = number(0.2, Range(0, 1))  # of train.steps, at their end, in which wsd goes down
    restarts: int = number(0, Range(0, PARTS))  # of cosine: times that it begins again, after equal numbers of steps
    beta1: float = number(0.9, Range(0, 1, below=True))
    beta2: float = number(0.95, Range(0, 1, below=True))
    eps: float = number(1e-8, Range(0, LARGE, above=True))
    momentum: float = number(0.95, Range(0, 1, below=True))  # of muon's matrices
    newton_schulz_steps: int = number(5, Range(1, 100))  # muon's iterations that orthogonalize a matrix
    # the type of the operands of their products; auto: float32 on CPUs, else bfloat16
    newton_schulz_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    weight_decay: float = number(0.1, Range(0, LARGE))  # on matrices; vectors are not decayed
    moments_dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16: stored with stochastic rounding
    # the moments of matrices are in the memory of the host, and on the device only while it updates their array, see
    # docs/memory.md
    offload_moments: bool = False
    # of each parameter the first one that matches, see docs/optimizers.md
    groups: tuple[ParameterGroup, ...] = ()
    clip_norm: float | None = number(1.0, Range(0, FINITE, above=True))  # largest global norm of gradients; null: any
    # QK-clip: after each update the query and key weights of an attention head whose largest logit was above this are
    # scaled to bring it back, see docs/optimizers.md; null: they are not
    qk_clip: float | None = number(None, Range(0, FINITE, above=True))
    # of the moving average of parameters that validation uses, average = d · average + (1 - d) · parameters after each
    # step; null: there is none
    ema_decay: float | None = number(None, Range(0, 1, below=True))
    # what is sharded over the devices that have the same parameters (ZeRO): 0, nothing; 1, moments; 2, gradients, too:
    # with train.grad_accumulation the gradients of each part of a batch are summed over devices separately; 3,
    # parameters, too, which are gathered where they are used (FSDP)
    zero: Literal[0, 1, 2, 3] = 0
    # hybrid sharding: the mesh axes over which ZeRO shards, such as those inside a node, while ranks along the others
    # have the same shards. null: all axes; see docs/fully_sharded.md
    zero_axes: tuple[Literal["data", "expert", "context", "tensor"], ...] | None = None

    @property
    def sharding_axes(self) -> tuple[str, ...]:
        """The mesh axes over which ZeRO may shard."""
        return TOKEN_AXES if self.zero_axes is None else self.zero_axes

    @property
    def facts(self) -> OptimizerFacts:
        """The declared properties of the optimizer."""
        return OPTIMIZER_FACTS.of(self.name)

    def products_dtype(self, platform: str) -> str:
        """Return the type of the operands of muon's iterations: bfloat16 where its products are faster, if `auto`."""
        if self.newton_schulz_dtype != "auto":
            return self.newton_schulz_dtype
        return "float32" if platform == "cpu" else "bfloat16"

    @property
    def moment_bytes(self) -> int:
        """The bytes of a number of a moment."""
        return 2 if self.moments_dtype == "bfloat16" else 4


@dataclass(frozen=True, kw_only=True)
class TrainConfig(HashedOnce):
    """The length of training, batches, precision, validation, and the reaction to bad steps."""

    __hash__ = HashedOnce.__hash__

    steps: int = number(1000, Range(1, ANY))
    seed: int = number(0, SEEDS)
    batch_size: int = number(32, Range(1, 2**20))  # sequences in one optimizer step, over all devices
    # parts of a batch, processed one after another; each fills slots and is balanced separately
    grad_accumulation: int = number(1, Range(1, 2**16))
    # parameters and router stay float32; on GPUs, XLA rounds operands of other float32 products to TF32
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # attention kernel, see docs/models.md. cudnn and splash: flash attention in bfloat16, on NVIDIA's GPUs and on TPUs;
    # tiled: XLA's products, in tiles; xla: with the logits of all pairs of tokens in memory; auto: cudnn or splash
    # where it is supported, else tiled for more than 512 tokens, else xla
    attention_kernel: Literal["auto", "xla", "tiled", "cudnn", "splash"] = "auto"
    # grouped matrix product of experts without a capacity, see docs/measure.md: blocks, one tile of rows after another;
    # ragged, XLA's own; pallas, hopper and blackwell (GPU), megablox (TPU) and tokamax, kernels. Or three, of the
    # forward pass and the gradients of rows and weights: hopper+hopper+pallas. auto: on GPUs and TPUs the fastest of
    # each pass, as timed on these devices, else the default of the platform
    grouped_product: str = "auto"
    # most tokens of a device whose logits are in memory at a time, see docs/memory.md; null: the tokens of 2²⁷ logits
    # (512 MiB)
    loss_chunk: int | None = number(None, Range(1, ANY))
    # weight of the z-loss of the head's logits: the mean over tokens of their squared log-sum-exp, see docs/models.md.
    # The router's is model.moe.z_loss_coeff
    z_loss_multiplier: float = number(0.0, Range(0, LARGE))
    # with model.num_nextn_predict_layers: weight of the loss of multi-token prediction, see docs/models.md,
    mtp_loss_scaling_factor: float = number(0.1, Range(0, LARGE))
    # and its changes, as pairs of a step (counted from 1) and the weight from then on: [[10000, 0.1]]
    mtp_loss_schedule: tuple[tuple[float, ...], ...] = number((), Range(0, ANY))
    # with mesh.cpu_devices and jax below 0.11: XLA's older emitters, which compile a step in half the time. Losses of
    # different schedules or bucket sizes then agree except for their last bits, instead of bit for bit
    quick_compile: bool = False
    # initial parameters of a new run: the folder of a Hugging Face model, or of a run; null: random numbers. See
    # docs/convert.md
    init_from: str | None = None
    upcycle: bool = False  # init_from is a dense model, and its MLP initializes each expert
    eval_every: int = number(250, Range(0, ANY))  # steps between two validations; 0: only at the end
    eval_batches: int = number(8, Range(1, ANY))  # batches of a validation, at most those that the text has
    # a step with a loss or gradient that is not finite is bad: it changes nothing. After this many bad steps in a row
    # the run rolls back to its newest checkpoint, and the second time it stops; null: never. See docs/bad_numbers.md
    bad_in_a_row: int | None = number(3, Range(1, ANY))
    # report a loss spike: loss / median of the last 64 losses above this factor; null: never
    spike_factor: float | None = number(None, Range(1, FINITE))
    skip_spikes: bool = False  # skip the update of a step with a loss spike, which counts as bad
    record_routing: str | None = None  # folder for the experts of all tokens in each step, see docs/gates.md
    replay_routing: str | None = None  # such a folder, from which the experts are taken (router replay)
