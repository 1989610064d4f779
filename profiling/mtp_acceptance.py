"""How often would the decoder accept what multi-token prediction drafts? python profiling/mtp_acceptance.py [STEPS]

Trains `configs/shakespeare_cpu.yaml` without and with a module of multi-token prediction, on the same tokens in the
same order. Then, at each position of the validation text, the module's likeliest second token is compared with the
decoder's likeliest token one position later: both are given the text up to the token in between. The share of positions
where they agree is the acceptance rate of greedy decoding with one drafted token.
"""

import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from count_argument import count_argument
from jax.sharding import NamedSharding
from results_file import rounded, write_result
from training_run import CONFIG, train_config

from moe_jax.checkpoint.load import load_params
from moe_jax.config import Config
from moe_jax.errors import run_command
from moe_jax.models.head import unembed
from moe_jax.models.parameters import param_shapes
from moe_jax.models.transformer import ComputeConfig, forward
from moe_jax.parallel.mesh import one_device_mesh
from moe_jax.parallel.sharding import REPLICATED
from moe_jax.run.loop import train
from moe_jax.run.setup import open_run
from moe_jax.telemetry.run_log import read_metrics

SETTINGS = {
    "next token": ["train.eval_batches=40"],
    "two tokens": ["train.eval_batches=40", "model.num_nextn_predict_layers=1", "train.mtp_loss_scaling_factor=0.3"],
}


def main() -> None:
    """Train both models, print a row for each and write results/mtp_acceptance.json."""
    steps = count_argument("STEPS", 500, __doc__)
    runs: dict[str, dict[str, Any]] = {}
    for name, settings in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            config = train_config([*settings, f"train.eval_every={steps}", f"log.dir={folder}"], steps)
            train(config)
            records = read_metrics(Path(folder))
            last = [record for record in records if "cross_entropy" in record][-1]
            (validation,) = (record["validation_loss"] for record in records if "validation_loss" in record)
            runs[name] = {
                "settings": settings,
                "validation_loss": rounded(validation),
                **({"mtp_loss": rounded(last["mtp_loss"])} if "mtp_loss" in last else {}),
                **(_agreement(config, Path(folder)) if config.model.has_mtp else {}),
            }
        print(f"{name}: {runs[name]}", flush=True)
    write_result("mtp_acceptance", {"config": CONFIG, "steps": steps, "runs": runs})


def _agreement(config: Config, folder: Path) -> dict[str, Any]:
    """Compare both predictions of each token but the first two of every validation sequence."""
    mesh, model = one_device_mesh(), config.model
    compute = ComputeConfig.of(config, mesh)
    placed = NamedSharding(mesh, REPLICATED)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), param_shapes(model))
    params = load_params(folder, shapes)

    def predicted(params: Any, token_BN1: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = forward(params, token_BN1[:, :-1], model, compute, next_BN=token_BN1[:, 1:])
        assert found.mtp_BND is not None, "asked for by next_BN"
        drafted = unembed(params | {"norm": params["mtp_norm"]}, found.mtp_BND, model)
        return drafted.argmax(axis=-1)[:, :-1], unembed(params, found.x_BND, model).argmax(axis=-1)[:, 1:]

    run = jax.jit(jax.shard_map(predicted, mesh=mesh, in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False))
    (validation,) = open_run(config).validation
    agrees, draft_is_right, decoder_is_right = [], [], []
    for token_BN1 in validation.batches:
        drafted_BN, greedy_BN = map(np.asarray, run(params, token_BN1))
        agrees.append(np.mean(drafted_BN == greedy_BN))
        draft_is_right.append(np.mean(drafted_BN == token_BN1[:, 2:]))
        decoder_is_right.append(np.mean(greedy_BN == token_BN1[:, 2:]))
    return {
        "positions": int(drafted_BN.size * len(validation.batches)),
        "acceptance_rate": rounded(float(np.mean(agrees))),
        "draft_is_the_text": rounded(float(np.mean(draft_is_right))),
        "decoder_is_the_text": rounded(float(np.mean(decoder_is_right))),
    }


if __name__ == "__main__":
    run_command(main)
