"""What the tables of docs/results.md must show: a piece of each row's first cell, and the row's numbers in order."""

from tests.numbers.stored import hundreds, plan_text, variants, within
from tests.results import result

_step, PEERS, DAMAGED, _overhead = (
    result(name) for name in ("bench_step", "bench_peers", "damaged_checkpoints", "overhead")
)
_ratio = _overhead["unified_1_over_plain"]
_tokens, _first_step = PEERS["tokens_per_s_over_maxtext"], PEERS["first_step_s_over_maxtext"]
EQUAL = sum(count for what, count in DAMAGED["damages"].items() if what.endswith("equal bit for bit"))
_all = sum(DAMAGED["damages"].values())

_policies = result("cluster_in_a_box")["variants"]
WHOLE = _policies["unified+weight_grad+grad_reduce"]
WHOLE_4 = _policies["unified+weight_grad+grad_reduce+4_microbatches"]
PARTS_4 = _policies["expert_pipeline+4_parts"]


def faster(variant: dict, than: dict) -> float:
    return than["step_s"]["median"] / variant["step_s"]["median"]


_stages = result("pipeline_box")["variants"]
_tensor = {ranks: result("tensor_box")["forms"][f"{ranks} tensor ranks"]["o1"] for ranks in (2, 4)}
_search = result("tuned_box")["replay"]["search"]["within_2_percent"]
_faults, _kills = result("chaos"), result("chaos_kill_stop")
_refused = result("refusals")["summary"]
_in_buckets = result("object_stores")
_buckets = _in_buckets["gs"]
_poked = result("chaos_poked")
_lost, _moved, _moved_box, _copies = (result(name) for name in ("node_loss", "migration", "migration_box", "replicas"))
_product = result("grouped_product")["S=2048 L=32 D=256 F=512"]
_compiling, _long = result("compile_time"), result("long_sequence")
_rows, _fp8, _dense = (result(name) for name in ("compressed_rows", "fp8_experts", "moe_vs_dense"))


def _largest(loads: dict[str, list[float]], of: slice) -> float:
    """Over the mean, in steps in which they were written down."""
    return max(max(load) for load in list(loads.values())[of])


_speeds = result("rank_speeds_box")
_before, _after = ([run[which] for run in _moved_box["rank_load_max_over_mean"]] for which in (0, 1))

ON_CPUS = {
    "from the command to the first loss": f"8 {_step['command_to_first_loss_s']:.1f}",
    "compared with MaxText": f"8 {within(_tokens)} {within(_first_step)}",
    "compared with the bare compiled step": (
        f"{_step['loop_over_bare_median']:.3f} {_step['loop_over_bare_first_quartile']:.2f} "
        f"{_step['loop_over_bare_third_quartile']:.2f}"
    ),
    "damaged files of a tiny checkpoint": (f"{_all:,} {DAMAGED['kills']['equal bit for bit']} {_all - EQUAL} {EQUAL}"),
    "issued task by task": f"{_ratio['median']:.3f} {_ratio['first_quartile']:.2f} {_ratio['third_quartile']:.2f}",
    "`unified` in 4 microbatches": (
        f"4 {WHOLE_4['speed_up_over_vanilla']['median']:.2f} {faster(WHOLE_4, PARTS_4):.2f} 4 "
        f"{WHOLE_4['step_over_bound']['median']:.2f}"
    ),
    "the same in 2 microbatches": (
        f"2 {WHOLE['speed_up_over_vanilla']['median']:.2f} {faster(WHOLE, PARTS_4):.2f} "
        f"{WHOLE['step_over_bound']['median']:.2f}"
    ),
    "co-scheduled 1F1B": (
        f"{_stages['coscheduled']['speed_up_over_1f1b']['median']:.2f} 2 "
        f"{_stages['coscheduled+unified']['speed_up_over_1f1b']['median']:.2f}"
    ),
    "each of 2 and of 4 tensor ranks": (
        f"2 4 {result('tensor_box')['rate'].removesuffix('mbit')} "
        f"{_tensor[2]['time_over_replicated']:.2f} {_tensor[4]['time_over_replicated']:.2f}"
    ),
    "a run's search": f"2 8 500 {500 * _search[8 - 1]:.0f}",
    "100 faults of 4 processes": (
        f"{len(_faults['faults'])} {_faults['processes']} {_faults['steps']:,} "
        f"{_faults['by_kind']['kill']['first_new_step_s']['median']:.1f}"
    ),
    "a tiny run in a bucket": f"{_buckets['kills']} {sum(_buckets['faults'].values())} {_in_buckets['steps']:,}",
    "100 kills and stops": (
        f"{len(_kills['faults'])} {_kills['steps']:,} "
        f"{max(kind['steps_lost']['largest'] for kind in _kills['by_kind'].values())} {_kills['checkpoint_every']}"
    ),
    "hostile inputs": f"{_refused['one_line_and_exit_code_2_in_time']} 2 {_refused['seconds']['largest']:.1f}",
    "20 kills, each after strangers": f"{_poked['by_kind']['kill']['faults']} {_poked['steps']:,}",
    "one of 4 processes lost": f"{_lost['processes']} {max(_lost['steps_lost_with_one_node'])}",
    "64 experts on 8 ranks": (
        f"64 8 {_largest(_moved['rank_load_max_over_mean'], slice(2)):.1f} "
        f"{_largest(_moved['rank_load_max_over_mean'], slice(2, None)):.2f}"
    ),
    "a step after a migration": (
        f"{max(_before):.2f} {max(_after):.2f} {_moved_box['speedup']['median']:.2f} "
        f"{_moved_box['speedup_predicted']['median']:.2f}"
    ),
    "experts instead of": (
        f"{_speeds['experts_of_ranks'][0]} {_speeds['experts_of_ranks'][1]} 8 8 "
        f"{_speeds['uneven_over_equal']['median']:.2f} {_speeds['uneven_over_equal_planned']:.2f}"
    ),
    "4 × a rank's mean load": (
        f"4 {_largest(_copies['rank_load_max_over_mean']['migration'], slice(2, None)):.1f} "
        f"{_largest(_copies['rank_load_max_over_mean']['replicas'], slice(2, None)):.2f}"
    ),
    "grouped product": (
        f"32 {_product['forward_ragged_dot_over_ours']['median']:.0f} "
        f"{_product['both_ragged_dot_over_ours']['median']:.0f} 2,048"
    ),
    "compiling a step of 32 blocks": f"32 4 {_compiling['deep_over_shallow']:.2f}",
    "131,072 tokens around a ring": (
        f"{_long['length']:,} 8 {_long['ranks_8']['temporaries_mib']:.0f} {_long['ranks_1']['temporaries_mib']:,.0f}"
    ),
    "rows exchanged in": " ".join(
        f"{losses[str(_rows['steps'])]:.3f}" for losses in _rows["validation_losses"].values()
    ),
    "experts' products in": f"{_fp8['steps']} "
    + " ".join(f"{losses[str(_fp8['steps'])]:.3f}" for losses in _fp8["validation_losses"].values()),
    "experts and of a dense model": f"{_dense['moe']['validation_loss']:.3f} {_dense['dense']['validation_loss']:.3f}",
}

_v5p, _h200, _h200_nodes = (variants(f"compiled_{target}") for target in ("v5p_2x2x2", "h200_1x1x8", "h200_1x8x8"))
BY_DEFAULT = _v5p["unified"]
PROFILES = result("measured_profile_h200_1x1x8")
MEASURED, ESTIMATED = (
    PROFILES[name]["links_of_half_the_rate"] for name in ("by_slower_transfers", "by_estimated_times")
)
_ring = {target: result(f"ring_hlo_{target}")["ways"] for target in ("v5p_2x2x2", "h100_1x1x8")}
_attention = {target: result(f"ring_attention_{target}") for target in ("v5p_2x2x2", "h100_1x1x8")}
_linear = {name: result(f"attention_memory_{name}_{shape}") for name, shape in (("v5p", "2x2x2"), ("h200", "1x1x8"))}
_cycles = result("splash_cycles_v5p_2x2x1")
FOUR_BLOCKS = [
    found
    for name, found in result("peer_shapes_v5p_2x2x2")["programs"].items()
    if name.startswith("fine+unified2+capacity")
]
_pipelines = {target: result(f"pipeline_hlo_{target}")["schedules"] for target in ("h100_1x1x8", "v5p_2x2x2")}


def _exposed(variant: dict[str, float]) -> str:
    return f"{variant['exposed']:.2f} {variant['communication']:.2f}"


def _against(ways: dict, one: str, other: str) -> str:
    return f"{ways[one]['estimated_ms'] / ways[other]['estimated_ms']:.2f}"


def _temporaries(target: str, case: str, length: int) -> str:
    return f"{_linear[target]['cases'][case]['temporary_mib'][str(length)]:,.0f}"


def _activations(schedules: dict, name: str) -> float:
    row = schedules[name]
    return row["peak_bytes"] - row["argument_bytes"] - row["gradient_bytes"]


def kept(target: str, one: str, other: str, digits: int = 2) -> str:
    return f"{_activations(_pipelines[target], one) / _activations(_pipelines[target], other):.{digits}f}"


COMPILED = {
    "8 H200 whose links have half": (
        f"8 {MEASURED['step_ms']:.1f} {ESTIMATED['step_ms']:.1f} {MEASURED['exposed_ms']:.2f} "
        f"{MEASURED['communication_ms']:.2f} {ESTIMATED['exposed_ms']:.2f}"
    ),
    "8 v5p, default settings": (
        f"8 {_v5p['unified']['step']:.1f} {_v5p['vanilla']['step']:.1f} {_v5p['expert_pipeline']['step']:.1f} "
        f"{_exposed(_v5p['unified'])} {_exposed(_v5p['vanilla'])} {_exposed(_v5p['expert_pipeline'])}"
    ),
    "8 H200, default settings": (
        f"8 {_h200['unified']['step']:.1f} {_h200['vanilla']['step']:.1f} {_h200['expert_pipeline']['step']:.1f} "
        f"{_exposed(_h200['unified'])}"
    ),
    "8 × 8 H200": (
        f"8 8 50 {_h200_nodes['unified']['step']:.1f} {_h200_nodes['vanilla']['step']:.1f} "
        f"{_h200_nodes['vanilla']['exposed']:.0f} {_h200_nodes['unified']['compute']:.0f}"
    ),
    "dispatch, experts and combine": (
        f"8 {_against(_ring['v5p_2x2x2'], 'hop by hop', 'flat')} "
        f"8 {_against(_ring['h100_1x1x8'], 'hop by hop', 'flat')}"
    ),
    "attention of 65,536 tokens": (
        f"{_attention['v5p_2x2x2']['length']:,} {_attention['v5p_2x2x2']['ranks']} "
        f"{_against(_attention['v5p_2x2x2']['forms'], 'ring', 'all_gather')} "
        f"{_against(_attention['h100_1x1x8']['forms'], 'ring', 'all_gather')}"
    ),
    "attention of a sequence of 65,536 tokens": (
        f"65,536 {_temporaries('v5p', 'causal', 65536)} 8 {_temporaries('v5p', '8 context ranks', 65536)} "
        f"{_temporaries('h200', 'causal', 65536)} {_temporaries('h200', '8 context ranks', 65536)} "
        f"{_temporaries('h200', 'sinks', 65536)} "
        f"16,384 {_temporaries('v5p', 'all pairs', 16384)} {_temporaries('h200', 'all pairs', 16384)}"
    ),
    "a step of four blocks": "4 4,096 8 2 1.25 "
    + " ".join(f"{each['step_ms']:.0f} {each['exposed_ms']:.1f} {each['communication_ms']:.1f}" for each in FOUR_BLOCKS)
    + "".join(f" {each['temporary_gib']:.1f}" for each in FOUR_BLOCKS)
    + "".join(f" {each['compile_cpu_s']:.0f}" for each in FOUR_BLOCKS),
    "attention of a layer": (
        f"{_cycles['sequences']} {_cycles['length']:,} {_cycles['splash_ms']:.1f} {_cycles['xla_ms']:.1f}"
    ),
    "pipelines, 4 stages": (
        f"4 2 8 8 {kept('h100_1x1x8', '1f1b', 'gpipe')} {kept('v5p_2x2x2', '1f1b', 'gpipe', 3)} "
        f"{kept('h100_1x1x8', 'zero_bubble', '1f1b')} {kept('v5p_2x2x2', 'zero_bubble', '1f1b')} "
        f"{hundreds(_pipelines['h100_1x1x8']['coscheduled']['exposed_share_of_pairs'])}"
    ),
}

_streams = result("predicted_streams")
_steps, _h100, _v5p_memory, _gpu = (
    result(name) for name in ("predicted_steps", "memory_h100", "memory_v5p", "gpu_hlo_h200_1x1x1")
)
_kimi = [plan_text(f"plan_kimi_k2_{kind}x1024") for kind in ("h100", "h200")]
_saved = result("predicted_speedups")
_clusters = [_saved["rtx3090x16"], _saved["rtx2080tix32"]]


def _range(over: str) -> str:
    least, most = (edge(cluster[over][name] for cluster in _clusters) for edge, name in ((min, "least"), (max, "most")))
    return f"{least:.2f} {most:.2f}"


_ring_ranks = [ranks for name, ranks in _long.items() if name in ("ranks_2", "ranks_4", "ranks_8")]
PREDICTED = {
    "memory of 39 steps": (
        f"{len(_h100['cases'])} 4 64 {len(_v5p_memory['cases'])} "
        f"{hundreds(_h100['median_absolute_error'])} {hundreds(_v5p_memory['median_absolute_error'])} "
        f"{hundreds(-min(_h100['lowest_error'], _v5p_memory['lowest_error']))} "
        f"{hundreds(max(_h100['highest_error'], _v5p_memory['highest_error']))} "
        f"{hundreds(max(1 - ranks['predicted_mib'] / ranks['temporaries_mib'] for ranks in _ring_ranks), 0)} "
        f"61 1,024 {hundreds(1 - 60 / 108, 0)}"  # seen once; no program makes it again
    ),
    "96 steps of two processes": (
        f"{_steps['configurations']} {hundreds(_steps['median_error'])} {hundreds(_steps['ninth_decile_of_errors'])} "
        f"{hundreds(max(case['over_fastest'] for case in _steps['cases'].values()))}"
    ),
    "60 steps of four processes": (
        f"{_streams['configurations']} {hundreds(_streams['median_error'])} "
        f"{hundreds(_streams['ninth_decile_of_errors'])} "
        f"{hundreds(max(case['over_fastest'] for case in _streams['cases'].values()))}"
    ),
    "a step of 4 blocks of Mixtral": (
        f"{_gpu['coarse']['blocks']} {_gpu['fine']['blocks']} "
        f"{hundreds(_gpu['coarse']['error'])} {hundreds(_gpu['fine']['error'])} "
        f"{_gpu['coarse']['kernels']['useful']:.2f} {_gpu['coarse']['unrolled']['kernels']['useful']:.2f} "
        f"{_gpu['fine']['kernels']['useful']:.2f} {_gpu['fine']['unrolled']['kernels']['useful']:.2f} "
        f"{_gpu['coarse']['filled']['kernels']['useful']:.2f} {_gpu['fine']['filled']['kernels']['useful']:.2f}"
    ),
    "a plan of Kimi K2": " ".join(
        ["1.03 1,024"]
        + [" ".join(plan[name] for name in ("memory compiled", "memory of", "memory predicted")) for plan in _kimi]
        + [plan["step compiled"] for plan in _kimi]
        + [plan["step predicted"] for plan in _kimi]
    ),
    "what pipelining saves": (
        f"{sum(cluster['layers'] for cluster in _clusters):,} 16 3090 32 2080 "
        f"{_range('unified_over_vanilla')} {_range('unified_over_expert_pipeline')}"
    ),
}
