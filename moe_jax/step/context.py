"""The inputs of a step: what is constant during a run, and what changes with every step.

B sequences of this device, in A parts of b sequences for gradient accumulation; N tokens of a sequence and N1 = N + 1;
M blocks with experts, E experts.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from moe_jax.config import Config
from moe_jax.config.layer_layout import Stages
from moe_jax.models.gates.inputs import EVALUATION, BatchPart, RouterInputs
from moe_jax.models.parameters import param_dims
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel import zero
from moe_jax.parallel.mesh import expert_axis
from moe_jax.parallel.sharding import partitions
from moe_jax.parallel.trees import Cuts, ParamDims, Specs
from moe_jax.step.optimizer import make_optimizer, state_cuts

State = dict[str, Any]  # {"step": int32, "params": …, "optimizer": …}, and "placement" if experts migrate


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Everything that is constant over the steps of a run."""

    config: Config
    compute: ComputeConfig
    stages: Stages  # which blocks each pipeline stage has
    dims: ParamDims
    specs: Specs  # how parameters are sharded
    cuts: Cuts  # how moments, and the gradients they are computed from, are sharded (`optimizer.zero`)
    optimizer: optax.GradientTransformationExtraArgs

    @classmethod
    def of(cls, config: Config, mesh: Mesh) -> "StepContext":
        """Build the context for a config on a mesh. Raises ConfigError."""
        dims, compute = param_dims(config.model), ComputeConfig.of(config, mesh)
        specs, cuts = partitions(dims, expert_axis(config.mesh)), state_cuts(config, mesh)
        return cls(
            config=config,
            compute=compute,
            stages=Stages.of(config),
            dims=dims,
            specs=specs,
            cuts=cuts,
            optimizer=make_optimizer(config, dims, zero.shard_partition_specs(cuts, specs), compute.platform),
        )

    @property
    def grad_specs(self) -> Specs:
        """The sharding of gradients, after they are summed, and of moments."""
        return zero.shard_partition_specs(self.cuts, self.specs)

    @property
    def global_tokens(self) -> int:
        """The number of predicted tokens in the global batch."""
        return self.config.train.batch_size * self.config.data.seq_len


class StepInputs(NamedTuple):
    """The inputs that change with every step besides parameters: this device's tokens, or those of one part of its
    batch.
    """

    token_BN1: Int[Array, "B N1"]
    batch_part: BatchPart = EVALUATION
    slot_ME: Int[Array, "M E"] | None = None  # placement (`models/placement.py`); None: experts in order

    def in_parts(self, count: int) -> Int[Array, "A b N1"]:
        """Split the tokens into the `train.grad_accumulation` parts."""
        return self.token_BN1.reshape(count, -1, self.token_BN1.shape[-1])

    def part(self, token_bN1: Int[Array, "b N1"], number: int | jax.Array, count: int) -> "StepInputs":
        """Return the inputs of part `number` of `count`, which has these tokens."""
        return self._replace(token_BN1=token_bN1, batch_part=BatchPart(self.batch_part.step, number, count))

    def router_inputs(self, context: StepContext) -> RouterInputs | None:
        """Return what gates read besides features, or None if no gate reads anything else."""
        return self.batch_part.router_inputs(self.token_BN1[:, :-1], context.config.model.moe, context.compute.seed)
