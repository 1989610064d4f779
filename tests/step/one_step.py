"""One training step from known parameters, by the trainer's own program and by the slow reference."""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.stages import Wrapped

from moe_jax.config import Config, MigrationConfig, ModelConfig, TrainConfig
from moe_jax.config.layer_layout import Stages
from moe_jax.config.yaml_io import load_config
from moe_jax.data.token_marks import PADDING, UNCOUNTED, mark_documents
from moe_jax.models.parameters import in_order, param_shapes
from moe_jax.models.placement import by_expert
from moe_jax.step.expert_placement import slots_of
from moe_jax.step.trainer import Trainer, make_trainer
from tests import references
from tests.compiled import run_checked
from tests.muon_reference import first_update
from tests.numpy_gradients import value_and_grad
from tests.small import tokens_of
from tests.step.gradients import mesh_of, state_with
from tests.step.test_migration import moved, random_slots
from tests.step.test_replicas import placed, with_copies

STEP = 5  # of which gates draw
END_OF_TEXT = 3  # a token that ends documents, if the config masks them
RATE, EPS = 1e-3, 1e-3  # of gradients of 1e-2 or so: an update hardly depends on their last digits
SMALL = (
    "model.vocab_size=32 model.hidden_size=16 model.num_attention_heads=4 model.num_key_value_heads=2 "
    "model.intermediate_size=24 "
    "model.moe.num_experts=8 model.moe.top_k=2 model.moe.intermediate_size=12 model.moe.num_shared_experts=0 "
    "model.moe.aux_loss_coeff=0.5 model.moe.z_loss_coeff=0.1 "
    "data.seq_len=8 train.batch_size=64 mesh.cpu_devices=8 train.compute_dtype=float32 "
    f"optimizer.learning_rate={RATE} optimizer.schedule=constant optimizer.warmup_steps=0 optimizer.beta1=0.0 "
    f"optimizer.eps={EPS} optimizer.clip_norm=null optimizer.weight_decay=0.0"
)
LOSSES = ("cross_entropy", "load_balance_loss", "router_z_loss")


class Step(NamedTuple):
    """What a step comes to; trees are by path."""

    numbers: dict[str, Any]
    grads: dict[str, np.ndarray]
    params: dict[str, np.ndarray]


def config_of_settings(text: str) -> Config:
    """A small model with these settings, and a batch that they divide."""
    config = load_config(None, [*SMALL.split(), *text.split()])
    sizes, schedule = config.mesh.sizes, config.schedule
    unit = sizes["data"] * sizes["expert"] * config.train.grad_accumulation
    unit *= schedule.microbatches if schedule.cuts_batch else 1
    return dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=unit * max(1, 16 // unit)))


def assert_is_the_references_step(config: Config, rounding: float = 0.0) -> None:
    """To the last digits of float32, or as near as rounded numbers are, which `rounding` scales.

    1 is for bfloat16. 8-bit operands are rounded in the reference, too, which leaves the few that lie on a border.
    """
    found, expected = trained(config), reference(config)
    rtol, atol = (1e-5, 1e-7) if not rounding else (0.05 * rounding, 0.02 * rounding)
    for name, value in found.numbers.items():
        np.testing.assert_allclose(value, expected.numbers[name], rtol=rtol, atol=atol, err_msg=name)
    if rounding:
        assert_are_near(found.grads, expected.grads, rounding)
        return
    for path, grad in found.grads.items():
        np.testing.assert_allclose(grad, expected.grads[path], rtol=2e-4, atol=2e-6, err_msg=f"gradient of {path}")
        np.testing.assert_allclose(found.params[path], expected.params[path], atol=3e-6, err_msg=f"new {path}")


def assert_are_near(grads: dict[str, np.ndarray], expected: dict[str, np.ndarray], rounding: float) -> None:
    """Gradients of rounded numbers, a few of which have sent a token to another expert."""
    errors = {path: float(np.linalg.norm(grad - expected[path])) for path, grad in grads.items()}
    sizes = {path: float(np.linalg.norm(expected[path])) for path in grads}
    for path, error in errors.items():
        assert error < 0.7 * rounding * sizes[path] + 1e-5, (
            f"gradient of {path} is off by {error:.2g} where it is {sizes[path]:.2g}"
        )
    assert math.hypot(*errors.values()) < 0.35 * rounding * math.hypot(*sizes.values()), "gradients"


def trained(config: Config) -> Step:
    """By the program that a run has."""
    step, arguments = program_of(config)
    state, metrics = run_checked(step, *arguments)
    trees = {"params": state["params"], "mu": first_moments(state["optimizer"])}
    stages = Stages.of(config)
    if "placement" in state:
        trees = by_expert(jax.tree.map(jnp.asarray, trees), jnp.asarray(slots_of(state)), stages)
    trees = {name: in_order(tree, stages) for name, tree in trees.items()}
    names = ("loss", "grad_norm", *(["z_loss"] if config.train.z_loss_multiplier else []))
    names += ("mtp_loss",) if config.model.has_mtp else ()
    assert all((name in metrics) == (name in names) for name in ("z_loss", "mtp_loss"))
    assert ("max_attention_logit" in metrics) == (config.optimizer.qk_clip is not None)
    names += ("max_attention_logit",) if "max_attention_logit" in metrics else ()
    if config.model.moe.num_experts:
        names += (*LOSSES, "expert_load", "block_dropped_fraction")
    return Step({name: metrics[name] for name in names}, by_path(trees["mu"]), by_path(trees["params"]))


def program_of(config: Config) -> tuple[Wrapped, tuple[Any, ...]]:
    """The step of a run, and what it is called with."""
    trainer = make_trainer(config, mesh_of(config))
    replayed = (None, *record_of(config)) if config.train.replay_routing else ()
    return trainer.step, (first_state(config, trainer), batch_of(config), *replayed)


def first_moments(state: Any) -> Any:
    """Of each parameter, by whichever optimizer updates it."""
    found = [moments for _, moments in optax.tree_utils.tree_get_all_with_path(state, "mu")]

    def is_left_out(leaf: Any) -> bool:
        return isinstance(leaf, optax.MaskedNode)

    def own(*leaves: Any) -> Any:
        owned = [leaf for leaf in leaves if not is_left_out(leaf)]
        assert len(owned) <= 1
        return owned[0] if owned else leaves[0]  # biases of routers follow loads

    return jax.tree.map(own, *found, is_leaf=is_left_out)


def record_of(config: Config, seed: int = 0) -> list[np.ndarray]:
    """Different random experts [L, G, k] for the choices of each token, of as many groups as the gate takes.

    An empty list if the step replays no record.
    """
    if config.train.replay_routing is None:
        return []
    moe, rng = config.model.moe, np.random.default_rng(seed)
    shape = config.model.num_layers, config.train.batch_size * config.data.seq_len
    group_LGE = rng.random((*shape, moe.n_group)).argsort(axis=-1).repeat(moe.num_experts // moe.n_group, axis=-1)
    score_LGE = np.where(group_LGE < moe.topk_group, rng.random((*shape, moe.num_experts)), 2.0)
    return [score_LGE.argsort(axis=-1)[..., : moe.top_k].astype(np.int32)]


def batch_of(config: Config) -> np.ndarray:
    """Random tokens, with marks if the config masks documents, and then with padding after some of them."""
    token_BN1 = tokens_of(config)
    if config.data.mask_documents:
        mark_documents(token_BN1, END_OF_TEXT)
        token_BN1[padding_of(config)] |= np.int32(UNCOUNTED - PADDING)
    return token_BN1


def padding_of(config: Config) -> np.ndarray:
    """The ends of some sequences, and a whole one: [B, N + 1], whether a token is padding."""
    most = config.data.seq_len + 1
    count_B = np.resize([0, 3, most // 2, 0, 1, most], config.train.batch_size)
    return np.arange(most) >= most - count_B[:, None]


@functools.cache
def some_params(model: ModelConfig) -> Any:
    """Random numbers, none of them 0, of which each layer makes numbers of the size of its input's."""
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        numbers = rng.standard_normal(leaf.shape, np.float32)
        name = jax.tree_util.keystr(path[-1:])
        if "norm" in name or "temperature" in jax.tree_util.keystr(path):
            is_difference = model.rms_norm_zero_centered and "norm" in name and "value_norm" not in name  # from 1
            return (not is_difference) + 0.1 * numbers
        return numbers * np.float32(0.25)

    return jax.tree.map_with_path(draw, param_shapes(model))


def first_state(config: Config, trainer: Trainer) -> Any:
    """At STEP, with nothing learned yet; where experts have places, none lies in its own."""
    if config.migration.enabled:
        fixed = dataclasses.replace(config, migration=MigrationConfig())
        plain = first_state(fixed, make_trainer(fixed, mesh_of(fixed)))
        return (
            placed(config, plain, with_copies(config))
            if config.replicas
            else moved(config, plain, random_slots(config))
        )
    return state_with(some_params(config.model), config, trainer, STEP)


def reference(config: Config) -> Step:
    """The mean of the batch's parts, each with slots and a balance of its own, by the slow reference."""
    parts = config.train.grad_accumulation
    sequence_DAb = np.arange(config.train.batch_size).reshape(_sources(config), parts, -1)
    found = [_of_part(config, sequence_DAb[:, part].ravel()) for part in range(parts)]
    losses, grads = zip(*found, strict=True)
    names = ("loss", "z_loss", *LOSSES, *(["mtp_loss"] if config.model.has_mtp else []))
    mean = {name: np.mean([each[name] for each in losses]) for name in names}
    count_ME, num_dropped_M = (sum(np.asarray(each[name]) for each in losses) for name in ("count_ME", "num_dropped_M"))
    grad = by_path(jax.tree.map(lambda *each: sum(each) / parts, *grads))
    norm = math.sqrt(sum(np.square(leaf).sum() for leaf in grad.values()))
    pairs_M1 = count_ME.sum(axis=1, keepdims=True)
    shares = {"expert_load": count_ME / pairs_M1, "block_dropped_fraction": num_dropped_M / pairs_M1[:, 0]}
    learned = jax.tree.map_with_path(
        lambda path, leaf, *each: leaf - RATE * _update(path, sum(each) / parts, config),
        *(some_params(config.model), *grads),
    )
    if config.optimizer.qk_clip is not None:
        largest_LH = np.max([each["largest_LH"] for each in losses], axis=0)
        shares["max_attention_logit"] = largest_LH.max()
        learned = clipped(learned, largest_LH, config)
    return Step(mean | shares | {"grad_norm": norm}, grad, by_path(learned))


def _update(path: Any, grad: np.ndarray, config: Config) -> np.ndarray:
    """What the first step subtracts, over the learning rate."""
    by_adamw = grad / (np.abs(grad) + EPS)
    if config.optimizer.name == "adamw":
        return by_adamw
    by_muon = first_update([str(getattr(key, "key", key)) for key in path], grad)
    return by_adamw if by_muon is None else by_muon


def clipped(params: Any, largest_LH: np.ndarray, config: Config) -> Any:
    """The parameters after QK-clip, block by block."""
    threshold, block, segments = config.optimizer.qk_clip, 0, {}
    assert threshold is not None
    assert threshold < largest_LH.max(), "no head is clipped"
    for number, segment in params["segments"].items():
        repeats = len(segment[0]["norm"])
        rows: dict[int, list[Any]] = {place: [] for place in segment}
        for row, place in itertools.product(range(repeats), segment):
            own = jax.tree.map(lambda leaf, row=row: leaf[row], segment[place]["attention"])
            rows[place].append(references.qk_clip(own, largest_LH[block], threshold, config.model))
            block += 1
        stacked = {place: jax.tree.map(lambda *each: np.stack(each), *own) for place, own in rows.items()}
        segments[number] = {place: segment[place] | {"attention": stacked[place]} for place in segment}
    assert block == len(largest_LH)
    return params | {"segments": segments}


def _of_part(config: Config, sequence_b: np.ndarray) -> tuple[dict[str, Any], Any]:
    model, buffer, sizes = config.model, None, config.mesh.sizes
    if model.moe.sends_sized_rows and config.exchange.rank_capacity_factor is not None:
        buffer = config.exchange.rank_capacity_factor, config.mesh.expert_ranks(sizes)
    (loss, rest), grads = value_and_grad(references.objective)(
        *(some_params(model), tokens_of(config)[sequence_b], model, _sources(config), buffer),
        *(sizes["tensor"], sizes["context"], (config.train.seed, STEP), sequence_b),
        *(config.train.z_loss_multiplier, *_documents(config, sequence_b)),
        *(_mtp_weight(config.train), _mtp_share(config), config.optimizer.qk_clip is not None, *record_of(config)),
    )
    return rest | {"loss": loss}, grads


def _documents(config: Config, sequence_b: np.ndarray) -> tuple[int | None, float, references.Text | None]:
    """The last token of documents, the share of the targets that count, and what is not padding."""
    if not config.data.mask_documents:
        return None, 1.0, None
    is_text_BN1, token_BN1 = ~padding_of(config), tokens_of(config)
    counted = np.mean((token_BN1[:, :-1] != END_OF_TEXT) & is_text_BN1[:, 1:])
    return END_OF_TEXT, float(counted), references.Text(is_text_BN1[sequence_b], float(is_text_BN1[:, :-1].mean()))


def _mtp_weight(train: TrainConfig) -> float:
    """In the step after STEP."""
    weight = train.mtp_loss_scaling_factor
    for first, later in train.mtp_loss_schedule:
        weight = later if first <= STEP + 1 else weight
    return weight


def _mtp_share(config: Config) -> float:
    """The share of tokens, but the last of each sequence, whose next token but one counts."""
    if not config.data.mask_documents:
        return 1.0
    token_BN1 = tokens_of(config)
    is_of_document = (token_BN1[:, :-2] != END_OF_TEXT) & (token_BN1[:, 1:-1] != END_OF_TEXT)
    return float(np.mean(is_of_document & ~padding_of(config)[:, 2:]))


def _sources(config: Config) -> int:
    """Ranks that have sequences of their own."""
    return config.mesh.data * config.mesh.expert


def by_path(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}
