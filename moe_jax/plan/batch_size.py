"""The batch size of a plan whose command line gives none: the model file's, or a number of tokens per device."""

from dataclasses import replace
from typing import NamedTuple

from moe_jax.config import Config
from moe_jax.config.draft import Draft
from moe_jax.plan.candidates import on_meshes
from moe_jax.plan.clusters import Cluster

# OLMoE trained with 1,024 sequences of 4,096 tokens a step on 256 H100s (Muennighoff et al. 2024, section 2 and its
# appendix B)
TOKENS_PER_DEVICE = 16_384


class BatchSize(NamedTuple):
    """A number of sequences, and where it comes from, as text."""

    sequences: int
    source: str

    @property
    def text(self) -> str:
        return f"batch       train.batch_size={self.sequences}: {self.source}"


def batch_size_of(draft: Draft, cluster: Cluster, file: str) -> BatchSize:
    """The batch size for a plan of `draft`, which was read from `file`.

    It is the file's own if it divides over a mesh of the cluster, and otherwise the nearest multiple of the number of
    devices, unless no mesh is valid with that either. If the file has none, every device gets `TOKENS_PER_DEVICE`, in
    whole sequences, and at least one.
    """
    devices, given = cluster.devices, draft.train.batch_size
    if "train.batch_size" not in draft.given:
        each = max(round(TOKENS_PER_DEVICE / draft.data.seq_len), 1)
        tokens = each * draft.data.seq_len
        return BatchSize(
            each * devices, f"{file} gives none, so each device has {tokens:,} tokens; any multiple of {devices} works"
        )
    nearest = max(round(given / devices), 1) * devices
    if given % devices == 0:
        return BatchSize(given, f"as in {file}")
    if _is_possible(draft, cluster):
        return BatchSize(given, f"as in {file}; more meshes are possible with {nearest}, a multiple of the devices")
    if _is_possible(replace(draft, train=replace(draft.train, batch_size=nearest)), cluster):
        return BatchSize(nearest, f"no mesh of {devices} devices divides {given}, as in {file}")
    return BatchSize(given, f"as in {file}")


def _is_possible(draft: Draft, cluster: Cluster) -> bool:
    """Whether a mesh is valid."""
    return any(isinstance(each, Config) for each in on_meshes(draft, cluster))
