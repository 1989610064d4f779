"""Names of settings in earlier versions. Configs of old runs are converted; other uses are errors with the new name."""

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "model.d_model": "hidden_size",
    "model.num_heads": "num_attention_heads",
    "model.num_kv_heads": "num_key_value_heads",
    "model.hidden_dim": "intermediate_size",
    "model.norm_eps": "rms_norm_eps",
    "model.tie_embeddings": "tie_word_embeddings",
    "model.rope_scaling.kind": "rope_type",
    "model.rope_scaling.original_length": "original_max_position_embeddings",
    "model.attention.window": "sliding_window",
    "model.latent.norm_eps": "rms_norm_eps",
    "model.moe.hidden_dim": "intermediate_size",
    "model.moe.normalize_weights": "norm_topk_prob",
    "model.moe.normalize_top_1": "norm_top1_prob",
    "model.moe.routed_scale": "routed_scaling_factor",
    "model.moe.num_groups": "n_group",
    "model.moe.top_groups": "topk_group",
    "model.moe.order": "dispatcher",
    "model.moe.first_dense_blocks": "first_k_dense_replace",
    "model.moe.every": "moe_layer_freq",
    "model.moe.load_balance_weight": "aux_loss_coeff",
    "model.moe.load_balance": "load_balancing_type",
    "model.moe.router_z_weight": "z_loss_coeff",
    "schedule.chunk_mb": "bucket_cap_mb",
    "exchange.buffer_factor": "rank_capacity_factor",
}
RENAMED_VALUES = {
    ("schedule.grad_reduce", "chunked"): "bucketed",
    ("tune.over", "chunk_mb"): "bucket_cap_mb",
    ("exchange.tensor_form", "o1"): "sharded",
    ("exchange.tensor_form", "o2"): "sharded_chunked",
    ("exchange.tensor_form", "o3"): "sharded_overlapped",
}


def with_new_names(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings, which a run of an earlier version may have written, with the current names."""
    changed: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            value = with_new_names(value, f"{name}.")
        elif isinstance(value, list):
            value = [_new_value(name, each) for each in value]
        else:
            value = _new_value(name, value)
        changed[RENAMED.get(name, key)] = value
    return changed


def _new_value(name: str, value: Any) -> Any:
    return RENAMED_VALUES.get((name, value), value) if isinstance(value, str) else value
