"""The sections of recurrent layers: `model.delta_net` and `model.mamba`."""

from dataclasses import dataclass

from moe_jax.config.ranges import ANY, Range, number


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig:
    """Gated delta nets (Yang et al. 2024, "Gated Delta Networks") instead of attention, as in Qwen3-Next.

    Each value head has a matrix that maps keys to values, its state. A token decays it, and corrects the value of its
    own key. State and time of a token do not depend on the length of the sequence.
    """

    # heads of values, each with a state; null: no block has a delta net
    num_value_heads: int | None = number(None, Range(1, 2**14))
    # heads of queries and keys, each of as many value heads; null: as many as value heads
    num_key_heads: int | None = number(None, Range(1, 2**14))
    key_head_dim: int = number(128, Range(1, 2**16))  # features of a head's query or key
    value_head_dim: int = number(128, Range(1, 2**16))  # features of a head's value
    # tokens, the own one included, over which each feature of queries, keys and values is convolved
    conv_kernel_dim: int = number(4, Range(1, 2**10))
    full_attention_interval: int | None = number(4, Range(2, ANY))  # every n-th block has attention; null: none

    @property
    def key_heads(self) -> int:
        return self.num_key_heads or self.num_value_heads or 0

    @property
    def group(self) -> int:
        """The value heads of each key head."""
        return (self.num_value_heads or 0) // max(self.key_heads, 1)

    @property
    def key_width(self) -> int:
        """The features of all heads' queries, or keys."""
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """The features of all heads' values."""
        return (self.num_value_heads or 0) * self.value_head_dim


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Mamba-2 layers (Dao & Gu 2024, "Transformers are SSMs") instead of attention, as in Granite 4 and Nemotron-H.

    Each head has a state of its values. A token decays it, and adds its own value. State and time of a token do not
    depend on the length of the sequence.
    """

    num_heads: int | None = number(None, Range(1, 2**14))  # heads, each with a state; null: no block has Mamba-2
    head_dim: int = number(64, Range(1, 2**16))  # features of a head's value
    # groups of consecutive heads, of which each shares the vectors B and C, and the mean square of its outputs' norm
    n_groups: int = number(1, Range(1, 2**14))
    d_state: int = number(128, Range(1, 2**16))  # numbers of the state for each feature of a value
    d_conv: int = number(4, Range(1, 2**10))  # tokens, the own one included, over which values, B and C are convolved
    # blocks after which the places of attention repeat; null: no block has attention, and all have an MLP or experts
    attn_layer_period: int | None = number(None, Range(1, ANY))
    attn_layer_offsets: tuple[int, ...] = number((), Range(0, ANY))  # places of blocks with attention, counted from 0
    # of the same number of blocks, those in these places end after Mamba-2 or attention: they have neither an MLP nor
    # experts (Nemotron-H)
    mixer_only_offsets: tuple[int, ...] = number((), Range(0, ANY))

    @property
    def value_width(self) -> int:
        """The features of all heads' values."""
        return (self.num_heads or 0) * self.head_dim

    @property
    def group_width(self) -> int:
        """The numbers of all groups' vectors B, or C."""
        return self.n_groups * self.d_state
