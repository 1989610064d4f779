"""The command that samples text from a run's newest checkpoint.

python -m moe_jax.generate --run RUN [--prompt TEXT]
"""

from pathlib import Path

import jax

from moe_jax.checkpoint.compatibility import check_same_run
from moe_jax.checkpoint.load import load_params
from moe_jax.config.layer_layout import Stages
from moe_jax.config.ranges import SAMPLED, SEEDS, Range, check_number
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, run_command
from moe_jax.models.stages import stored_shapes
from moe_jax.parallel.sharding import REPLICATED
from moe_jax.run.generation import one_device_mesh
from moe_jax.run.model_tokenizer import tokenizer_of_run
from moe_jax.run.sample import sample_text


def main() -> None:
    """Parse the command line, load the parameters onto one device, and print the prompt and its continuation."""
    parser = CommandParser(prog="python -m moe_jax.generate", description="Sample text from a trained run.")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run (log.dir)")
    parser.add_argument("--prompt", default="\n", help="text to continue (default: a line break)")
    parser.add_argument("--tokens", type=int, default=400, help="how many to sample (default: 400)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.path, if it has moved")
    arguments = parser.parse_intermixed_args()
    check_number("--tokens", arguments.tokens, SAMPLED._replace(least=1))
    check_number("--seed", arguments.seed, SEEDS)
    check_number("--temperature", arguments.temperature, Range(0, 1e6))
    config = load_config(arguments.run, arguments.overrides)
    check_same_run(config, arguments.run, ignore_data_order=True)
    tokenizer = tokenizer_of_run(config, arguments.run)
    placed = jax.sharding.NamedSharding(one_device_mesh(), REPLICATED)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), stored_shapes(Stages.of(config))
    )
    params = load_params(arguments.run, shapes)
    sampling = arguments.prompt, arguments.tokens, arguments.temperature, arguments.seed
    print(sample_text(config, params, tokenizer, *sampling))


if __name__ == "__main__":
    run_command(main)
