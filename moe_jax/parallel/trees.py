"""Type aliases for trees of parameters and of values that belong to parameters.

Parameters are nested dicts: {"embedding": …, "segments": {segment: {place in the period: block}}, "norm": …}, and
"head" unless it is tied to the embedding (`models/parameters.py`). The trees below `Params` have the same keys.
"""

from typing import Any, TypeAlias

Tree: TypeAlias = Any  # any tree of arrays, say those of one block: nested dicts, tuples and lists
Params: TypeAlias = dict[str, Any]  # arrays; inside `shard_map` the shards of this device
# the keys of those that are neither the embedding's nor a block's: of the last norms and the head, where there are any
OF_HEAD = ("norm", "norm_bias", "mtp_norm", "head", "head_bias")
Grads: TypeAlias = dict[str, Any]  # arrays like the parameters; with `optimizer.zero` this device's shard of each
ParamDims: TypeAlias = dict[str, Any]  # names of each parameter's dimensions
Specs: TypeAlias = dict[str, Any]  # a PartitionSpec of each parameter
ShardSpecs: TypeAlias = dict[str, Any]  # a `zero.ShardSpec` of each parameter
Gathers: TypeAlias = dict[str, Any]  # a `gathered_params.ParamGather` of each parameter
