"""Each optimizer's updates against its definition in NumPy and optax's, and on meshes against those of one device."""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import scale_by_muon

from moe_jax.config import Config, LatentConfig, ModelConfig, OptimizerConfig
from moe_jax.config.layer_layout import Stages
from moe_jax.config.registry import OPTIMIZER_FACTS
from moe_jax.config.yaml_io import load_config
from moe_jax.models.parameters import in_order, param_dims, param_shapes, stored
from moe_jax.plan.memory import step_memory
from moe_jax.plan.resources import owned_parameters
from moe_jax.step.context import StepContext
from moe_jax.step.optimizer import known_parameters, make_optimizer, state_partitions
from moe_jax.step.optimizers import OPTIMIZERS
from moe_jax.step.optimizers.muon import orthogonalized
from moe_jax.step.optimizers.protocol import Parameter
from tests.compiled import run_checked
from tests.muon_reference import newton_schulz
from tests.plan.test_orthogonalizing import MODELS
from tests.small import first_params, small_config
from tests.step.gradients import mesh_of

STEPS = 3
OTHERS = {"beta1": 0.8, "beta2": 0.9, "momentum": 0.8, "newton_schulz_steps": 4}  # than the defaults
LATENT = LatentConfig(kv_lora_rank=6, q_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3)


def config_with(name: str, config: Config, **settings: Any) -> Config:
    """Steps that are large enough to see, none of them a warm-up, with other settings than the defaults."""
    known = OPTIMIZER_FACTS.of(name).settings
    settings = {key: value for key, value in OTHERS.items() if key in known} | settings
    optimizer = OptimizerConfig(name=name, schedule="constant", warmup_steps=0, learning_rate=0.1, **settings)
    return dataclasses.replace(config, optimizer=optimizer)


def random_grads(config: Config, step: int) -> Any:
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: rng.standard_normal(p.shape, np.float32), first_params(config.model))


def trained(config: Config) -> Any:
    """Parameters after some updates on one device, with the optimizer's state."""
    params, optimizer = first_params(config.model), make_optimizer(config, param_dims(config.model))

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params, is_good=True)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for number in range(STEPS):
        params, state = step(params, state, random_grads(config, number))
    return jax.device_get((params, state))


@functools.cache
def trained_once(config: Config) -> Any:
    return trained(config)


class Reference:
    """Muon of one matrix, AdamW of one array of any other kind, and Lion of any, in float64."""

    def __init__(self, settings: OptimizerConfig, shape: tuple[int, ...]):
        self.settings, self.mu, self.nu, self.count = settings, np.zeros(shape), np.zeros(shape), 0

    def muon(self, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        s = self.settings
        self.mu = s.momentum * self.mu + g
        unit = newton_schulz(g + s.momentum * self.mu, s.newton_schulz_steps)
        return p - s.learning_rate * (0.2 * math.sqrt(max(p.shape)) * unit + s.weight_decay * p)

    def adamw(self, p: np.ndarray, g: np.ndarray, decays: bool) -> np.ndarray:
        s, self.count = self.settings, self.count + 1
        self.mu = s.beta1 * self.mu + (1 - s.beta1) * g
        self.nu = s.beta2 * self.nu + (1 - s.beta2) * g**2
        mean, square = self.mu / (1 - s.beta1**self.count), self.nu / (1 - s.beta2**self.count)
        return p - s.learning_rate * (mean / (np.sqrt(square) + s.eps) + (s.weight_decay * p if decays else 0))

    def lion(self, p: np.ndarray, g: np.ndarray, decays: bool) -> np.ndarray:
        s, old = self.settings, self.mu
        self.mu = s.beta2 * old + (1 - s.beta2) * g
        return p - s.learning_rate * (
            np.sign(s.beta1 * old + (1 - s.beta1) * g) + (s.weight_decay * p if decays else 0)
        )


# by the last names of their path: rows and columns of each matrix
MATRICES = {
    "attention.query": (16, 16),
    "attention.key": (16, 8),
    "attention.value": (16, 8),
    "attention.out": (16, 16),
    "gate": (16, None),
    "up": (16, None),
    "down": (None, 16),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_plans_know_which_parameters_are_muons(model: ModelConfig) -> None:
    """Kernels of depthwise convolutions are AdamW's, as in the models that Muon has trained."""
    known, shapes = known_parameters(param_dims(model)), param_shapes(model)
    own = jax.tree.map(lambda parameter, x: x.size * parameter.is_hidden_matrix, known, shapes)
    planned = [block.hidden_matrices for block in owned_parameters(model)[1:-1]]
    assert sum(jax.tree.leaves(own)) == sum(each.whole + each.heads_and_hidden + each.expert for each in planned)
    decays = jax.tree.leaves_with_path(jax.tree.map(lambda parameter: parameter.decays, known))
    assert all(decay for path, decay in decays if re.search(r"'conv(_query|_key|_value)?'", jax.tree_util.keystr(path)))


def test_muon_is_its_definition_in_numpy() -> None:
    """Attention's heads and their width are one dimension, and each block's and expert's matrix stands by itself."""
    config = config_with("muon", small_config(1, 1))
    learned = dict(jax.tree.leaves_with_path(trained_once(config)[0]))
    grads = [dict(jax.tree.leaves_with_path(random_grads(config, step))) for step in range(STEPS)]
    by_muon = 0
    for path, first in jax.tree.leaves_with_path(first_params(config.model)):
        names = [str(getattr(key, "key", key)) for key in path]
        stacked = ("segments" in names) + ("experts" in names)
        found = next((size for name, size in MATRICES.items() if ".".join(names).endswith(name)), None)
        if found is None:
            reference, new = Reference(config.optimizer, first.shape), first.astype(np.float64)
            decays = names[-1] in ("embedding", "head", "router")
            for each in grads:
                new = reference.adamw(new, each[path], decays)
            np.testing.assert_allclose(learned[path], new, rtol=2e-4, atol=2e-5, err_msg=".".join(names))
            continue
        by_muon += 1
        rows = found[0] or first.size // math.prod(first.shape[:stacked]) // found[1]
        of_matrices = [x.reshape(math.prod(first.shape[:stacked]), rows, -1) for x in (learned[path], first)]
        of_grads = [each[path].reshape(of_matrices[0].shape) for each in grads]
        for number, (own, new) in enumerate(zip(*of_matrices, strict=True)):
            reference = Reference(config.optimizer, new.shape)
            for each in of_grads:
                new = reference.muon(new.astype(np.float64), each[number])
            np.testing.assert_allclose(own, new, rtol=2e-4, atol=2e-5, err_msg=".".join(names))
    assert by_muon == 14


def test_lion_is_its_definition_in_numpy() -> None:
    config = config_with("lion", small_config(1, 1))
    learned = dict(jax.tree.leaves_with_path(trained_once(config)[0]))
    grads = [dict(jax.tree.leaves_with_path(random_grads(config, step))) for step in range(STEPS)]
    for path, first in jax.tree.leaves_with_path(first_params(config.model)):
        reference, new = Reference(config.optimizer, first.shape), first.astype(np.float64)
        for each in grads:
            new = reference.lion(new, each[path], decays="norm" not in jax.tree_util.keystr(path))
        np.testing.assert_allclose(learned[path], new, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))


def test_muon_is_optaxs_once_its_momentum_is_not_corrected() -> None:
    """optax divides means of few gradients by the sum of their weights, Muon's authors do not: later both agree."""
    x, m = (jnp.asarray(np.random.default_rng(n).standard_normal((12, 20), np.float32)) for n in range(2))
    settings = OptimizerConfig(name="muon")
    theirs = scale_by_muon(beta=settings.momentum, eps=1e-7)
    state = theirs.init(x)._replace(count=jnp.int32(10**6), mu=(1 - settings.momentum) * m)
    expected = 0.2 * math.sqrt(20) * theirs.update(x, state)[0]
    ours = OPTIMIZERS["muon"](settings, {"up": Parameter(("model", "hidden"))}, "cpu")
    own, others = ours.init({"up": x})
    own = own._replace(inner_state=own.inner_state._replace(mu={"up": m}))
    found, _ = ours.update({"up": x}, (own, others), is_good=True)
    np.testing.assert_allclose(found["up"], expected, rtol=1e-4, atol=1e-5)


def test_iterations_move_singular_values_to_1_and_leave_zeros() -> None:
    x_nrc = np.random.default_rng(0).standard_normal((3, 10, 6), np.float32)
    x_nrc[2] = 0
    for dtype in ("float32", "bfloat16"):
        unit_nrc = np.asarray(orthogonalized(jnp.asarray(x_nrc, dtype), 5).astype(jnp.float32))
        values = np.linalg.svd(unit_nrc[:2], compute_uv=False)
        assert ((values > 0.6) & (values < 1.3)).all()
        assert not unit_nrc[2].any()


def test_products_of_muon_have_the_type_that_is_set() -> None:
    params = {"up": jnp.ones((12, 20))}
    grads = {"up": jnp.asarray(np.random.default_rng(0).standard_normal((12, 20), np.float32))}

    def update(dtype: str, platform: str) -> np.ndarray:
        settings = OptimizerConfig(name="muon", newton_schulz_dtype=dtype)
        rule = OPTIMIZERS["muon"](settings, {"up": Parameter(("model", "hidden"))}, platform)
        return np.asarray(rule.update(grads, rule.init(params), params, is_good=True)[0]["up"])

    exact, rounded = update("auto", "cpu"), update("bfloat16", "cpu")
    np.testing.assert_array_equal(update("float32", "tpu"), exact)
    np.testing.assert_array_equal(update("auto", "tpu"), rounded)
    assert 1e-4 < np.abs(rounded - exact).max() < 0.1


@pytest.mark.parametrize("shape", [(12, 20), (9,)])
def test_adafactor_is_optaxs_for_one_matrix_and_one_vector(shape: tuple[int, ...]) -> None:
    theirs = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=2), optax.clip_by_block_rms(1.0))
    dims = ("model", "hidden")[: len(shape)]
    ours = OPTIMIZERS["adafactor"](OptimizerConfig(name="adafactor"), {"up": Parameter(dims)}, "cpu")
    params = {"up": jnp.ones(shape)}
    state, expected_state = ours.init(params), theirs.init(params)
    for step in range(STEPS):
        grads = {"up": jnp.asarray(np.random.default_rng(step).standard_normal(shape, np.float32)) * (1 + step)}
        found, state = ours.update(grads, state, params, is_good=True)
        expected, expected_state = theirs.update(grads, expected_state, params)
        np.testing.assert_allclose(found["up"], expected["up"], rtol=1e-5)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_bad_step_leaves_moments_as_they_are(name: str) -> None:
    x = {"up": jnp.ones((4, 6)), "norm": jnp.ones(4)}
    known = {"up": Parameter(("model", "hidden")), "norm": Parameter(("model",))}
    optimizer = OPTIMIZERS[name](OptimizerConfig(name=name), known, "cpu")
    _, state = optimizer.update(x, optimizer.init(x), x, is_good=jnp.bool_(True))
    bad = jax.tree.map(lambda each: each * jnp.nan, x)
    _, after = optimizer.update(bad, state, x, is_good=jnp.bool_(False))
    moments = [[leaf for leaf in jax.tree.leaves(each) if leaf.ndim] for each in (state, after)]
    assert all(np.asarray(leaf).any() for leaf in moments[0])
    chex.assert_trees_all_equal(*moments)


ONE = {"moe_layer_freq": 1, "num_shared_experts": 1, "model": {"num_layers": 1}}
MESHES = {
    "two axes share a matrix": small_config(2, 2, tensor=2, **ONE),
    "axes in another order than the mesh's": small_config(1, 2, context=2, tensor=2, **ONE),
    "stages": small_config(1, 2, tensor=2, pipeline=2, moe_layer_freq=1),
    "latents": small_config(
        *(4, 1),
        tensor=2,
        gate="softmoe",
        **ONE | {"model": {"num_layers": 1, "num_key_value_heads": None, "latent": LATENT}},
    ),
}


@pytest.mark.parametrize(("name", "mesh"), [*(("muon", mesh) for mesh in MESHES), ("adafactor", "latents")])
def test_updates_on_a_mesh_are_those_of_one_device(name: str, mesh: str) -> None:
    config = config_with(name, MESHES[mesh], zero=0 if mesh == "stages" else 1)
    expected, _ = trained_once(config_with(name, MESHES[mesh]))
    devices = mesh_of(config)
    context, stages = StepContext.of(config, devices), Stages.of(config)
    specs = context.grad_specs
    first = jax.device_get(stored(jax.tree.map(jnp.asarray, first_params(config.model)), stages))
    state_specs = state_partitions(context.optimizer, first, specs)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = context.optimizer.update(grads, state, params, is_good=True)
        return optax.apply_updates(params, updates), state

    whole = (specs, state_specs)
    on_mesh = jax.shard_map(step, mesh=devices, in_specs=(*whole, specs), out_specs=whole, check_vma=False)

    def steps(params: Any, grads: Any) -> Any:
        state = context.optimizer.init(params)
        return jax.lax.scan(lambda carry, each: (on_mesh(*carry, each), None), (params, state), grads)[0]

    grads = [stored(jax.tree.map(jnp.asarray, random_grads(config, number)), stages) for number in range(STEPS)]
    params, _ = run_checked(jax.jit(steps), first, jax.tree.map(lambda *each: np.stack(each), *grads))
    found = in_order(jax.tree.map(jnp.asarray, params), stages)
    chex.assert_trees_all_close(jax.device_get(found), expected, rtol=1e-4, atol=1e-5)


def test_the_page_has_the_losses_that_were_measured() -> None:
    root = Path(__file__).parents[2]
    found = json.loads((root / "profiling" / "results" / "optimizers.json").read_text())
    assert found["validation_loss"].keys() == OPTIMIZERS.keys()
    page = (root / "docs" / "optimizers.md").read_text()
    rates = re.findall(r"0\.\d+", re.findall(r"^\| \| 0\..*", page, re.MULTILINE)[0])
    for name, losses in found["validation_loss"].items():
        row = next(line for line in page.splitlines() if re.match(rf"\| `{name}` \|( |[\d.])+\|", line))
        *cells, of_seeds = [cell.strip() for cell in row.split("|")[2:-1]]
        measured = found["best_rate_by_seed"][name]
        seeds = sorted(measured["validation_loss"])
        assert of_seeds == f"{measured['mean']:g} ({seeds[0]:g} to {seeds[-1]:g})"
        shown = {rate: float(cell) for rate, cell in zip(rates, cells, strict=True) if cell}
        assert shown == losses, name


def test_the_page_has_the_compiled_share_of_the_update() -> None:
    root = Path(__file__).parents[2]
    found = json.loads((root / "profiling" / "results" / "optimizer_hlo_h100_1x1x8.json").read_text())
    page = " ".join((root / "docs" / "optimizers.md").read_text().split())
    muon, adamw = found["muon"], found["adamw"]
    assert f"{muon['share']:.0%}".replace("%", " %") + " of the kernels' time, and " in page
    assert f"and {adamw['share']:.0%}".replace("%", " %") + " with AdamW" in page
    for name in ("update_ms", "kernels_ms", "planned_update_ms"):
        assert f"{muon[name]:.1f} and {adamw[name]:.1f}" in page
    config = root / "configs" / "bench" / "fine_grained.yaml"
    planned = [
        step_memory(load_config(config, ["optimizer.zero=1", f"optimizer.name={name}"]), "gpu").total / 1e9
        for name in ("muon", "adamw")
    ]
    assert f"allocates {muon['allocated_bytes'] / 1e9:.1f} GB, with AdamW {adamw['allocated_bytes'] / 1e9:.1f}" in page
    times = json.loads((root / "profiling" / "results" / "optimizer_times.json").read_text())
    measured = times["step_s"]["muon"]["median"], times["over_adamw"]["muon"]["median"]
    assert f"takes {measured[0]:.2f} s, {measured[1]:.2f} × AdamW's" in page
    assert f"plans of this step say {planned[0]:.1f} and {planned[1]:.1f}." in page
