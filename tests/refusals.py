"""Changes of a small config that are refused, and the error messages."""

REFUSED = {
    "train.steps=0": "train.steps=0 must be at least 1",
    "model.moe.top_k=0": "model.moe.top_k=0 must be at least 1",
    "model.num_key_value_heads=0": "model.num_key_value_heads=0 must be at least 1 (or null)",
    "model.attention.sliding_window=0": "model.attention.sliding_window=0 must be at least 1 (or null)",
    "train.seed=2147483648": "train.seed=2147483648 must be at most 2147483647",
    "optimizer.learning_rate=.nan": "optimizer.learning_rate=nan must be a finite number",
    "model.rms_norm_eps=0": "model.rms_norm_eps=0.0 must be above 0",
    "model.moe.capacity_factor=-1": "model.moe.capacity_factor=-1.0 must be above 0 (or null)",
    "mesh.cpu_devices=4096": (
        "mesh.cpu_devices=4096 must be at most 512, which one machine can simulate: use fewer, or "
        "python -m moe_jax.plan, which plans for clusters that need not be there"
    ),
    **{f"{name}=": f"{name} is empty: name a file, or null" for name in ("schedule.task_times", "tune.cache")},
    "plan.cluster=": "plan.cluster is empty: name a cluster, or null",
    "mesh.pipeline=2 optimizer.zero=2": (
        "optimizer.zero=2 sums each part of a batch, which is not for the ticks of schedule.pipeline=1f1b, after "
        "which gradients are summed: use optimizer.zero=1"
    ),
    "optimizer.name=sgd": "optimizer.name=sgd must be adamw, muon, lion or adafactor, or package.module:name",
    "optimizer.name=moun": (
        "optimizer.name=moun must be adamw, muon, lion or adafactor, or package.module:name: did you mean muon?"
    ),
    "optimizer.restarts=2 optimizer.schedule=linear": (
        "optimizer.restarts=2 is of optimizer.schedule=cosine, and optimizer.schedule=linear: use "
        "optimizer.schedule=cosine, or optimizer.restarts=0"
    ),
    "optimizer.restarts=20 train.steps=112": (
        "optimizer.restarts=20 in the 12 steps of train.steps=112 after the warm-up leaves less than 2 steps between "
        "two: use optimizer.restarts=5 or less"
    ),
    'optimizer.groups=[{"match":null,"weight_decay":2}]': "optimizer.groups[0].match=null must be text, not null",
    'optimizer.groups=[{"match":"","weight_decay":2}]': (
        "optimizer.groups[0].match is empty: name a part of a parameter's path, such as moe.router"
    ),
    'optimizer.groups=[{"match":"norm"},{"match":"(up"}]': (
        "optimizer.groups[1].match=(up must be a regular expression: missing ), unterminated subpattern at position 0"
    ),
    'optimizer.groups=[{"match":"norm","learning_rate":2}]': (
        "unknown setting optimizer.groups[0].learning_rate: did you mean learning_rate_factor? use that name"
    ),
    'optimizer.groups=[{"match":"norm","x":2}]': (
        "unknown setting optimizer.groups[0].x: use match, learning_rate_factor or weight_decay"
    ),
    'optimizer.groups=[{"weight_decay":0}]': "optimizer.groups[0] has no match: set it, as in {match: …}",
    "optimizer.groups=norm": (
        "optimizer.groups[0]='norm' must be a section with keys match, learning_rate_factor, weight_decay"
    ),
    'optimizer.groups=[{"match":"norm","weight_decay":-1}]': (
        "optimizer.groups[0].weight_decay=-1.0 must be at least 0 (or null)"
    ),
    "optimizer.momentum=0.9": (
        "optimizer.momentum=0.9 is of optimizer muon, and optimizer.name=adamw: set optimizer.name=muon, or "
        "optimizer.momentum=0.95"
    ),
    "optimizer.name=lion optimizer.eps=1e-6": (
        "optimizer.eps=1e-06 is of optimizer adamw and muon, and optimizer.name=lion: set optimizer.name=adamw, or "
        "optimizer.eps=1e-08"
    ),
    "optimizer.ema_decay=1": "optimizer.ema_decay=1.0 must be at least 0 and below 1",
    "optimizer.qk_clip=0": "optimizer.qk_clip=0.0 must be above 0 (or null)",
    "optimizer.qk_clip=100 model.qk_norm=true": (
        "optimizer.qk_clip=100.0 scales weights of queries and keys, and the model has model.qk_norm=true, whose norms "
        "make logits independent of the size of these weights: use optimizer.qk_clip=null"
    ),
    "optimizer.qk_clip=100 model.qk_l2_norm=true": (
        "optimizer.qk_clip=100.0 scales weights of queries and keys, and the model has model.qk_l2_norm=true, whose "
        "norms make logits independent of the size of these weights: use optimizer.qk_clip=null"
    ),
    "optimizer.qk_clip=100 model.mamba.num_heads=4": (
        "optimizer.qk_clip=100.0 scales weights of queries and keys, and the model has model.mamba.num_heads=4, which "
        "has no logits: use optimizer.qk_clip=null"
    ),
    "optimizer.beta2=1": "optimizer.beta2=1.0 must be at least 0 and below 1",
    "optimizer.final_fraction=1.5": "optimizer.final_fraction=1.5 must be at most 1",
    "data.validation_fraction=1": "data.validation_fraction=1.0 must lie between 0 and 1",
    "data.path=": "data.path is empty: name a .txt, .jsonl, .parquet or .array_record file, or a prepared folder",
    "data.tokenizer=": "data.tokenizer is empty: use bytes, or name a folder with a tokenizer.json",
    "data.text_key=": "data.text_key is empty: name the field or column with the text",
    "data.path=null": (
        "data.path=null and data.sources=[] name no text: "
        "name a .txt, .jsonl, .parquet or .array_record file, or a prepared folder by data.path"
    ),
    'data.path=x.txt data.sources=[{"path":"a","weight":1}]': (
        "data.path=x.txt and data.sources are both set: use data.path=null to train on the sources, or "
        "data.sources=[] to train on the path"
    ),
    'data.path=configs/text/shakespeare.txt data.sources=[{"path":"a","weight":1}]': (
        "data.path=configs/text/shakespeare.txt and data.sources are both set: use data.path=null to train on the "
        "sources, or data.sources=[] to train on the path"
    ),
    **{
        f"data.sources=[{given}]": message
        for given, message in (
            ('{"path":"a"}', "data.sources[0] has no weight: set it, as in {weight: …}"),
            ('{"weight":1}', "data.sources[0] has no path: set it, as in {path: …}"),
            ("a", "data.sources[0]='a' must be a section with keys path, weight, weight_schedule, name"),
            (
                '{"path":"","weight":1}',
                "data.sources[0].path is empty: name a .txt, .jsonl, .parquet or .array_record file, or a prepared "
                "folder",
            ),
            (
                '{"path":"a","weight":1,"name":""}',
                "data.sources[0].name is empty: give it a name for metrics, or null",
            ),
            (
                '{"path":"a","weight":1,"name":"web/en"}',
                "data.sources[0].name=web/en must have letters, digits and . _ - + ~ only, as a name in metrics: use "
                "web_en",
            ),
            (
                '{"path":"x/my:text.jsonl","weight":1}',
                "data.sources[0].path=x/my:text.jsonl gives metrics the name 'my:text', which must have letters, "
                "digits and . _ - + ~ only: set data.sources[0].name=my_text",
            ),
            (
                '{"path":"a","weight":1,"weight_schedule":[10,0.5]}',
                "data.sources[0].weight_schedule=[10, 0.5] must be a list of pairs of a step and a weight: write "
                "[[10, 0.5]]",
            ),
            (
                '{"path":"a","weight":1,"weight_schedule":[10]}',
                "data.sources[0].weight_schedule=[10] must be a list of pairs of a step and a weight: write "
                "[[1000, 0.5], [5000, 2]]",
            ),
            ('{"path":"a","weight":-1}', "data.sources[0].weight=-1.0 must be at least 0"),
            ('{"path":"a","weight":.inf}', "data.sources[0].weight=inf must be a finite number"),
            ('{"path":"a","weight":0}', "data.sources has no weight above 0 in step 1: set that of a source"),
            (
                '{"path":"a","weight":1,"weight_schedule":[[9,0]]}',
                "data.sources has no weight above 0 in step 9: set that of a source",
            ),
            (
                '{"path":"a","weight":1,"weight_schedule":[[5,-2]]}',
                "data.sources[0].weight_schedule=[[5.0, -2.0]] has [5.0, -2.0]: use pairs of a step, from 1 on and "
                "growing, and a weight from 0 up to 1000000, as in [[1000, 0.5], [5000, 2]]",
            ),
            (
                '{"path":"x/a.txt","weight":1},{"path":"y/a","weight":1}',
                "data.sources[0] and data.sources[1] both have the name a in metrics: set data.sources[1].name",
            ),
            (
                '{"path":"ftp://x/y","weight":1}',
                "data.sources[0].path=ftp://x/y is a URL, and only gs://BUCKET/NAME, s3://BUCKET/NAME and paths on "
                "this machine (or mounted there) are read and written: name one",
            ),
        )
    },
    "checkpoint.safety_copies_dir=": "checkpoint.safety_copies_dir is empty: name a folder in memory, e.g. /dev/shm",
    "checkpoint.safety_copies_every=2 checkpoint.resume=false": (
        "checkpoint.safety_copies_every=2 makes copies to resume from, which checkpoint.resume=false refuses: use "
        "checkpoint.resume=true, or checkpoint.safety_copies_every=0"
    ),
    "log.dir=https://bucket/run": (
        "log.dir=https://bucket/run is a URL, and only gs://BUCKET/NAME, s3://BUCKET/NAME and paths on this machine "
        "(or mounted there) are read and written: name one"
    ),
    "log.dir=gs://bucket": (
        "log.dir=gs://bucket names a whole bucket: name a folder or a file in it, as in gs://bucket/NAME"
    ),
    "tune.cache=gs://bucket/x": (
        "tune.cache=gs://bucket/x is a URL, and this is read and written on this machine (or mounted there) only: name "
        "a path there"
    ),
    "log.dir=": "log.dir is empty: name the folder that receives the run",
    "log.trace_step=1": "log.trace_step=1 must be at least 2 (or null)",
    "log.trace_step=[9,3]": (
        "log.trace_step=[9, 3] must be a step, or the first and the last of several, e.g. [10, 13] (or null)"
    ),
    "train.steps=4 log.trace_step=5": (
        "log.trace_step=5 is never reached with train.steps=4: use 5 steps or more, or null"
    ),
    "schedule.profile_steps=3 model.moe.capacity_schedule=[[5,1.5]]": (
        "schedule.profile_steps=3 measures one program, and model.moe.capacity_schedule changes it: use "
        "schedule.profile_steps=0, or drop the other"
    ),
    "schedule.profile_steps=101": "schedule.profile_steps=101 must be at most 100",
    "log.wandb_project=": "log.wandb_project is empty: name a project, or null",
    "log.goodput_job=": "log.goodput_job is empty: name a job, or null",
    "train.grouped_product=blocks+pallas": (
        "train.grouped_product=blocks+pallas must be auto or blocks or ragged or pallas or hopper or blackwell or "
        "megablox or tokamax, or three of them joined by +, as in blocks+ragged+pallas"
    ),
    **{
        f"train.{name}_routing={words}": f"train.{name}_routing={message}"
        for name in ("record", "replay")
        for words, message in (
            (
                "x model.moe.num_experts=0",
                f"x is for routers, and model.moe.num_experts=0: use train.{name}_routing=null",
            ),
            (
                "x mesh.pipeline=2",
                "x is not for pipelines, and mesh.pipeline=2: use mesh.pipeline=1 without coscheduled passes",
            ),
            (
                "x model.moe.gate=expert_choice",
                "x is for tokens that choose experts, and model.moe.gate=expert_choice lets experts choose: use "
                f"another gate, or train.{name}_routing=null",
            ),
        )
    },
    **{
        f"train.{name}_routing=": f"train.{name}_routing is empty: name a folder, or null"
        for name in ("record", "replay")
    },
    "train.replay_routing=x model.moe.gate=hash": (
        "train.replay_routing=x needs a gate with a bias on its choice, and model.moe.gate=hash has none: use "
        "model.moe.gate=softmax, sigmoid or deepseek_v3"
    ),
    "train.replay_routing=x train.record_routing=x": (
        "train.replay_routing=x would be replaced by train.record_routing=x: use two folders"
    ),
    "train.skip_spikes=true": (
        "train.skip_spikes=true skips what train.spike_factor=null does not name: give a factor, e.g. "
        "train.spike_factor=3, or use train.skip_spikes=false"
    ),
    "model.hidden_size=50 model.num_attention_heads=4": (
        "model.hidden_size=50 is not divisible by model.num_attention_heads=4: use 1, 2, 5, 10, 25 or 50 heads, or "
        "set model.head_dim"
    ),
    "model.hidden_size=60 model.num_attention_heads=7": (
        "model.hidden_size=60 is not divisible by model.num_attention_heads=7: use 1, 2, 3, 4, 5 … or 60 heads, or "
        "set model.head_dim"
    ),
    "model.hidden_size=36 model.num_attention_heads=4": (
        "a head width of 9 is odd, and rotary embedding turns pairs: set an even model.head_dim"
    ),
    "model.latent.q_lora_rank=8": (
        "model.latent.q_lora_rank=8 without model.latent.kv_lora_rank: set both, or model.latent.q_lora_rank=null"
    ),
    "model.latent.kv_lora_rank=8 model.latent.qk_rope_head_dim=3": (
        "model.latent.qk_rope_head_dim=3 is odd, and rotary embedding turns pairs: use an even number"
    ),
    "model.latent.kv_lora_rank=8 model.qk_norm=true": (
        "model.qk_norm=true is not for latent attention (model.latent.kv_lora_rank=8): "
        "set model.qk_norm=false, or model.latent.kv_lora_rank=null"
    ),
    "model.latent.kv_lora_rank=8 model.partial_rotary_factor=0.5": (
        "model.partial_rotary_factor=0.5 is not for latent attention (model.latent.kv_lora_rank=8): "
        "set model.partial_rotary_factor=1.0, or model.latent.kv_lora_rank=null"
    ),
    **{
        f"model.latent.{name}={value}": (
            f"model.latent.{name}={value} is for latent attention: set model.latent.kv_lora_rank, or "
            f"model.latent.{name}={unset}"
        )
        for name, value, unset in (
            ("qk_nope_head_dim", 64, 128),
            ("qk_rope_head_dim", 32, 64),
            ("v_head_dim", 64, 128),
            ("rms_norm_eps", 0.5, "null"),
        )
    },
    "model.latent.kv_lora_rank=8 model.qk_norm_after_rope=true": (
        "model.qk_norm_after_rope=true is not for latent attention (model.latent.kv_lora_rank=8): "
        "set model.qk_norm_after_rope=false, or model.latent.kv_lora_rank=null"
    ),
    "model.qk_norm_over=projection": (
        "model.qk_norm_over=projection without norms of queries and keys: set model.qk_norm=true, or "
        "model.qk_norm_over=head"
    ),
    "model.attention.out_bias=false": (
        "model.attention.out_bias=false leaves out one of the biases that model.attention.bias=false does not have: "
        "set model.attention.bias=true, or model.attention.out_bias=true"
    ),
    "model.qk_norm_after_rope=true": (
        "model.qk_norm_after_rope=true without norms: set model.qk_norm=true, or model.qk_norm_after_rope=false"
    ),
    "model.head_dim=8 model.partial_rotary_factor=0.4": (
        "model.partial_rotary_factor=0.4 rotates 3 of a head's 8 features, and rotary embedding turns pairs: use a "
        "factor that rotates an even number, 2 or more"
    ),
    "model.latent.kv_lora_rank=8 model.attention.output_gate=true": (
        "model.attention.output_gate=true is not for latent attention (model.latent.kv_lora_rank=8): "
        "set model.attention.output_gate=false, or model.latent.kv_lora_rank=null"
    ),
    "model.delta_net.num_value_heads=6 model.delta_net.num_key_heads=4": (
        "model.delta_net.num_key_heads=4 does not divide model.delta_net.num_value_heads=6: use 1, 2, 3 or 6"
    ),
    "model.delta_net.num_key_heads=4": (
        "model.delta_net.num_key_heads=4 without model.delta_net.num_value_heads: set both, or "
        "model.delta_net.num_key_heads=null"
    ),
    "model.delta_net.full_attention_interval=null": (
        "model.delta_net.full_attention_interval=null without model.delta_net.num_value_heads: set both, or "
        "model.delta_net.full_attention_interval=4"
    ),
    "model.delta_net.num_value_heads=4 model.delta_net.full_attention_interval=1": (
        "model.delta_net.full_attention_interval=1 must be at least 2 (or null)"
    ),
    "model.delta_net.num_value_heads=4 mesh.context=2": (
        "model.delta_net.num_value_heads=4 and mesh.context=2: the states of gated delta nets do not travel between "
        "context ranks: use mesh.context=1, or model.delta_net.num_value_heads=null"
    ),
    "model.delta_net.num_value_heads=6 model.delta_net.num_key_heads=3 mesh.tensor=2": (
        "model.delta_net.num_key_heads=3 is not divisible by mesh.tensor=2: use 2 or 4, or mesh.tensor=1"
    ),
    "model.mamba.num_heads=4 model.delta_net.num_value_heads=6": (
        "model.mamba.num_heads=4 and model.delta_net.num_value_heads=6 are two kinds of recurrent layers: use "
        "model.mamba.num_heads=null, or model.delta_net.num_value_heads=null"
    ),
    "model.mamba.num_heads=6 model.mamba.n_groups=4": (
        "model.mamba.n_groups=4 does not divide model.mamba.num_heads=6: use 1, 2, 3 or 6"
    ),
    "model.mamba.d_state=16": (
        "model.mamba.d_state=16 without model.mamba.num_heads: set both, or model.mamba.d_state=128"
    ),
    "model.mamba.attn_layer_offsets=[1,2]": (
        "model.mamba.attn_layer_offsets=[1, 2] without model.mamba.num_heads: set both, or "
        "model.mamba.attn_layer_offsets=[]"
    ),
    "model.mamba.num_heads=4 model.mamba.attn_layer_offsets=[1]": (
        "model.mamba.attn_layer_offsets=[1] without model.mamba.attn_layer_period: set both, or "
        "model.mamba.attn_layer_offsets=[]"
    ),
    "model.mamba.num_heads=4 model.mamba.attn_layer_period=3": (
        "model.mamba.attn_layer_offsets=[] with model.mamba.attn_layer_period=3: use some places from 0 to 2 in "
        "growing order, model.mamba.attn_layer_period=null for attention in no block, or model.mamba.num_heads=null "
        "for attention in all"
    ),
    "model.mamba.num_heads=4 model.mamba.attn_layer_period=2 model.mamba.attn_layer_offsets=[0,2]": (
        "model.mamba.attn_layer_offsets=[0, 2] with model.mamba.attn_layer_period=2: use some places from 0 to 1 in "
        "growing order, model.mamba.attn_layer_period=null for attention in no block, or model.mamba.num_heads=null "
        "for attention in all"
    ),
    "model.mamba.mixer_only_offsets=[0]": (
        "model.mamba.mixer_only_offsets=[0] without model.mamba.num_heads: set both, or "
        "model.mamba.mixer_only_offsets=[]"
    ),
    "model.mamba.num_heads=4 model.mamba.mixer_only_offsets=[0]": (
        "model.mamba.mixer_only_offsets=[0] without model.mamba.attn_layer_period: set both, or "
        "model.mamba.mixer_only_offsets=[]"
    ),
    "model.mamba.num_heads=4 model.mamba.attn_layer_period=2 model.mamba.mixer_only_offsets=[1,0]": (
        "model.mamba.mixer_only_offsets=[1, 0] with model.mamba.attn_layer_period=2: use places from 0 to 1 in growing "
        "order"
    ),
    "model.mamba.num_heads=4 model.mamba.attn_layer_period=2 model.mamba.mixer_only_offsets=[0,1]": (
        "model.mamba.mixer_only_offsets=[0, 1] leaves experts in none of the 4 blocks: use fewer places, or "
        "model.moe.num_experts=0 for a model without experts"
    ),
    "model.mamba.num_heads=4 mesh.context=2": (
        "model.mamba.num_heads=4 and mesh.context=2: the states of Mamba-2 do not travel between context ranks: use "
        "mesh.context=1, or model.mamba.num_heads=null"
    ),
    "model.mamba.num_heads=6 model.mamba.n_groups=3 mesh.tensor=2": (
        "model.mamba.n_groups=3 is not divisible by mesh.tensor=2: use 2 or 4, or mesh.tensor=1"
    ),
    "model.latent.kv_lora_rank=8 model.head_dim=4": (
        "model.head_dim=4 is not for latent attention (model.latent.kv_lora_rank=8): "
        "set model.head_dim=null, or model.latent.kv_lora_rank=null"
    ),
    "model.attention.full_every=2": (
        "model.attention.full_every=2 excepts blocks from a window that there is not: "
        "set model.attention.sliding_window or model.attention.chunk_size, or model.attention.full_every=null"
    ),
    "model.num_attention_heads=4 model.num_key_value_heads=3": (
        "model.num_key_value_heads=3 does not divide model.num_attention_heads=4: use 1, 2 or 4"
    ),
    "train.compute_dtype=float32 train.attention_kernel=cudnn": (
        "train.attention_kernel=cudnn computes in bfloat16, and train.compute_dtype=float32: "
        "use train.attention_kernel=auto"
    ),
    "train.compute_dtype=float32 train.attention_kernel=splash": (
        "train.attention_kernel=splash computes in bfloat16, and train.compute_dtype=float32: "
        "use train.attention_kernel=auto"
    ),
    "train.attention_kernel=splash data.seq_len=1000": (
        "train.attention_kernel=splash has sequences of multiples of 128 tokens, and data.seq_len=1000: "
        "use train.attention_kernel=auto"
    ),
    "train.attention_kernel=splash model.head_dim=512": (
        "train.attention_kernel=splash has heads of up to 256 features, and this model's have 512: "
        "use train.attention_kernel=auto"
    ),
    "train.attention_kernel=cudnn model.attention.sinks=true": (
        "train.attention_kernel=cudnn has no sinks, and model.attention.sinks=true: use train.attention_kernel=auto"
    ),
    "train.attention_kernel=cudnn mesh.data=1 mesh.context=2": (
        "train.attention_kernel=cudnn sees the tokens of one rank, and mesh.context=2: use train.attention_kernel=auto"
    ),
    "train.attention_kernel=cudnn model.head_dim=36": (
        "train.attention_kernel=cudnn has heads of up to 256 features, multiples of 8, and this model's have 36 and "
        "36: use train.attention_kernel=auto"
    ),
    "train.attention_kernel=cudnn model.latent.kv_lora_rank=8 model.latent.v_head_dim=256": (
        "train.attention_kernel=cudnn has values no wider than keys, and this model's have 256 and 192: "
        "use train.attention_kernel=auto"
    ),
    "train.init_from=": "train.init_from is empty: name a folder, or null",
    "train.upcycle=true": (
        "train.upcycle=true needs a dense model to begin with: set train.init_from, or train.upcycle=false"
    ),
    "train.upcycle=true train.init_from=hf model.moe.num_experts=0": (
        "train.upcycle=true makes experts, and model.moe.num_experts=0: set it, or train.upcycle=false"
    ),
    "model.rope_scaling.factor=4": (
        "model.rope_scaling.factor=4.0 without a kind of scaling: set model.rope_scaling.rope_type=yarn, linear or "
        "llama3, "
        "or model.rope_scaling.factor=1.0"
    ),
    **{
        f"model.rope_scaling.{name}={value}": (
            f"model.rope_scaling.{name}={value} without a kind of scaling: set model.rope_scaling.rope_type=yarn, "
            f"linear or llama3, or model.rope_scaling.{name}={unset}"
        )
        for name, value, unset in (
            ("original_max_position_embeddings", 8192, 4096),
            ("slow_turns", 2.0, 1.0),
            ("fast_turns", 16.0, 32.0),
            ("truncate", "false", "true"),
        )
    },
    "model.rope_scaling.short_factor=[1,2]": (
        "model.rope_scaling.short_factor is of model.rope_scaling.rope_type=longrope, which is none: set that, or "
        "model.rope_scaling.short_factor=[]"
    ),
    "model.rope_scaling.rope_type=yarn model.rope_scaling.long_factor=2": (
        "model.rope_scaling.long_factor is of model.rope_scaling.rope_type=longrope, which is yarn: set that, or "
        "model.rope_scaling.long_factor=[]"
    ),
    "model.head_dim=4 model.rope_scaling.rope_type=longrope model.rope_scaling.short_factor=[1,2]": (
        "model.rope_scaling.long_factor has 0 numbers, and model.rope_scaling.rope_type=longrope scales 2 pairs of "
        "features: use 2"
    ),
    "model.head_dim=4 model.rope_scaling.rope_type=longrope model.rope_scaling.short_factor=[1,0]": (
        "model.rope_scaling.short_factor[1]=0.0 must be above 0"
    ),
    "model.attention.chunk_size=0": "model.attention.chunk_size=0 must be at least 1 (or null)",
    "model.attention.chunk_size=4 model.attention.sliding_window=4": (
        "model.attention.chunk_size=4 and model.attention.sliding_window=4 both limit what a token attends to: set one "
        "of them to null"
    ),
    "model.attention.attn_scale=0.1": (
        "model.attention.attn_scale=0.1 is for blocks without rotary embedding: set model.attention.nope_every, or "
        "model.attention.attn_scale=0"
    ),
    "model.attention.floor_scale=4": (
        "model.attention.floor_scale=4 is of model.attention.attn_scale: set both, or model.attention.floor_scale=8192"
    ),
    "model.qk_l2_norm=true model.qk_norm=true": (
        "model.qk_l2_norm=true and model.qk_norm=true are two norms of queries and keys: use one of them"
    ),
    "model.latent.kv_lora_rank=8 model.qk_l2_norm=true": (
        "model.qk_l2_norm=true is not for latent attention (model.latent.kv_lora_rank=8): set model.qk_l2_norm=false, "
        "or model.latent.kv_lora_rank=null"
    ),
    "model.moe.apply_probs_on_input=true": (
        "model.moe.apply_probs_on_input=true is for tokens that choose one expert each, and model.moe.top_k=2: use "
        "model.moe.top_k=1, or model.moe.apply_probs_on_input=false"
    ),
    "model.moe.apply_probs_on_input=true model.moe.top_k=1 model.moe.gate=softmoe": (
        "model.moe.apply_probs_on_input=true is for tokens that choose one expert each, and model.moe.gate=softmoe: "
        "use model.moe.gate=sigmoid, or model.moe.apply_probs_on_input=false"
    ),
    "model.attention.chunk_size=8 train.attention_kernel=cudnn train.compute_dtype=bfloat16": (
        "train.attention_kernel=cudnn has no chunks, and model.attention.chunk_size=8 is below data.seq_len=256: use "
        "train.attention_kernel=auto"
    ),
    "model.normalization=layernorm model.rms_norm_zero_centered=true": (
        "model.rms_norm_zero_centered=true is for RMSNorms, and model.normalization=layernorm: use "
        "model.rms_norm_zero_centered=false, or model.normalization=rmsnorm"
    ),
    "model.normalization=layernorm model.num_nextn_predict_layers=1": (
        "model.num_nextn_predict_layers=1 has RMSNorms, and model.normalization=layernorm: use "
        "model.num_nextn_predict_layers=0, or model.normalization=rmsnorm"
    ),
    "model.rope_scaling.rope_type=llama3 model.rope_scaling.slow_turns=33": (
        "model.rope_scaling.slow_turns=33.0 must be at most model.rope_scaling.fast_turns=32.0"
    ),
    "model.rope_scaling.rope_type=yarn model.rope_scaling.mscale_all_dim=1": (
        "model.rope_scaling.mscale_all_dim=1.0 is for latent attention: "
        "set model.latent.kv_lora_rank, or model.rope_scaling.mscale_all_dim=0"
    ),
    "model.moe.norm_top1_prob=true": (
        "model.moe.norm_top1_prob=true has no effect with model.moe.top_k=2: use model.moe.top_k=1, or "
        "model.moe.norm_top1_prob=false"
    ),
    "model.moe.norm_top1_prob=true model.moe.top_k=1 model.moe.norm_topk_prob=false": (
        "model.moe.norm_top1_prob=true has no effect with model.moe.norm_topk_prob=false: use "
        "model.moe.norm_topk_prob=true, or model.moe.norm_top1_prob=false"
    ),
    "model.moe.norm_top1_prob=true model.moe.top_k=1 model.moe.gate=expert_choice": (
        "model.moe.norm_top1_prob=true has no effect with model.moe.gate=expert_choice: use model.moe.gate=softmax, "
        "or model.moe.norm_top1_prob=false"
    ),
    "model.moe.shared_gate=true": (
        "model.moe.shared_gate=true without shared experts: set model.moe.num_shared_experts, or "
        "model.moe.shared_gate=false"
    ),
    "model.moe.num_experts=4 model.moe.top_k=5": "model.moe.top_k=5 must be 1..model.moe.num_experts=4",
    "model.num_layers=4 model.moe.first_k_dense_replace=4": (
        "model.moe.first_k_dense_replace=4 leaves none of model.num_layers=4 for experts: "
        "use 0..3, or model.moe.num_experts=0 for a dense model"
    ),
    "model.num_layers=4 model.moe.first_k_dense_replace=2 model.moe.moe_layer_freq=3": (
        "model.moe.moe_layer_freq=3 puts experts in none of the 2 blocks: use 1..2, or model.moe.num_experts=0 for a "
        "dense model"
    ),
    "mesh.data=0": "mesh.data=0 must be at least 1, or -1 for all remaining devices",
    "mesh.expert=-2": "mesh.expert=-2 must be at least 1, or -1 for all remaining devices",
    "mesh.data=1 mesh.pipeline=-1": "mesh.pipeline=-1 leaves open which blocks a stage holds: use a number of stages",
    "schedule.virtual_stages=2": (
        "schedule.virtual_stages=2 cuts the blocks of pipeline stages, and mesh.pipeline=1: "
        "set mesh.pipeline, or schedule.virtual_stages=1"
    ),
    "schedule.head_blocks=1": (
        "schedule.head_blocks=1 takes blocks from the last pipeline stage, and mesh.pipeline=1: "
        "set mesh.pipeline, or schedule.head_blocks=0"
    ),
    "mesh.pipeline=2 schedule.virtual_stages=2": (
        "schedule.virtual_stages=2 is not for schedule.pipeline=1f1b, whose stages hold one group of blocks: "
        "use schedule.pipeline=interleaved or coscheduled or coscheduled_split, or schedule.virtual_stages=1"
    ),
    "mesh.pipeline=2 schedule.pipeline=interleaved": (
        "schedule.virtual_stages=1 leaves nothing to interleave with schedule.pipeline=interleaved: "
        "use schedule.virtual_stages=2 or more, or schedule.pipeline=1f1b"
    ),
    "mesh.pipeline=4 schedule.pipeline=interleaved schedule.virtual_stages=2 train.grad_accumulation=6": (
        "train.grad_accumulation=6 (the pipeline's microbatches) is not divisible by mesh.pipeline=4, "
        "which schedule.virtual_stages=2 needs: use 4 or 8"
    ),
    "schedule.remat=chunk": (
        "schedule.remat=chunk repeats a model chunk's forward pass in its backward pass, which stages run, and "
        "mesh.pipeline=1: use schedule.remat=full"
    ),
    "mesh.pipeline=2 schedule.pipeline=zero_bubble schedule.remat=chunk": (
        "schedule.remat=chunk repeats a model chunk's forward pass in its backward pass, and the weight gradients of "
        "schedule.pipeline=zero_bubble are passes after it: use schedule.remat=full, or schedule.pipeline=1f1b"
    ),
    "mesh.pipeline=2 exchange.algorithm=ring": (
        "exchange.algorithm=ring sends from rank to rank, which waits for the devices of all mesh.pipeline=2 stages: "
        "use exchange.algorithm=flat or hier_2d"
    ),
    "mesh.pipeline=2 exchange.reduction=ring": (
        "exchange.reduction=ring is not for the ticks of schedule.pipeline=1f1b, after which gradients are summed: "
        "use exchange.reduction=all_reduce"
    ),
    "mesh.pipeline=2 schedule.grad_reduce=block": (
        "schedule.grad_reduce=block is not for the ticks of schedule.pipeline=1f1b, after which gradients are summed: "
        "use schedule.grad_reduce=end"
    ),
    "schedule.pipeline=gpipe": (
        "schedule.pipeline=gpipe orders what pipeline stages do, and mesh.pipeline=1: "
        "set mesh.pipeline, or schedule.pipeline=1f1b"
    ),
    "schedule.pipeline=coscheduled": (
        "schedule.pipeline=coscheduled without stages runs parts of a batch concurrently, and "
        "train.grad_accumulation=1: use train.grad_accumulation=2 or more, or schedule.pipeline=1f1b"
    ),
    "mesh.pipeline=2 mesh.context=2": (
        "exchange.context_form=ring sends from rank to rank, which waits for the devices of all mesh.pipeline=2 "
        "stages: use exchange.context_form=all_gather, or mesh.context=1"
    ),
    "mesh.data=1 mesh.context=3": (
        "data.seq_len=256 is not divisible into two pieces for each of mesh.context=3: "
        "use 252 or 258, or mesh.context=1, 2, 4, 8, 16 … or 128"
    ),
    "mesh.context=4 mesh.tensor=4 data.seq_len=24": (
        "data.seq_len=24 is not divisible into two pieces for each of mesh.context=4 × mesh.tensor=4: "
        "use 16 or 32, or mesh.context=1, 2, 3 or 6"
    ),
    "mesh.tensor=4 model.num_key_value_heads=2": (
        "model.num_key_value_heads=2 is not divisible by mesh.tensor=4: use 4, or mesh.tensor=1 or 2"
    ),
    "mesh.tensor=2 exchange.algorithm=ragged schedule.policy=unified": (
        "exchange.algorithm=ragged knows no tensor ranks, and mesh.tensor=2: "
        "use exchange.algorithm=flat, mesh.experts_over_tensor=true, or mesh.tensor=1"
    ),
    "mesh.expert=-1": (
        "mesh.data and mesh.expert are both -1, and only one axis can take the remaining devices: set mesh.data=1"
    ),
    "model.moe.num_experts=6 mesh.expert=4": (
        "model.moe.num_experts=6 is not divisible by mesh.expert=4: use 4 or 8 experts, or mesh.expert=1, 2, 3 or 6"
    ),
    "model.moe.num_experts=2 mesh.expert=4": (
        "model.moe.num_experts=2 is not divisible by mesh.expert=4: use 4 experts, or mesh.expert=1 or 2"
    ),
    "model.moe.num_experts=0 mesh.expert=2": (
        "mesh.expert=2 has no experts to hold (model.moe.num_experts=0): set mesh.expert=1"
    ),
    "model.moe.num_experts=4 mesh.expert=2 mesh.context=4 mesh.experts_over_context=true": (
        "model.moe.num_experts=4 is not divisible by mesh.context=4 × mesh.expert=2: use 8 experts, or mesh.expert=1"
    ),
    "model.moe.num_experts=6 mesh.expert=3 mesh.context=4 mesh.experts_over_context=true": (
        "model.moe.num_experts=6 is not divisible by mesh.context=4 × mesh.expert=3: "
        "use 12 experts, or mesh.experts_over_context=false"
    ),
    "mesh.experts_over_tensor=true": (
        "mesh.experts_over_tensor=true cuts experts over tensor ranks, and mesh.tensor=1: "
        "use mesh.tensor=2 or more, or mesh.experts_over_tensor=false"
    ),
    "model.moe.num_experts=0 mesh.tensor=2 mesh.experts_over_tensor=true": (
        "mesh.experts_over_tensor=true has no experts to cut (model.moe.num_experts=0): "
        "set mesh.experts_over_tensor=false"
    ),
    "model.moe.num_experts=6 mesh.expert=2 mesh.tensor=2 mesh.experts_over_tensor=true": (
        "model.moe.num_experts=6 is not divisible by mesh.expert=2 × mesh.tensor=2: "
        "use 4 or 8 experts, or mesh.expert=1 or 3"
    ),
    "exchange.tensor_form=sharded_scheduled": (
        "exchange.tensor_form=sharded_scheduled makes gathers over tensor ranks tasks of a schedule, and this step "
        "has none: use schedule.policy=unified schedule.microbatches=2, or exchange.tensor_form=sharded"
    ),
    "mesh.tensor=2 mesh.experts_over_tensor=true exchange.tensor_form=sharded_chunked": (
        "exchange.tensor_form=sharded_chunked is how tensor ranks share each expert, and with "
        "mesh.experts_over_tensor=true they share none: use exchange.tensor_form=sharded"
    ),
    "mesh.experts_over_context=true": (
        "mesh.experts_over_context=true cuts experts over context ranks, and mesh.context=1: "
        "use mesh.context=2 or more, or mesh.experts_over_context=false"
    ),
    "model.moe.num_experts=0 mesh.context=2 mesh.experts_over_context=true": (
        "mesh.experts_over_context=true has no experts to cut (model.moe.num_experts=0): "
        "set mesh.experts_over_context=false"
    ),
    "mesh.expert=2 mesh.context=2 mesh.experts_over_context=true exchange.ranks_per_node=3": (
        "exchange.ranks_per_node=3 does not divide mesh.context=2 × mesh.expert=2: use 1, 2 or 4"
    ),
    "train.batch_size=30": (
        "train.batch_size=30 is not divisible by train.grad_accumulation=1 × 4 devices (data × expert) = 4: "
        "use 28 or 32"
    ),
    "train.batch_size=4 train.grad_accumulation=2": (
        "train.batch_size=4 is not divisible by train.grad_accumulation=2 × 4 devices (data × expert) = 8: use 8"
    ),
    "schedule.policy=unified schedule.microbatches=4 schedule.backward_microbatches=3": (
        "schedule.backward_microbatches=3 cannot be made of schedule.microbatches=4: use 1, 2 or 4"
    ),
    "optimizer.zero_axes=[expert]": (
        "optimizer.zero_axes=[expert] is where optimizer.zero shards, and optimizer.zero=0 shards nothing: "
        "use optimizer.zero=1, 2 or 3, or optimizer.zero_axes=null"
    ),
    "optimizer.zero=3 optimizer.zero_axes=[]": (
        "optimizer.zero_axes=[] shards over nothing: name a mesh axis, or use null for all axes"
    ),
    "optimizer.zero=3 optimizer.zero_axes=[data,data]": (
        "optimizer.zero_axes=[data, data] has data twice: name each axis once"
    ),
    "optimizer.zero=3 optimizer.zero_axes=[tensor] mesh.data=2 mesh.expert=4": (
        "optimizer.zero_axes=[tensor] shards over nothing, since this mesh has one rank along it: "
        "use optimizer.zero_axes=[data, expert], or null for all axes"
    ),
    "optimizer.zero=3 optimizer.zero_axes=[tensor,context] mesh.data=2 mesh.expert=4": (
        "optimizer.zero_axes=[tensor, context] shards over nothing, since this mesh has one rank along each: "
        "use optimizer.zero_axes=[data, expert], or null for all axes"
    ),
    "schedule.param_gather=block optimizer.zero=1": (
        "schedule.param_gather=block gathers nothing with optimizer.zero=1: "
        "set optimizer.zero=3, or schedule.param_gather=prefetch"
    ),
    "schedule.param_gather=block optimizer.zero=3 mesh.pipeline=2": (
        "schedule.param_gather=block gathers blocks one by one, and a step with pipeline passes gathers all of a stage "
        "at its start: use schedule.param_gather=prefetch"
    ),
    "optimizer.final_fraction=0 optimizer.schedule=constant": (
        "optimizer.final_fraction=0.0 ends a decay, which optimizer.schedule=constant does not have: use "
        "optimizer.schedule=cosine, linear or wsd, or optimizer.final_fraction=0.1"
    ),
    "schedule.bucket_cap_mb=2.5": (
        "schedule.bucket_cap_mb=2.5 cuts nothing with schedule.grad_reduce=end: "
        "set schedule.grad_reduce=bucketed, or schedule.bucket_cap_mb=null"
    ),
    "schedule.policy=expert_pipeline schedule.expert_chunks=2": (
        "schedule.expert_chunks=2 cuts microbatches, which schedule.policy=expert_pipeline does not have: "
        "use schedule.policy=unified, or schedule.microbatches, which cuts slots here"
    ),
    "schedule.policy=unified schedule.expert_chunks=2 exchange.algorithm=ragged": (
        "exchange.algorithm=ragged sends whole microbatches, and schedule.expert_chunks=2 cuts their slots: "
        "use 1, or exchange.algorithm=auto"
    ),
    **{
        f"schedule.policy=unified schedule.microbatches=2 model.moe.gate={gate}": (
            f"model.moe.gate={gate} compares all tokens of a batch, and schedule.microbatches=2 cuts the batch before: "
            "use schedule.policy=expert_pipeline, which cuts after the gate, or another gate"
        )
        for gate in ("batch_prioritised", "expert_choice", "softmoe")
    },
    **{
        f"model.moe.gate={gate} model.moe.capacity_factor=null": (
            f"model.moe.gate={gate} chooses who gets one of few slots, and model.moe.capacity_factor=null limits none: "
            "set model.moe.capacity_factor, or another gate"
        )
        for gate in ("batch_prioritised", "expert_choice")
    },
    **{
        f"model.moe.gate={gate} model.moe.dispatcher=einsum": (
            f"model.moe.gate={gate} fills slots in an order of its own, and model.moe.dispatcher=einsum has another: "
            "use model.moe.dispatcher=sort"
        )
        for gate in ("batch_prioritised", "expert_choice", "softmoe")
    },
    "exchange.algorithm=ragged schedule.policy=unified model.moe.gate=softmoe": (
        "exchange.algorithm=ragged leaves out empty slots, and model.moe.gate=softmoe fills all: "
        "use exchange.algorithm=flat"
    ),
    "model.moe.gate=noisey": (
        "model.moe.gate=noisey must be softmax, sigmoid, gpt_oss, noisy, sparsemixer, xmoe, deepseek_v2, deepseek_v3, "
        "hash, random, batch_prioritised, expert_choice, softmoe or balanced, or package.module:name: did you mean "
        "noisy?"
    ),
    "model.moe.n_group=2": (
        "model.moe.n_group=2 is of gate deepseek_v2 and deepseek_v3, and model.moe.gate=softmax: "
        "set model.moe.gate=deepseek_v3, or model.moe.n_group=1"
    ),
    "model.moe.router_rank=4": (
        "model.moe.router_rank=4 is of gate xmoe, and model.moe.gate=softmax: "
        "set model.moe.gate=xmoe, or model.moe.router_rank=null"
    ),
    "model.moe.router_jitter_noise=0.1": (
        "model.moe.router_jitter_noise=0.1 is of gate sparsemixer, and model.moe.gate=softmax: "
        "set model.moe.gate=sparsemixer, or model.moe.router_jitter_noise=0.01"
    ),
    "model.moe.router_jitter_noise=0": "model.moe.router_jitter_noise=0.0 must be above 0",
    "model.moe.gate=sparsemixer model.moe.norm_topk_prob=false": (
        "model.moe.norm_topk_prob=false has no effect with model.moe.gate=sparsemixer, which never divides weights by "
        "their sum: use model.moe.norm_topk_prob=true, or another gate"
    ),
    "model.moe.gate=sparsemixer model.moe.top_k=1 model.moe.norm_top1_prob=true": (
        "model.moe.norm_top1_prob=true has no effect with model.moe.gate=sparsemixer: use model.moe.gate=softmax, or "
        "model.moe.norm_top1_prob=false"
    ),
    "model.moe.slots_per_expert=4": (
        "model.moe.slots_per_expert=4 is of gate softmoe, and model.moe.gate=softmax: "
        "set model.moe.gate=softmoe, or model.moe.slots_per_expert=1"
    ),
    "optimizer.zero=2 mesh.pipeline=2 train.grad_accumulation=2": (
        "optimizer.zero=2 sums each part of a batch, which is not for the ticks of schedule.pipeline=1f1b, after "
        "which gradients are summed: use optimizer.zero=1"
    ),
    **{
        f"model.moe.load_balancing_type=sequence model.moe.gate={gate}": (
            f"model.moe.gate={gate} fills all slots alike, and model.moe.load_balancing_type=sequence balances what "
            "each "
            "sequence chose: use model.moe.load_balancing_type=batch, or another gate"
        )
        for gate in ("expert_choice", "softmoe")
    },
    "schedule.pipeline=coscheduled model.moe.load_balancing_type=pooled train.grad_accumulation=2": (
        "model.moe.load_balancing_type=pooled needs the loads of all blocks, and schedule.pipeline=coscheduled keeps a "
        "stage's own: use model.moe.load_balancing_type=batch or sequence"
    ),
    **{
        f"model.moe.capacity_schedule={given}": (
            f"model.moe.capacity_schedule={all_pairs} has {pair}: use pairs of a step, from 1 on and growing, and "
            "a factor above 0 and up to 65536, as in [[1000, 1.5], [5000, 1.0]]"
        )
        for given, all_pairs, pair in (
            ("[[100],[2,3]]", "[[100.0], [2.0, 3.0]]", "[100.0]"),
            ("[[5,2],[5,1]]", "[[5.0, 2.0], [5.0, 1.0]]", "[5.0, 1.0]"),
        )
    },
    "model.moe.capacity_schedule=[100,2,200,1]": (
        "model.moe.capacity_schedule=[100, 2, 200, 1] must be a list of pairs of a step and a factor: write "
        "[[100, 2], [200, 1]]"
    ),
    "model.moe.capacity_schedule=[[5,2]] model.moe.capacity_factor=null": (
        "model.moe.capacity_schedule=[[5.0, 2.0]] changes a capacity that there is not with "
        "model.moe.capacity_factor=null: set another, or model.moe.capacity_schedule=[]"
    ),
    "model.moe.capacity_schedule=[[5,2]] tune.over=algorithm": (
        "tune.over=[algorithm] compares steps, which model.moe.capacity_schedule makes longer or shorter: "
        "use tune.over=[], or model.moe.capacity_schedule=[]"
    ),
    "model.moe.bias_update_rate=0.01 model.moe.gate=noisy": (
        "model.moe.bias_update_rate=0.01 is of gate softmax, sigmoid and deepseek_v3, and model.moe.gate=noisy: "
        "set model.moe.gate=deepseek_v3, or model.moe.bias_update_rate=null"
    ),
    "model.moe.gate=deepseek_v2 model.moe.num_experts=8 model.moe.n_group=3": (
        "model.moe.num_experts=8 is not divisible by model.moe.n_group=3: use 1, 2, 4 or 8 groups"
    ),
    "model.moe.gate=deepseek_v2 model.moe.num_experts=8 model.moe.n_group=2 model.moe.topk_group=3": (
        "model.moe.topk_group=3 must be 1..model.moe.n_group=2"
    ),
    "model.moe.gate=deepseek_v2 model.moe.num_experts=8 model.moe.n_group=4 model.moe.top_k=3": (
        "model.moe.top_k=3 experts are not in model.moe.topk_group=1 of 2 experts each: "
        "use model.moe.topk_group=2 or more, or model.moe.top_k=2 or less"
    ),
    "model.moe.gate=deepseek_v3 model.moe.num_experts=8 model.moe.n_group=8 model.moe.topk_group=2": (
        "model.moe.n_group=8 leaves one expert in each group, and gate deepseek_v3 scores a group by two: "
        "use model.moe.n_group=4 or less, or model.moe.gate=deepseek_v2"
    ),
    "model.moe.expert_matmuls=fp8 model.moe.num_experts=0": (
        "model.moe.expert_matmuls=fp8, and with model.moe.num_experts=0 there are no experts: "
        "set model.moe.num_experts, or model.moe.expert_matmuls=compute_dtype"
    ),
    "migration.enabled=true model.moe.num_experts=0": (
        "migration.enabled=true, and with model.moe.num_experts=0 there are no experts: "
        "set model.moe.num_experts, or migration.enabled=false"
    ),
    "migration.enabled=true mesh.expert=2 model.moe.gate=expert_choice": (
        "migration.enabled=true, and model.moe.gate=expert_choice loads all experts alike: "
        "use another gate, or migration.enabled=false"
    ),
    "migration.enabled=true mesh.expert=2 model.moe.dispatcher=einsum": (
        "migration.enabled=true with model.moe.dispatcher=einsum, which may add up in an order that depends on "
        "where experts are stored: use model.moe.dispatcher=sort, or migration.enabled=false"
    ),
    "migration.enabled=true mesh.expert=1": (
        "migration.enabled=true, and with mesh.expert=1 one rank has all experts: "
        "use mesh.expert=2 or more, or migration.enabled=false"
    ),
    "migration.enabled=true mesh.expert=2 model.moe.capacity_factor=1.5": (
        "migration.enabled=true with model.moe.capacity_factor=1.5, which pads all experts alike, so that no step is "
        "faster after a move: use model.moe.capacity_factor=null, or migration.payback_steps=null to move all the same"
    ),
    "migration.enabled=true mesh.expert=2 migration.payback_steps=null migration.replicas=1": (
        "migration.replicas=1 with model.moe.capacity_factor=1.25, which pads replicas as it pads experts: "
        "use model.moe.capacity_factor=null, or migration.replicas=0"
    ),
    "migration.enabled=true mesh.expert=2 model.moe.capacity_factor=null migration.replicas=2 "
    "optimizer.moments_dtype=bfloat16": (
        "migration.replicas=2 with optimizer.moments_dtype=bfloat16, which rounds the moments of replicas apart: "
        "use optimizer.moments_dtype=float32, or migration.replicas=0"
    ),
    "migration.enabled=true mesh.expert=2 model.moe.capacity_factor=null optimizer.offload_moments=true": (
        "migration.enabled=true with optimizer.offload_moments=true, whose moments would all be on the devices while "
        "experts move: use optimizer.offload_moments=false, or migration.enabled=false"
    ),
    "schedule.offload_activations=true": (
        "schedule.offload_activations=true moves what the loop over blocks of a scheduled step saves, and this step is "
        "plain: use schedule.policy=unified without pipeline stages, or schedule.offload_activations=false"
    ),
    "schedule.offload_activations=true schedule.policy=unified model.num_layers=2": (
        "schedule.offload_activations=true needs a loop of at least 3 iterations, and the longest run of equal "
        "periods of blocks has 2, with schedule.unroll=1: use more layers, a smaller unroll, or "
        "schedule.offload_activations=false"
    ),
    "optimizer.name=other:rule optimizer.offload_moments=true": (
        "optimizer.offload_moments=true updates some blocks of an array at a time, and optimizer.name=other:rule may "
        "need more at once: use a built-in optimizer, or optimizer.offload_moments=false"
    ),
    "optimizer.name=adafactor optimizer.moments_dtype=bfloat16": (
        "optimizer.moments_dtype=bfloat16 is of optimizer adamw, muon and lion, and optimizer.name=adafactor: set "
        "optimizer.name=adamw, or optimizer.moments_dtype=float32"
    ),
    "migration.enabled=true mesh.expert=2 model.moe.capacity_factor=null migration.replicas=2 optimizer.zero=1": (
        "migration.replicas=2 with optimizer.zero=1, which cuts what replicas sum: "
        "use optimizer.zero=0, or migration.replicas=0"
    ),
    "migration.enabled=true mesh.expert=2 model.moe.num_experts=4 model.moe.capacity_factor=null "
    "migration.replicas=4": (
        "migration.replicas=4, and a rank has at most replicas of 3 other ranks' experts with model.moe.num_experts=4: "
        "use migration.replicas=3 or less"
    ),
    "migration.replicas=-1": "migration.replicas=-1 must be at least 0",
    "migration.rank_speeds=[1,0.5]": (
        "migration.rank_speeds=[1, 0.5] places experts by speed, but migration.enabled=false places none: "
        "set migration.enabled=true, or migration.rank_speeds=null"
    ),
    "migration.enabled=true mesh.expert=2 model.moe.capacity_factor=null migration.rank_speeds=[1,0.5,1]": (
        "migration.rank_speeds=[1, 0.5, 1] has 3 speeds, and mesh.expert=2 is 2 expert ranks: use 2 speeds, or "
        "migration.rank_speeds=null if they are equal"
    ),
    "migration.enabled=true mesh.expert=2 model.moe.capacity_factor=null migration.rank_speeds=[1,-0.5]": (
        "migration.rank_speeds=[1, -0.5] has -0.5: use numbers above 0 and up to 1000000, e.g. [1, 0.5]"
    ),
    "migration.enabled=true mesh.expert=2 migration.payback_steps=null migration.rank_speeds=[1,0.5]": (
        "migration.rank_speeds=[1, 0.5] with model.moe.capacity_factor=1.25, which pads the experts of all ranks "
        "alike: use model.moe.capacity_factor=null, or migration.rank_speeds=null"
    ),
    "migration.threshold=0.5": "migration.threshold=0.5 must be at least 1",
    "plan.load_factor=0.9": "plan.load_factor=0.9 must be at least 1",
    "exchange.rank_capacity_factor=0.9": "exchange.rank_capacity_factor=0.9 must be at least 1 (or null)",
    "exchange.hot_experts=-1": "exchange.hot_experts=-1 must be at least 0",
    "exchange.hot_experts=5 mesh.expert=2 model.moe.num_experts=4 model.moe.capacity_factor=null": (
        "exchange.hot_experts=5 is more than model.moe.num_experts=4: use exchange.hot_experts=4 or less"
    ),
    "exchange.hot_experts=1 mesh.expert=2 model.moe.gate=expert_choice": (
        "exchange.hot_experts=1, and model.moe.gate=expert_choice loads all experts alike: use another gate, or "
        "exchange.hot_experts=0"
    ),
    "exchange.hot_experts=1 mesh.expert=2 model.moe.dispatcher=einsum": (
        "exchange.hot_experts=1 with model.moe.dispatcher=einsum, which sends no sorted rows: use "
        "model.moe.dispatcher=sort, or exchange.hot_experts=0"
    ),
    "exchange.hot_experts=1 mesh.expert=2 model.moe.capacity_factor=1.5": (
        "exchange.hot_experts=1 with model.moe.capacity_factor=1.5, which pads all experts alike, so that copies make "
        "no step faster: use model.moe.capacity_factor=null, or exchange.hot_experts=0"
    ),
    "exchange.hot_experts=1 mesh.expert=2 model.moe.capacity_factor=null migration.enabled=true "
    "migration.rank_speeds=[1,0.5]": (
        "exchange.hot_experts=1 with migration.rank_speeds=[1, 0.5]: copies even out loads as if all ranks were "
        "equally fast: use migration.rank_speeds=null, or exchange.hot_experts=0"
    ),
    "exchange.hot_experts=1 mesh.expert=2 model.moe.capacity_factor=null model.moe.hooks=bf16": (
        "exchange.hot_experts=1 with model.moe.hooks=bf16, which change rows that are sent, and rows of copies are "
        "not: use model.moe.hooks=none, or exchange.hot_experts=0"
    ),
    "exchange.hot_experts=1 mesh.expert=1 model.moe.capacity_factor=null": (
        "exchange.hot_experts=1, and with mesh.expert=1 one rank has all experts: use mesh.expert=2 or more, or "
        "exchange.hot_experts=0"
    ),
    "exchange.hot_experts=1 mesh.expert=2 mesh.tensor=2 model.moe.capacity_factor=null": (
        "exchange.hot_experts=1 with mesh.tensor=2, whose ranks share each expert: use mesh.experts_over_tensor=true, "
        "mesh.tensor=1, or exchange.hot_experts=0"
    ),
    "exchange.algorithm=ragged": (
        "exchange.algorithm=ragged sends microbatches, which schedule.policy=vanilla does not have: "
        "use schedule.policy=unified, or exchange.algorithm=auto"
    ),
    "exchange.algorithm=ragged schedule.policy=unified model.moe.capacity_factor=null": (
        "exchange.algorithm=ragged needs model.moe.capacity_factor and model.moe.dispatcher=sort: "
        "set them, or exchange.algorithm=auto"
    ),
    "exchange.algorithm=ragged schedule.policy=unified model.moe.hooks=fp8": (
        "exchange.algorithm=ragged does not call model.moe.hooks=fp8: "
        "use exchange.algorithm=flat, or model.moe.hooks=none"
    ),
    "model.moe.dispatcher=einsun": (
        "model.moe.dispatcher=einsun must be sort or einsum or package.module:name: did you mean einsum?"
    ),
    "exchange.ranks_per_node=0": "exchange.ranks_per_node=0 must be at least 1 (or null)",
    "mesh.expert=4 exchange.ranks_per_node=3": (
        "exchange.ranks_per_node=3 does not divide mesh.expert=4: use 1, 2 or 4"
    ),
    "schedule.microbatches=2": (
        "schedule.microbatches=2 needs a policy that pipelines: use schedule.policy=unified or expert_pipeline "
        "(vanilla runs one microbatch; train.grad_accumulation cuts the batch in time)"
    ),
    "schedule.policy=unified schedule.microbatches=6 schedule.backward_microbatches=4": (
        "schedule.backward_microbatches=4 cannot be made of schedule.microbatches=6: use 1, 2, 3 or 6"
    ),
    "schedule.bucket_cap_mb=2": (
        "schedule.bucket_cap_mb=2.0 cuts nothing with schedule.grad_reduce=end: "
        "set schedule.grad_reduce=bucketed, or schedule.bucket_cap_mb=null"
    ),
    "schedule.policy=expert_pipeline exchange.algorithm=ragged": (
        "exchange.algorithm=ragged sends microbatches, which schedule.policy=expert_pipeline does not have: "
        "use schedule.policy=unified, or exchange.algorithm=auto"
    ),
    "schedule.policy=unified exchange.algorithm=ragged model.moe.dispatcher=einsum": (
        "exchange.algorithm=ragged needs model.moe.capacity_factor and model.moe.dispatcher=sort: "
        "set them, or exchange.algorithm=auto"
    ),
    "schedule.policy=unified tune.over=[microbatches,microbatches]": (
        "tune.over=[microbatches, microbatches] names a setting twice: use each once"
    ),
    "tune.over=[bucket_cap_mb]": (
        "tune.over has bucket_cap_mb, which cuts nothing with schedule.grad_reduce=end: "
        "set schedule.grad_reduce=bucketed, or leave it out"
    ),
    "tune.over=microbatches": (
        "tune.over has microbatches, of which schedule.policy=vanilla has one: "
        "use schedule.policy=unified or expert_pipeline, or leave it out"
    ),
    "tune.over=[algorithm] model.moe.num_experts=0": (
        "tune.over has algorithm, and with model.moe.num_experts=0 nothing is exchanged: "
        "set model.moe.num_experts, or leave it out"
    ),
    "train.batch_size=12 schedule.policy=unified schedule.microbatches=2": (
        "train.batch_size=12 is not divisible by train.grad_accumulation=1 × 4 devices (data × expert) "
        "× schedule.microbatches=2 = 8: use 8 or 16"
    ),
    "schedule.policy=unified schedule.microbatches=1024 model.num_layers=32": (
        "schedule.microbatches=1024 × schedule.expert_chunks=1 × model.num_layers=32 are 32768 tasks of one kind, more "
        "than 16384: use schedule.microbatches=512, or fewer chunks"
    ),
    "model.num_nextn_predict_layers=2": "model.num_nextn_predict_layers=2 must be at most 1",
    "train.mtp_loss_scaling_factor=0.3": (
        "train.mtp_loss_scaling_factor=0.3 is for multi-token prediction, and model.num_nextn_predict_layers=0: set "
        "model.num_nextn_predict_layers=1, or train.mtp_loss_scaling_factor=0.1"
    ),
    "train.mtp_loss_schedule=[[100,0.3]]": (
        "train.mtp_loss_schedule=[[100.0, 0.3]] is for multi-token prediction, and model.num_nextn_predict_layers=0: "
        "set model.num_nextn_predict_layers=1, or train.mtp_loss_schedule=[]"
    ),
    "model.num_nextn_predict_layers=1 train.mtp_loss_schedule=[[9,0.3],[9,0.1]]": (
        "train.mtp_loss_schedule=[[9.0, 0.3], [9.0, 0.1]] has [9.0, 0.1]: use pairs of a step, from 1 on and growing, "
        "and a weight from 0 up to 1000000, as in [[10000, 0.1]]"
    ),
    **{
        f"model.num_nextn_predict_layers=1 train.{name}=record": (
            f"train.{name}=record has the experts of the decoder's blocks, and model.num_nextn_predict_layers=1: use "
            f"model.num_nextn_predict_layers=0, or train.{name}=null"
        )
        for name in ("record_routing", "replay_routing")
    },
    "mesh.pipeline=4 train.grad_accumulation=32768": (
        "mesh.pipeline=4 × train.grad_accumulation=32768 × schedule.virtual_stages=1 are 131072 passes, more than "
        "65536: use train.grad_accumulation=16384 or fewer"
    ),
}
