"""The inputs of a step: what is constant during a run, and what changes with every step.

B sequences of this device, in A parts of b sequences for gradient accumulation; N tokens of a sequence and N1 = N + 1;
M blocks with experts, E experts, S sources of a mixture.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config import Config
from moe_jax.config.layer_layout import Stages
from moe_jax.data import token_marks
from moe_jax.models.gates.inputs import EVALUATION, BatchPart, RouterInputs
from moe_jax.models.head import NO_TARGET, SOURCE_STEP
from moe_jax.models.mtp import MTPInputs, mtp_scale
from moe_jax.models.parameters import param_dims
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel import zero
from moe_jax.parallel.gathered_params import ExpertGather, gather_in_order, gathers_of
from moe_jax.parallel.grad_sync import sum_over_batch
from moe_jax.parallel.mesh import expert_axis, with_sizes_of
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.sequence_shards import LocalTokens, local_tokens
from moe_jax.parallel.sharding import partitions
from moe_jax.parallel.trees import Gathers, ParamDims, Params, ShardSpecs, Specs, Tree
from moe_jax.step.optimizer import make_optimizer, state_shard_specs

State = dict[str, Any]  # {"step": int32, "params": …, "optimizer": …}, "placement" if experts migrate, "ema"


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Everything that is constant over the steps of a run."""

    config: Config
    compute: ComputeConfig
    stages: Stages  # which blocks each pipeline stage has
    dims: ParamDims
    specs: Specs  # how parameters are sharded
    shard_specs: ShardSpecs  # how moments, and the gradients they are computed from, are sharded (`optimizer.zero`)
    optimizer: optax.GradientTransformationExtraArgs
    gathers: Gathers  # how each parameter is gathered, if `is_fully_sharded`

    @classmethod
    def of(cls, config: Config, mesh: Mesh) -> "StepContext":
        """Build the context for a config on a mesh. Raises ConfigError."""
        config = with_sizes_of(mesh, config)
        dims, compute, shard_specs = (
            param_dims(config.model),
            ComputeConfig.of(config, mesh),
            state_shard_specs(config, mesh),
        )
        specs = partitions(dims, expert_axis(config.mesh))
        return cls(
            config=config,
            compute=compute,
            stages=Stages.of(config),
            dims=dims,
            specs=specs,
            shard_specs=shard_specs,
            optimizer=make_optimizer(config, dims, zero.shard_partition_specs(shard_specs, specs), compute.platform),
            gathers=gathers_of(
                *(shard_specs, dims, compute.dtype, compute.platform),
                experts=_expert_gather(config),
                rounds_embedding=config.model.embedding_multiplier == 1,
            ),
        )

    @property
    def of_evaluation(self) -> "StepContext":
        """The context without what only a training step reads: the largest attention logits."""
        attention = self.compute.attention._replace(max_logits=False)
        return replace(self, compute=replace(self.compute, attention=attention))

    @property
    def is_fully_sharded(self) -> bool:
        """Whether parameters are sharded like their moments, and gathered where they are used."""
        return self.config.optimizer.zero == 3

    @property
    def stored_specs(self) -> Specs:
        """The sharding of the parameters in the training state."""
        return self.grad_specs if self.is_fully_sharded else self.specs

    @property
    def block_gathers(self) -> Tree | None:
        """How the parameters of one block are gathered, by segment; None if devices have all of them."""
        if not self.is_fully_sharded:
            return None
        return jax.tree.map(lambda own: own.unstacked(), self.gathers["segments"])

    def unsummed(self) -> tuple[Specs, ShardSpecs]:
        """Return how the gradients of `plain.objective` are sharded before they are summed, and how they will be.

        Autodiff sums gradients of gathered blocks over the axes that shard them.
        """
        if not self.is_fully_sharded:
            return self.specs, self.shard_specs
        whole = zero.unsharded_specs(self.specs["segments"])
        return self.specs | {"segments": self.grad_specs["segments"]}, self.shard_specs | {"segments": whole}

    def own_shards(self, params: Params) -> Params:
        """Return this device's shards of stored parameters, which it updates."""
        own: Params = params if self.is_fully_sharded else zero.local_shards(self.shard_specs, params)
        return own

    def as_stored(self, own: Params) -> Params:
        """Return the parameters to store, from this device's updated shards."""
        if self.is_fully_sharded:
            return own
        stored: Params = zero.all_gather_params(self.shard_specs, own, self.compute.platform)
        return stored

    def with_whole_ends(self, params: Params) -> Params:
        """Return stored parameters with the embedding, the last norm and the head gathered.

        The embedding is the last one, and all blocks need it: so on CPUs no collective of a block runs
        concurrently with these. The others are in the order of their names, which is the same in all processes.
        """
        if not self.is_fully_sharded:
            return params
        names = sorted(params.keys() - {"segments"}, key=lambda name: (name == "embedding", name))
        whole = gather_in_order([self.gathers[name] for name in names], [params[name] for name in names])
        return params | dict(zip(names, whole, strict=True))

    def whole(self, params: Params) -> Params:
        """Return all stored parameters gathered."""
        if not self.is_fully_sharded:
            return params
        leaves, structure = jax.tree.flatten(params)
        whole: Params = jax.tree.unflatten(structure, gather_in_order(jax.tree.leaves(self.gathers), leaves))
        return whole

    @property
    def grad_specs(self) -> Specs:
        """The sharding of gradients, after they are summed, and of moments."""
        return zero.shard_partition_specs(self.shard_specs, self.specs)

    @property
    def global_tokens(self) -> int:
        """The number of tokens in the global batch."""
        return self.config.train.batch_size * self.config.data.seq_len


class StepInputs(NamedTuple):
    """The inputs that change with every step besides parameters: this device's tokens, or those of one part of its
    batch.
    """

    token_BN1: Int[Array, "B N1"]  # with marks (data/token_marks.py), if there is a number of targets
    batch_part: BatchPart = EVALUATION
    slot_ME: Int[Array, "M E"] | None = None  # placement (`models/placement.py`); None: experts in order
    num_targets: Int[Array, ""] | None = None  # of the global batch, those that the loss counts; None: all tokens
    source_targets_S: Int[Array, " S"] | None = None  # the same by source of a mixture
    num_routed: Int[Array, ""] | None = None  # tokens of the global batch that are not padding; None: all tokens
    replayed_LGk: Int[Array, "L G k"] | None = None  # experts of a record, by block; None: gates choose them
    num_mtp_targets: Int[Array, ""] | None = None  # like num_targets, of multi-token prediction; None: all but one each

    @classmethod
    def of(
        cls,
        token_BN1: Int[Array, "B N1"],
        context: StepContext,
        batch_part: BatchPart = EVALUATION,
        slot_ME: Int[Array, "M E"] | None = None,
    ) -> "StepInputs":
        """Return the inputs for this device's rows of a global batch. Runs inside `shard_map`.

        If tokens have marks, their targets, and the tokens that are not padding, are counted over all devices before
        anything else runs.
        """
        data, platform = context.config.data, context.compute.platform
        if not data.has_marks:
            return cls(token_BN1, batch_part, slot_ME)
        input_Bn, target_Bn = local_tokens(token_BN1)
        is_counted_Bn, source_Bn = token_marks.counted(target_Bn), token_marks.sources(target_Bn)
        of_source = [(is_counted_Bn & (source_Bn == source)).sum() for source in range(data.marked_sources)]
        is_text_Bn = ~token_marks.padding(input_Bn)
        counts = [is_text_Bn.sum(), *(of_source or [is_counted_Bn.sum()])]
        if context.config.model.has_mtp:
            counts.append(_is_mtp_target(_next_tokens(token_BN1, token_marks.UNCOUNTED)).sum())
        total = sum_over_batch(jnp.stack(counts))
        mtp, total = (total[-1], total[:-1]) if context.config.model.has_mtp else (None, total)
        return cls(
            depend_on(token_BN1, total, platform),
            batch_part,
            slot_ME,
            num_targets=total[1:].sum(),
            source_targets_S=total[1:] if of_source else None,
            num_routed=total[0] if data.mask_documents else None,
            num_mtp_targets=mtp,
        )

    @property
    def has_marks(self) -> bool:
        """Whether tokens have marks."""
        return self.num_targets is not None

    def loss_divisor(self, context: StepContext) -> jax.Array | int:
        """Return the number of targets that the loss is the mean of; 1 if there are none."""
        return context.global_tokens if self.num_targets is None else jnp.maximum(self.num_targets, 1)

    def routed_tokens(self, context: StepContext) -> jax.Array | int:
        """Return the number of tokens that the losses of routers are the mean of; 1 if all are padding."""
        return context.global_tokens if self.num_routed is None else jnp.maximum(self.num_routed, 1)

    def mean_by_source(self, share_S: Float[Array, " S"]) -> Float[Array, " S"]:
        """Return the mean loss of each source's targets from its part of the loss; NaN for a source without any."""
        assert self.num_targets is not None
        assert self.source_targets_S is not None
        return share_S * (self.num_targets / self.source_targets_S)

    def local_tokens(self) -> LocalTokens:
        """Return the tokens of this device without marks, with NO_TARGET for those that the loss does not count.

        Other targets of a mixture have their source (`models/head.py`).
        """
        own = local_tokens(self.token_BN1)
        if not self.has_marks:
            return own
        is_counted, target_Bn = token_marks.counted(own.target_Bn), token_marks.indices(own.target_Bn)
        if self.source_targets_S is not None:
            target_Bn += token_marks.sources(own.target_Bn) * SOURCE_STEP
        return LocalTokens(token_marks.indices(own.input_Bn), jnp.where(is_counted, target_Bn, NO_TARGET))

    def mtp(self, context: StepContext) -> MTPInputs | None:
        """Return what multi-token prediction reads; None without it, and in evaluation.

        Its loss does not count a token whose loss the decoder does not count, or from which a document border
        separates the one to predict from.
        """
        step, data = self.batch_part.step, context.config.data
        if step is None or not context.config.model.has_mtp:
            return None
        scale = mtp_scale(context.config.train, step)
        if not self.has_marks:
            own = _next_tokens(self.token_BN1, NO_TARGET)
            return MTPInputs(*own, context.config.train.batch_size * (data.seq_len - 1), scale)
        assert self.num_mtp_targets is not None, "counted with the other targets"
        own = _next_tokens(self.token_BN1, token_marks.UNCOUNTED)
        target_Bn = jnp.where(_is_mtp_target(own), token_marks.indices(own.target_Bn), NO_TARGET)
        return MTPInputs(token_marks.indices(own.input_Bn), target_Bn, jnp.maximum(self.num_mtp_targets, 1), scale)

    def document_BN(self, context: StepContext) -> Int[Array, "B N"] | None:
        """Return the document of each token in its sequence; None: tokens attend to all documents.

        With QK-clip padding has -1, so that its logits do not count.
        """
        if not context.config.data.mask_documents:
            return None
        token_BN = self.token_BN1[:, :-1]
        document_BN = token_marks.documents(token_BN)
        if not context.compute.attention.max_logits:
            return document_BN
        return jnp.where(token_marks.padding(token_BN), -1, document_BN)

    def in_parts(self, count: int) -> Int[Array, "A b N1"]:
        """Split the tokens into the `train.grad_accumulation` parts."""
        return self.token_BN1.reshape(count, -1, self.token_BN1.shape[-1])

    def part(self, token_bN1: Int[Array, "b N1"], number: int | jax.Array, count: int) -> "StepInputs":
        """Return the inputs of part `number` of `count`, which has these tokens."""
        return self._replace(token_BN1=token_bN1, batch_part=BatchPart(self.batch_part.step, number, count))

    def router_inputs(self, context: StepContext) -> RouterInputs | None:
        """Return what routers read besides features, or None if they read nothing else."""
        token_BN = self.token_BN1[:, :-1]
        id_BN = token_marks.indices(token_BN) if self.has_marks else token_BN
        is_padding_BN = None if self.num_routed is None else token_marks.padding(token_BN)
        records = context.config.train.record_routing is not None
        return self.batch_part.router_inputs(
            id_BN, context.config.model.moe, context.compute.seed, is_padding_BN, self.replayed_LGk, records
        )


def _expert_gather(config: Config) -> ExpertGather:
    """Return the type in which experts are gathered. Autodiff would save those that are restored from bytes."""
    if config.model.moe.expert_matmuls != "fp8":
        return "compute"
    return "bytes" if config.step_kind == "scheduled" else "wide"


def _next_tokens(token_BN1: Int[Array, "B N1"], after_last: int) -> LocalTokens:
    """Return for each token of this device the one that follows it, and the one after that."""
    end_B1 = jnp.full((len(token_BN1), 1), after_last, token_BN1.dtype)
    return local_tokens(jnp.concatenate([token_BN1[:, 1:], end_B1], axis=1))


def _is_mtp_target(own: LocalTokens) -> Bool[Array, "B n"]:
    """Return which of the `_next_tokens`, with marks, the loss of multi-token prediction counts."""
    return token_marks.counted(own.target_Bn) & ~token_marks.first(own.input_Bn)
