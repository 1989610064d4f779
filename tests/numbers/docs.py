"""What the tables of results in docs/ must show: page, a piece of the table's head, and of each row a piece of its
first cell with the row's numbers in order."""

import numpy as np

from moe_jax.config.yaml_io import load_config
from moe_jax.plan.memory import step_memory
from tests.numbers.results_page import DAMAGED, EQUAL, FOUR_BLOCKS, PARTS_4, PEERS, WHOLE, WHOLE_4, faster
from tests.numbers.stored import hundreds, plan_text, within
from tests.results import ROOT, result

Rows = dict[str, str]
TABLES: list[tuple[str, str, Rows]] = []


def table(page: str, head: str, rows: Rows) -> None:
    """Another one."""
    TABLES.append((page, head, rows))


def _digits(*values: float, digits: int = 2) -> str:
    return " ".join(f"{value:,.{digits}f}" for value in values)


# docs/checkpoints.md
_by = {how: sum(n for what, n in DAMAGED["damages"].items() if how in what) for how in ("its files", "its digests")}
table(
    "checkpoints.md",
    "| | |",
    {
        "1,000 damages": f"{sum(DAMAGED['damages'].values()):,} {EQUAL} {_by['its files']} {_by['its digests']}",
        "100 kills": f"{DAMAGED['kills']['equal bit for bit']}",
    },
)

# docs/data.md
_reading = result("data_sources")["million_tokens_per_s"]


def _rates(name: str, digits: int) -> str:
    return _digits(*(_reading[name][length]["median"] for length in ("256", "1024")), digits=digits)


table(
    "data.md",
    "| million tokens per second |",
    {
        "prepared folder": _rates("folder", 1),
        "mixture of 2": f"2 {_rates('mixture of 2', 1)}",
        "mixture of 10": f"10 {_rates('mixture of 10', 1)}",
        ".jsonl": _rates("jsonl", 2),
        ".parquet": _rates("parquet", 2),
    },
)

_packing = result("packing")


def _packed(name: str) -> str:
    padding, rate = 100 * _packing["padding"][name], _packing["text_tokens_per_s"][name]["median"]
    return f"{_packing['sequences'][name]} {padding:.1f} {rate:,.0f}"


table("data.md", "| toy conversations", {"| packed": _packed("packed"), "| one in each": _packed("padded")})

# docs/context.md
_long = result("long_sequence")


def _temporaries(name: str) -> str:
    return _digits(_long[name]["temporaries_mib"], _long[name]["predicted_mib"], digits=0)


table(
    "context.md",
    "| context ranks |",
    {f"| {ranks} ": f"{ranks} {_temporaries(f'ranks_{ranks}')}" for ranks in (1, 2, 4, 8)}
    | {"`all_gather`": f"8 {_temporaries('ranks_8_gathered')}"},
)

# docs/convert.md
_trained = result("converted")["trained"]
table(
    "convert.md",
    "| | imported, 1e-6 |",
    {
        f"`{name}`": " ".join(
            [
                _digits(1e6 * each["imported_difference"], digits=1),
                _digits(each["first_loss"], each["last_loss"]),
                _digits(each["largest_logit"], 1e6 * each["largest_difference"], digits=1),
            ]
        )
        for name, each in _trained.items()
    },
)
_families = result("families")["families"]
table(
    "convert.md",
    "| | largest logit | difference",
    {
        f"`{name}`": " ".join(
            [
                _digits(each["largest_logit"], 1e6 * each["largest_difference"], digits=1),
                f"{1e6 * each['exported_difference']:.0f} {each['greedy_tokens'] * each['greedy_is_equal']}",
            ]
        )
        for name, each in _families.items()
    },
)
_quantized = [result("quantized")[name] for name in ("deepseek_v3", "gpt_oss")]
table(
    "convert.md",
    "| | FP8, deepseek_v3 |",
    {
        "largest logit": _digits(*(each["largest_logit"] for each in _quantized), digits=1),
        "largest difference": "1e-6 " + _digits(*(1e6 * each["largest_difference"] for each in _quantized), digits=1),
    },
)

# docs/context.md and docs/exchange.md: compiled rings, forms over tensor ranks
_rings = [result(f"ring_attention_{target}")["forms"] for target in ("h100_1x1x8", "v5p_2x2x2")]
table(
    "context.md",
    "| | H100 | v5p |",
    {
        "ring: transfers": " ".join(f"{each['ring']['beside_a_product']}" for each in _rings),
        "ring: ms": _digits(*(each["ring"]["estimated_ms"] for each in _rings), digits=0),
        "`all_gather`: ms": _digits(*(each["all_gather"]["estimated_ms"] for each in _rings), digits=0),
    },
)
_box = result("tensor_box")["forms"]
table(
    "exchange.md",
    "| step time / `replicated` |",
    {
        f"`{form}`": _digits(*(_box[f"{t} tensor ranks"][measured]["time_over_replicated"] for t in (2, 4)))
        for measured, form in (
            ("o1", "sharded"),
            ("o2", "sharded_chunked"),
            ("o3", "sharded_overlapped"),
        )  # under earlier names
    },
)

# docs/gates.md
table(
    "gates.md",
    "| gate | validation loss |",
    {
        f"`{name}`": (
            f"{found['validation_loss']:.3f} {found['training_loss']:.3f} {found['load_max_over_mean']:.2f} "
            f"{hundreds(found['dropped_fraction'])} {found['parameters']:,}"
        )
        for name, found in result("gates")["gates"].items()
    },
)

# docs/models.md
_memory = [result(f"attention_memory_{target}")["cases"] for target in ("v5p_2x2x2", "h200_1x1x8")]
table(
    "models.md",
    "| MiB | v5p |",
    {
        f"| {case} ": " ".join(
            [*(["8"] if "8" in case else [])]
            + [_digits(*filter(None, cases[case]["temporary_mib"].values()), digits=0) for cases in _memory]
        )
        for case in _memory[0]
    },
)
_cycles = result("splash_cycles_v5p_2x2x1")
table(
    "models.md",
    "| ms | forward kernel |",
    {
        "`splash`": _digits(
            *_cycles["kernels_ms"].values(), _cycles["other_operations_ms"], _cycles["splash_ms"], digits=1
        ),
        "`xla`": _digits(_cycles["xla_ms"], _cycles["xla_ms"], digits=1),
    },
)

# docs/measure.md
table(
    "measure.md",
    "ours over MaxText",
    {
        "tokens/s": " ".join(
            [within(PEERS[who]["tokens_per_s"], 0) for who in ("ours", "maxtext")]
            + [within(PEERS["tokens_per_s_over_maxtext"])]
        ),
        "to the first step": " ".join(
            [within(PEERS[who]["first_step_s"], 1) for who in ("ours", "maxtext")]
            + [within(PEERS["first_step_s_over_maxtext"])]
        ),
    },
)

# docs/memory.md
for _kind in ("h100", "v5p"):
    _found = result(f"memory_{_kind}")
    table(
        "memory.md",
        "| compiler | steps |",
        {
            f"for {_kind}": " ".join(
                [
                    "4 64",
                    f"{len(_found['cases'])}",
                    hundreds(_found["median_absolute_error"]),
                    hundreds(-_found["lowest_error"]),
                    hundreds(_found["highest_error"]),
                ]
            )
        },
    )
_logits = {
    how: result("memory_h100")["cases"][f"gelu 1x4x1 4x1024 plain remat=full{setting}"]
    for how, setting in (("in two chunks", ""), ("as a whole", " loss_chunk=4096"))
}
table(
    "memory.md",
    "| | temporaries, MB |",
    {
        how: _digits(
            *(found[name] / 1e6 for name in ("temporary_bytes", "predicted_bytes", "allocated_bytes")), digits=0
        )
        for how, found in _logits.items()
    },
)
table(
    "memory.md",
    "| moments, compiled for |",
    {
        f"{where}, {kind}": _digits(found["allocated_gb"], found["planned_gb"], found["host_gb"])
        for kind, target in (("h100", "h100_1x1x8"), ("v5p", "v5p_2x2x2"))
        for where, key in (("on the device", "device"), ("in host memory", "host"))
        for found in (result(f"offload_{target}")["moments"][key],)
    },
)
table(
    "memory.md",
    "| activations, compiled for |",
    {
        f"{where}, {target.partition('_')[0]}": _digits(
            found["allocated_gb"], found["planned_gb"], found["host_temporaries_gb"]
        )
        for target in ("h100_1x1x8", "v5p_2x2x2")
        for where, key in (("on the device", "device"), ("in host memory", "host"))
        for found in (result(f"offload_{target}")["activations"][key],)
    },
)
_by_memory = {
    next((each.partition("=")[2] for each in found["settings"] if "memory_percent" in each), "null"): found
    for found in FOUR_BLOCKS
}
table(
    "compiled.md",
    "| step near the memory of a GPU |",
    {
        f"{step}, {words}": f"{shape} "
        + _digits(
            *(found[f"{what}_ms"] for what in ("step", "communication", "exposed")), found["allocated_gb"], digits=1
        )
        for name, step, shape in (
            ("unified", "`unified` in 2 microbatches, 8 × 4,096 tokens per GPU", "2 8 4,096"),
            ("plain", "plain, 2 × 4,736 tokens per GPU", "2 4,736"),
        )
        for limit, words in (("as runs do", "no limit"), ("with XLA's limit", "XLA's limit"))
        for found in (result("scheduler_limit_h100_1x1x8")["found"][name][limit],)
    },
)
_steps = {  # of several with other settings, the first
    name.partition(" ")[0]: found for name, found in reversed(result("peer_shapes_v5p_2x2x2")["programs"].items())
}
table(
    "compiled.md",
    "| step | ms |",
    {
        row: microbatches
        + _digits(
            *(_steps[name][f"{what}_ms"] for what in ("step", "communication", "exposed")),
            _steps[name]["temporary_gib"],
            digits=1,
        )
        for model, widths in (("DeepSeek-V2-Lite", "fine"), ("Mixtral", "coarse"))
        for text, schedule in (("plain", "vanilla"), ("2 microbatches", "unified2"), ("4 microbatches", "unified4"))
        for microbatches in (text.removesuffix("plain").removesuffix("microbatches"),)
        for room in ("capacity", "dropless")
        for row, name in ((f"{model}, {text}, {room}", f"{widths}+{schedule}+{room}"),)
    },
)
table(
    "memory.md",
    "| `schedule.memory_percent` |",
    {
        row: f"{given} {found['temporary_gib']:.2f} "
        + _digits(found["step_ms"], found["communication_ms"], found["exposed_ms"], digits=1)
        for row, given in (("null", "95"), ("11", "11"))
        for found in (_by_memory[row],)
    },
)
table(
    "memory.md",
    "sequences of 2,048",
    {
        name: f"{found['blocks']} {found['sequences']} "
        + _digits(found["predicted_bytes"] / 1e9, found["allocated_bytes"] / 1e9, 100 * abs(found["error"]), digits=1)
        for name, found in result("gpu_hlo_h200_1x1x1").items()
        if name != "provenance"
    },
)
table(
    "memory.md",
    "kernels, ms",
    {
        f"{name}, {how}": f"{sum(step['kernels']['ms'].values()):.1f} {step['kernels']['useful']:.2f} "
        f"{step['allocated_bytes'] / 1e9:.1f}"
        for name, found in result("gpu_hlo_h200_1x1x1").items()
        if name != "provenance"
        for how, step in (
            ("a loop over blocks |", found),
            ("unrolled |", found["unrolled"]),
            ("unrolled, with as many tokens as fit |", found["filled"]),
        )
    },
)

# docs/migration.md: its other tables are in tests/test_balance_results.py
_copies = result("replicas")
(_move,), (_pair,) = _copies["moves"]["replicas"], _copies["moves"]["migration"]


def _later(run: str) -> str:
    """Least and largest of the greater loads, after the move."""
    largest = [max(loads) for loads in list(_copies["rank_load_max_over_mean"][run].values())[2:]]
    every = [load for loads in list(_copies["rank_load_max_over_mean"][run].values())[2:] for load in loads]
    return _digits(min(every), max(largest))


table(
    "migration.md",
    "with `migration.replicas=1`",
    {
        "steps 51 to 100": f"51 100 {_digits(*_pair['rank_load'])} {_digits(*_move['rank_load'])}",
        "as planned": f"100 {_digits(*_pair['migration_load_after'])} {_digits(*_move['migration_load_after'])}",
        "measured in the 150 steps": f"150 {_later('migration')} {_later('replicas')}",
        "the move": (
            f"{_move['migration_swaps'][0]} {_move['migration_swaps'][1]} {_move['migration_copies'][0]} "
            f"{_move['migration_bytes'] / 1e6:.1f} {_move['migration_bytes'] / _copies['bytes_of_a_copy']:.0f}"
        ),
    },
)

# docs/pipelines.md: the box is in tests/test_pipeline_results.py
_pipelines = [result(f"pipeline_hlo_{target}")["schedules"] for target in ("h100_1x1x8", "v5p_2x2x2")]


def _compiled(row: dict) -> str:
    activations = row["peak_bytes"] - row["argument_bytes"] - row["gradient_bytes"]
    return f"{activations / 1e6:,.0f} {row['in_flight_bytes'] / 1e6:,.0f} {row['step_ms']:.1f} {row['idle_ms']:.1f}"


table(
    "pipelines.md",
    "8 H100: activations",
    {
        f"`{name}`": ("2 " if name == "interleaved" else "") + " ".join(_compiled(each[name]) for each in _pipelines)
        for name in _pipelines[0]
    },
)

# docs/plan.md: what is predicted now, against what was compiled


def _predicted(name: str) -> str:
    numbers = []
    for platform, schedules in zip(("gpu", "tpu"), _pipelines, strict=True):
        compiled = schedules[name]["temporary_bytes"]
        config = load_config(ROOT / "configs/bench/fine_grained.yaml", schedules[name]["settings"].split())
        memory = step_memory(config, platform)
        predicted = memory.total - memory.state - memory.batch
        numbers += [f"{predicted / 1e6:,.0f}", f"{compiled / 1e6:,.0f}", hundreds(abs(predicted / compiled - 1))]
    return " ".join(numbers)


table(
    "plan.md",
    "| MB of temporaries |",
    {f"`{name}`": ("2 " if name == "interleaved" else "") + _predicted(name) for name in _pipelines[0]},
)
_steps, _streams = result("predicted_steps"), result("predicted_streams")


def _errors(of: dict, *rates: int) -> str:
    found = [abs(row["error"]) for row in of["rows"] if row["rate_mbit"] in rates]
    return f"{hundreds(float(np.median(found)))} {hundreds(float(np.quantile(found, 0.9)))}"


for _title, _of in (("| two processes |", _steps), ("| four processes |", _streams)):
    _all = (
        f"{hundreds(_of['median_error'])} {hundreds(_of['ninth_decile_of_errors'])} "
        f"{hundreds(max(case['over_fastest'] for case in _of['cases'].values()))} {len(_of['cases'])}"
    )
    table(
        "plan.md",
        _title,
        {
            f"all {_of['configurations']}": f"{_of['configurations']} {_all}",
            "100 and 200 Mbit/s": f"100 200 {_errors(_of, 100, 200)}",
            "400 and 800 Mbit/s": f"400 800 {_errors(_of, 400, 800)}",
        },
    )
for _plan, _piece, _words in (
    ("plan_kimi_k2_h100x1024", "on 1,024 H100", "1.03 1,024 32 8 2 2 32 3 1,024 2,048"),
    ("plan_kimi_k2_h200x1024", "the same on 1,024 H200", "1,024 16 8 4 2 16"),
):
    _text = plan_text(_plan)
    _names = ("memory predicted", "memory compiled", "memory of", "step predicted", "step compiled")
    table("plan.md", "| plan (", {_piece: " ".join([_words, *(_text[name] for name in _names)])})

# docs/fully_sharded.md


def _sharded(row: dict) -> str:
    hidden = f" {_digits(row['gathers_exposed_ms'], row['gathers_ms'])}" if row["gathers"] else ""
    exposed = f"{row['exposed_ms']:.2f} {hundreds(row['exposed_share'])}{hidden}"
    return f"{_digits(row['step_ms'], row['communication_ms'], digits=1)} {exposed} " + _digits(
        row["allocated_gb"], row["planned_gb"], digits=1
    )


table(
    "fully_sharded.md",
    "| `optimizer.zero` | step, ms |",
    {
        f"{stage}: ": f"{stage} {_sharded(row)}"
        for stage, row in result("fully_sharded_olmoe_v5p_2x2x2")["stages"].items()
    },
)
_ours = result("fully_sharded_olmoe_v5p_2x2x2")["stages"]["3"]
_maxtext = result("peers_compiled_v5p_2x2x2")["programs"]["olmoe+sparse+fsdp8+least"]
_maxtext_gb = (_maxtext["argument_gib"] + _maxtext["temporary_gib"]) * 2**30 / 1e9


def _beside(row: dict, memory_gb: float, digits: int) -> str:
    exposed_ms, of_ms = row["exposed_ms"], row["communication_ms"]
    return f"{of_ms:.1f} {exposed_ms:.{digits}f} {hundreds(exposed_ms / of_ms)} {memory_gb:.1f}"


table(
    "fully_sharded.md",
    "| | communication, ms | exposed, ms | state and temporaries",
    {"MaxText": _beside(_maxtext, _maxtext_gb, 1), "ours": _beside(_ours, _ours["allocated_gb"], 2)},
)
table(
    "fully_sharded.md",
    "| H100, `optimizer.zero` | step, ms |",
    {
        f"{nodes}, {stage}: ": f"{stage} {_sharded(row)}"
        for nodes, layout in (("one node", "1x1x8"), ("eight nodes", "1x8x8"))
        for stage, row in result(f"fully_sharded_olmoe_h100_{layout}")["stages"].items()
    },
)
_ordered = "unified+weight_grad+grad_reduce"
_box = {name: row["step_s"]["median"] for name, row in result("fully_sharded_box")["variants"].items()}
table(
    "fully_sharded.md",
    "| step | s |",
    {
        step: _digits(_box[name], _box[name] / _box[_ordered])
        for step, name in {
            "whole parameters, plain order": "vanilla",
            "whole parameters, `unified`": _ordered,
            "fully sharded, plain order": "vanilla+sharded",
            "fully sharded, `unified`": f"{_ordered}+sharded",
        }.items()
    },
)

# docs/recovery.md
_chaos, _lost, _peer, _fewer = (result(name) for name in ("chaos", "node_loss", "lost_peer", "elastic"))
_kind = _chaos["by_kind"]


def _most_lost(*kinds: str) -> int:
    return max(_kind[kind]["steps_lost"]["largest"] for kind in kinds)


_damages = sorted(
    fault["steps_lost"] for fault in _chaos["faults"] if fault["kind"] in ("bit", "cut") and "steps_lost" in fault
)


def _ended(how: str) -> list[float]:
    """Seconds."""
    return [
        other["seconds"] for fault in _peer["faults"] if fault["how"] == how for other in fault["others_ended"].values()
    ]


_next = [fault["next_step_s"] for fault in _peer["faults"] if fault["how"] == "cut for 10 s"]
table(
    "recovery.md",
    "| | |",
    {
        "losses of all 3,482 steps": f"{_chaos['steps']:,}",
        "| steps lost |": (
            f"{_most_lost('kill', 'stop')} {_kind['kill']['faults'] + _kind['stop']['faults']} {_most_lost('nan')}"
        ),
        "newest checkpoint damaged": f"{_damages[-2]} {_damages[-1]}",
        "from SIGKILL": (f"{_kind['kill']['restart_s']['median']:.2f} {_kind['kill']['restart_s']['largest']:.2f}"),
        "from SIGSTOP": (
            f"{_chaos['progress_timeout_s']} {_kind['stop']['restart_s']['median']:.1f} "
            f"{_kind['stop']['restart_s']['largest']:.2f}"
        ),
        "from a kill to the first": (
            f"{_kind['kill']['first_new_step_s']['median']:.1f} {_kind['kill']['first_new_step_s']['largest']:.1f}"
        ),
        "from SIGTERM": f"0 {_kind['term']['exit_s']['median']:.1f} {_kind['term']['exit_s']['largest']:.1f}",
        "losses of all 60 steps": f"{_lost['steps']}",
        "one node lost, twice": f"{max(_lost['steps_lost_with_one_node'])}",
        "lost with the next one": f"{max(_lost['steps_lost_with_a_node_and_the_next'])}",
    },
)
table(
    "recovery.md",
    "| what happens to one process |",
    {
        "it is killed": f"{_digits(*_ended('killed'))} 75",
        "it is stopped": f"{min(_ended('stopped')):.0f}",
        "cut for good": f"{min(_ended('cut')):.0f} {max(_ended('cut')):.0f}",
        "cut for 10 s": f"10 {_digits(*sorted(_next), digits=1)}",
    },
)
table(
    "recovery.md",
    "| processes | arrays |",
    {
        f"{change['before']} → {change['after']}": (
            f"{change['before']} {change['after']} {change['arrays_with_equal_digests']} "
            f"{change['largest_relative_drift']:.1e}".replace("e-0", "e-")
        )
        for change in _fewer["changes"]
    },
)

# docs/schedule.md
table(
    "schedule.md",
    "× the speed of `vanilla`",
    {
        f"| {parts} ": f"{parts} "
        + _digits(
            found["speed_up_over_vanilla"]["median"],
            found["speed_up_over_expert_pipeline"]["median"],
            faster(found, PARTS_4),
            found["step_over_bound"]["median"],
        )
        for parts, found in ((4, WHOLE_4), (2, WHOLE))
    },
)

# docs/tune.md
_replay = result("tuned_box")["replay"]
table(
    "tune.md",
    "| after 8 samples |",
    {
        name: (
            f"{hundreds(found['mean'][7], 2)} {hundreds(found['within_2_percent'][7], 0)} "
            f"{hundreds(found['within_2_percent'][2], 0)}"
        )
        for name, found in _replay.items()
    },
)
