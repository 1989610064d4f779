"""What sentences of README.md and docs/ must say of results: page, and pieces of its text."""

from tests.numbers.results_page import BY_DEFAULT, ESTIMATED, MEASURED, PROFILES, WHOLE_4, kept
from tests.numbers.stored import hundreds, variants
from tests.results import result

Piece = tuple[str, str]


def _readme() -> list[Piece]:
    chaos, steps = result("chaos"), result("predicted_steps")
    exposed = f"{BY_DEFAULT['exposed']:.2f} of {BY_DEFAULT['communication']:.2f} ms"
    return [
        ("README.md", f"`unified` has {WHOLE_4['speed_up_over_vanilla']['median']:.2f} × the speed of `vanilla`"),
        *(
            (page, f"`unified` exposes {exposed} of communication")
            for page in ("README.md", "commands.md", "compiled.md")
        ),
        ("compiled.md", f"The scheduler asks for {PROFILES['instructions']:,} instructions, all of which"),
        (
            "compiled.md",
            f"exposes {MEASURED['exposed_ms']:.2f} of {MEASURED['communication_ms']:.2f} ms of communication instead "
            f"of {ESTIMATED['exposed_ms']:.2f}, and the step takes {MEASURED['step_ms']:.1f} ms instead of "
            f"{ESTIMATED['step_ms']:.1f}",
        ),
        (
            "README.md",
            f"{steps['configurations']} steps of two processes, with a median error of "
            f"{hundreds(steps['median_error'])} %",
        ),
        (
            "README.md",
            f"After {len(chaos['faults'])} injected faults, the losses of {chaos['steps']:,} steps were bit for bit",
        ),
    ]


def _scope() -> list[Piece]:
    v5p, h200, nodes = (variants(f"compiled_{target}") for target in ("v5p_2x2x2", "h200_1x1x8", "h200_1x8x8"))
    compiling = result("compile_time")

    def more(of: dict) -> str:
        return f"{of['unified']['temporaries'] / of['vanilla']['temporaries']:.2f} ×"

    return [
        (
            "scope.md",
            f"temporaries are {more(h200)} the plain program's on 8 H200 ({h200['unified']['temporaries']:.1f} and "
            f"{h200['vanilla']['temporaries']:.1f} GB), {more(nodes)} on 8 × 8, and "
            f"{compiling['temporary_mib_scheduled'] / compiling['temporary_mib_plain']:.2f} × for 32 blocks on CPU",
        ),
        ("scope.md", f"they are {more(v5p)}"),
        ("schedule.md", f"32 blocks compile in {compiling['deep_over_shallow']:.2f} × the time of 4"),
    ]


def _exchange() -> list[Piece]:
    v5p, h100 = (result(f"ring_hlo_{target}")["ways"] for target in ("v5p_2x2x2", "h100_1x1x8"))
    faster = [ways["hop by hop"]["estimated_ms"] / ways["flat"]["estimated_ms"] for ways in (v5p, h100)]
    return [
        (
            "exchange.md",
            f"on v5p {v5p['hop by hop']['beside_a_product']} of {v5p['hop by hop']['transfers']} hops have a matrix "
            "product",
        ),
        (
            "exchange.md",
            f"on H100 {h100['hop by hop']['beside_a_product']} of the {h100['hop by hop']['transfers']} that XLA makes",
        ),
        (
            "exchange.md",
            f"{hundreds(v5p['hop by hop']['hidden'], 0)} % and {hundreds(h100['hop by hop']['hidden'], 0)} % of the "
            f"transfers are hidden, and the layer takes {faster[0]:.2f} × and {faster[1]:.2f} × the time",
        ),
    ]


def _fully_sharded() -> list[Piece]:
    whole, moments, parameters = (result("fully_sharded_olmoe_v5p_2x2x2")["stages"][name] for name in ("0", "1", "3"))
    errors = [row["planned_gb"] / row["allocated_gb"] - 1 for row in (parameters, moments, whole)]
    gpus = [result(f"fully_sharded_olmoe_h100_{layout}")["stages"]["3"] for layout in ("1x1x8", "1x8x8")]
    cube = result("fully_sharded_olmoe_v5p_4x4x4")["stages"]["3"]
    [on_either] = {f"{row['synchronous_gathers']} of {row['gathers']}" for row in gpus}
    return [
        (
            "fully_sharded.md",
            f"{cube['synchronous_gathers']} of {cube['gathers']} gathers are synchronous, {cube['exposed_ms']:.2f} of "
            f"{cube['communication_ms']:.1f} ms are exposed ({hundreds(cube['exposed_share'])} %), "
            f"{cube['gathers_exposed_ms']:.2f} of them gathers, and {cube['allocated_gb']:.1f} GB are allocated "
            f"(planned: {cube['planned_gb']:.1f})",
        ),
        ("fully_sharded.md", f"{on_either} gathers are synchronous on either"),
        ("fully_sharded.md", f"{parameters['synchronous_gathers']} of {parameters['gathers']} gathers are synchronous"),
        ("fully_sharded.md", f"Plans are {hundreds(errors[0], 0)} % too high for stage 3"),
        ("fully_sharded.md", f"{hundreds(errors[1], 0)} and {hundreds(errors[2], 0)} % too high for stages 1 and 0"),
    ]


def _fully_sharded_box() -> list[Piece]:
    return [("fully_sharded.md", f"over links of {result('fully_sharded_box')['rate_mbit']:.0f} Mbit/s")]


def _fully_sharded_plans() -> list[Piece]:
    plans = result("fully_sharded_plans")["plans"].values()
    any_mesh, no_stages = (
        [each[meshes]["0 to 3"]["tokens_per_s"] / each[meshes]["0 to 2"]["tokens_per_s"] for each in plans]
        for meshes in ("any", "no pipeline stages")
    )
    *others, most = sorted(any_mesh)
    return [
        ("fully_sharded.md", f"with stages: {most:.2f} × the tokens/s in one of the four, {max(others):.3f} × at most"),
        ("fully_sharded.md", f"{min(no_stages):.2f} to {max(no_stages):.2f} × the tokens/s"),
    ]


def _peer_shapes() -> list[Piece]:
    programs = result("peer_shapes_v5p_2x2x2")["programs"].items()
    fine, coarse = (
        next(found["attention_ms"] for name, found in programs if name.startswith(f"{widths}+unified2+capacity"))
        for widths in ("fine", "coarse")
    )
    text = f"take {fine} ms of DeepSeek-V2-Lite's `unified` step with a capacity, and {coarse} ms of Mixtral's"
    return [("compiled.md", text)]


def _offloaded() -> list[Piece]:
    gpu, tpu = (result(f"offload_{target}")["moments"]["host"]["copies"] for target in ("h100_1x1x8", "v5p_2x2x2"))
    whole, some = gpu["copy-start"], gpu["fusion-start"]
    assert gpu.keys() == {"copy-start", "fusion-start"}, "all are asynchronous"
    assert tpu == {"copy-start": whole, "dynamic-slice-start": some / 2, "dynamic-update-slice-start": some / 2}
    text = f"For both, all {whole + some} copies are asynchronous: {whole} of whole arrays, and {some} of some blocks"
    stacks = result("offload_h100_1x1x8")["activations"]["host"]["copies"]
    assert stacks.keys() == {"fusion-start"}
    return [("memory.md", text), ("memory.md", f"All {stacks['fusion-start']} copies are asynchronous")]


def _pipelines() -> list[Piece]:
    h100, v5p = (result(f"pipeline_hlo_{target}")["schedules"] for target in ("h100_1x1x8", "v5p_2x2x2"))
    faster = [each["1f1b"]["step_ms"] / each["coscheduled"]["step_ms"] for each in (h100, v5p)]
    shares = [hundreds(h100[name]["exposed_share_of_pairs"]) for name in ("coscheduled", "coscheduled_split")]
    return [
        (
            "pipelines.md",
            f"1F1B keeps {kept('h100_1x1x8', '1f1b', 'gpipe')} × what GPipe keeps on H100 and "
            f"{kept('v5p_2x2x2', '1f1b', 'gpipe', 3)} × on v5p; zero bubble "
            f"{kept('h100_1x1x8', 'zero_bubble', '1f1b')} × and {kept('v5p_2x2x2', 'zero_bubble', '1f1b')} ×",
        ),
        ("pipelines.md", f"{faster[0]:.2f} × and {faster[1]:.2f} × the speed of 1F1B"),
        ("pipelines.md", f"{shares[0]} % of the time of all eight is exposed ({shares[1]} % with `coscheduled_split`)"),
    ]


def _plans() -> list[Piece]:
    plans, steps, saved = (result(name) for name in ("scaling", "predicted_steps", "predicted_speedups"))
    large = [plan["exposed"] for plan in plans["plans"].values() if plan["chips"] >= 512]
    clusters = [saved["rtx3090x16"], saved["rtx2080tix32"]]
    memory = sum(len(result(f"memory_{kind}")["cases"]) for kind in ("h100", "v5p"))
    ranges = result("forward_ranges")
    forward, faster = ranges["scheduled_over_ranges_forward"], ranges["ranges_more_than_1_percent_faster"]

    def spread(over: str) -> tuple[str, str]:
        least, most = (min(each[over]["least"] for each in clusters), max(each[over]["most"] for each in clusters))
        median = " and ".join(f"{each[over]['median']:.2f}" for each in clusters)
        return f"{least:.2f} to {most:.2f} ×", f"{median} ×"

    vanilla, parts = spread("unified_over_vanilla"), spread("unified_over_expert_pipeline")
    return [
        ("scaling.md", f"the exposed share of the step is {hundreds(min(large), 0)} to {hundreds(max(large), 0)} %"),
        (
            "plan.md",
            f"takes {forward['median']:.2f} × that in ranges at the median, and {forward['least']:.2f} to "
            f"{forward['most']:.2f} ×; ranges are more than 1 % faster in {faster}",
        ),
        ("numbers.md", f"against {steps['configurations']} measured steps"),
        (
            "numbers.md",
            f"median error {hundreds(steps['median_error'])} %, nine in ten up to "
            f"{hundreds(steps['ninth_decile_of_errors'])} %",
        ),
        ("numbers.md", f"its memory against {memory} compiled steps"),
        ("numbers.md", f"compiles {memory} steps"),
        (
            "schedule.md",
            f"{vanilla[0]} as fast as `vanilla`, in the median {vanilla[1]}, and {parts[0]} as fast as "
            f"`expert_pipeline` with the same placement of gradients, {parts[1]}",
        ),
    ]


def _drafts() -> list[Piece]:
    found = result("mtp_acceptance")
    without, module = found["runs"]["next token"], found["runs"]["two tokens"]
    h100, v5p = (variants(f"compiled_mtp_{target}").values() for target in ("h100_1x1x8", "v5p_2x2x2"))
    (plain, more), (v5p_plain, v5p_more) = h100, v5p
    return [
        (
            "models.md",
            f"exposes {more['exposed']:.2f} of {more['communication']} ms of communication with the module, and "
            f"{plain['exposed']:.2f} of {plain['communication']} without, in an estimated {more['step']:.1f} and "
            f"{plain['step']:.1f} ms",
        ),
        (
            "models.md",
            f"exposes {v5p_more['exposed']:.2f} of {v5p_more['communication']} ms with the module, and "
            f"{v5p_plain['exposed']:.2f} of {v5p_plain['communication']} without",
        ),
        ("models.md", f"`python profiling/mtp_acceptance.py {found['steps']}`"),
        (
            "models.md",
            f"agree at {module['acceptance_rate']:.1%} of {module['positions']:,} positions".replace("%", " %"),
        ),
        (
            "models.md",
            f"{100 * module['draft_is_the_text']:.1f} % are the text's own token, of the decoder's "
            f"{100 * module['decoder_is_the_text']:.1f} %",
        ),
        (
            "models.md",
            f"validation loss is {module['validation_loss']} nats per byte, and {without['validation_loss']} without",
        ),
    ]


def _training() -> list[Piece]:
    fp8, balance, copies, hot = (result(name) for name in ("fp8_experts", "balance", "replicas", "hot_experts_box"))
    speed, load = hot["speed_over_balanced"], hot["rank_load_max_over_mean_without_copies"]["skewed"]
    shown, of_four = (
        {
            name: f"{each['median']:.2f} ({each['first_quartile']:.2f}–{each['third_quartile']:.2f}) ×"
            for name, each in of.items()
        }
        for of in (speed, result("hot_experts_box_4")["speed_over_balanced"])
    )
    scheduled = result("hot_experts_box_4_scheduled")
    steps_s = {name: f"{each['median']:.2f}" for name, each in scheduled["step_s"].items()}
    gpu, tpu = (result(f"hot_experts_hlo_{target}") for target in ("h100_1x1x8", "v5p_2x2x2"))
    (copied, copied_late, added, added_late), on_tpu = (
        [f"{of[kind][name]:.2f}" for kind in ("copies", "sums") for name in ("ms", "exposed_ms")] for of in (gpu, tpu)
    )
    assert not any(of[kind]["synchronous"] for of in (gpu, tpu) for kind in ("copies", "sums"))
    losses, last = fp8["validation_losses"], str(fp8["steps"])
    differ = max(abs(losses["float32"][step] - losses["fp8"][step]) for step in losses["fp8"])
    with_bias, with_loss = (
        [seed for name, seed in balance["runs"][way].items() if name.startswith("seed")]
        for way in ("bias, rate 0.01", "load-balance loss")
    )
    means = [sum(seed["validation_loss"] for seed in seeds) / len(seeds) for seeds in (with_bias, with_loss)]
    return [
        (
            "models.md",
            f"{losses['fp8'][last]:.3f} nats per byte, {losses['float32'][last]:.3f} in float32, and "
            f"{losses['float32, another seed'][last]:.3f} in float32 with another seed. At no evaluation was the "
            f"difference more than {differ:.3f}",
        ),
        *_drafts(),
        (
            "balance.md",
            f"biases reach {max(seed['load_max_over_mean'] for seed in with_bias):.2f} at most over 100 steps, at the "
            f"same loss: {means[0]:.3f} and {means[1]:.3f} on average",
        ),
        (
            "migration.md",
            f"Validation loss is {copies['validation_loss']['replicas']:.3f} with replicas and "
            f"{copies['validation_loss']['off']:.3f} without",
        ),
        (
            "migration.md",
            f"At a load of {load[0]:.2f} and {load[1]:.2f} in the two blocks, the skewed router's steps have "
            f"{shown['skewed']} the speed of the balanced one's without copies, and {shown['copies']} with them",
        ),
        (
            "migration.md",
            f"Four ranks reach {of_four['skewed']} the speed of the balanced router without copies, and "
            f"{of_four['copies']} with five of them",
        ),
        (
            "migration.md",
            f"{scheduled['speed_over_balanced']['skewed']['median']:.2f} × without copies and "
            f"{scheduled['speed_over_balanced']['copies']['median']:.2f} × with them ({steps_s['skewed']}, "
            f"{steps_s['copies']} and {steps_s['balanced']} s a step)",
        ),
        (
            "migration.md",
            f"On H100 the copies of a step take {copied} ms, {copied_late} of them exposed, and the sums of their "
            f"gradients {added} ms, {added_late} of them exposed. On v5p it is {on_tpu[0]} and {on_tpu[1]} ms, and "
            f"{on_tpu[2]} and {on_tpu[3]} ms",
        ),
    ]


def _recovery_and_tuning() -> list[Piece]:
    kinds = result("chaos_kill_stop")["by_kind"]
    kill, stop = kinds["kill"], kinds["stop"]
    tuned = result("tuned_box")
    live = tuned["live"]
    (_, settled), (noticed, _) = live["searches"]
    rates = [f"{rate:.0f}" for rate in live["rates_mbit"]]
    return [
        (
            "recovery.md",
            f"{kill['restart_s']['largest']:.2f} s after a kill at most, {stop['restart_s']['largest']:.1f} s after a "
            f"stop, and the first new step came after {kill['first_new_step_s']['median']:.1f} and "
            f"{stop['first_new_step_s']['median']:.1f} s (medians)",
        ),
        ("tune.md", f"the slowest takes {tuned['sweep']['worst_over_best']:.1f} × the time of the fastest"),
        (
            "tune.md",
            f"tuned itself in {settled} steps, from {live['tried'][0][1]:.2f} to {live['chosen'][0][1]:.2f} MB; when "
            f"its link fell from {rates[0]} to {rates[1]} Mbit/s, it noticed within "
            f"{noticed - live['changed_at']} steps, "
            f"searched again and stayed with {live['chosen'][1][1]:.2f} MB",
        ),
    ]


def _generate() -> list[Piece]:
    speed = result("generate_speed")
    one, eight = (speed[f"batch_{size}"] for size in (1, 8))
    assert one["equal_tokens"]
    assert eight["equal_tokens"]
    first = " and ".join(f"{each['first_token_ratio']['median']:.2f}" for each in (one, eight))
    return [
        ("generate.md", f"{speed['parameters'] / 1e6:.0f} million parameters"),
        ("generate.md", f"prompts of {speed['prompt_tokens']} tokens, {speed['new_tokens']} tokens after each"),
        ("generate.md", f"{one['speed_ratio']['median']:.2f} × as fast as transformers"),
        ("generate.md", f"with one prompt, and {eight['speed_ratio']['median']:.2f} × with eight, by the clock"),
        ("generate.md", f"the CPU's time is {one['cpu_time_ratio']['median']:.2f} × shorter"),
        ("generate.md", f"with one prompt, and {eight['cpu_time_ratio']['median']:.2f} × with eight ("),
        ("generate.md", f"{first} × the time for it"),
    ]


SENTENCES = [
    *_generate(),
    *_readme(),
    *_scope(),
    *_exchange(),
    *_fully_sharded(),
    *_fully_sharded_box(),
    *_fully_sharded_plans(),
    *_peer_shapes(),
    *_offloaded(),
    *_pipelines(),
    *_plans(),
    *_training(),
    *_recovery_and_tuning(),
]
