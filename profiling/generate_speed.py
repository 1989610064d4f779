"""How fast is sampling beside transformers? python profiling/generate_speed.py --transformers PYTHON [ROUNDS]

PYTHON is the interpreter of an environment with torch, transformers and safetensors. A random model of 100 million
parameters is exported to a folder, which both read. Each continues the same prompts greedily, in float32 on N cores
(--cores N; default: all): first one prompt, then a batch. The two take turns, and the ratio of each round is taken, of
the clock and of the CPU's time, which other programs on the machine change less. Compilation and loading are left out;
transformers uses the fastest of its implementations of experts (tests/golden/timed.py). Writes
results/generate_speed.json.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from count_argument import check_least
from numpy.typing import NDArray
from results_file import quartiles, rounded, write_result
from with_transformers import GOLDEN, versions

from moe_jax.config import Config, DataConfig, ModelConfig, MoEConfig, TrainConfig
from moe_jax.convert.families import FAMILIES
from moe_jax.convert.write import write_model
from moe_jax.errors import CommandParser, UserError, run_command
from moe_jax.models.parameters import init_params
from moe_jax.models.sampling import Sampling
from moe_jax.run.generation import Decoder, Generation
from moe_jax.run.sampling_mesh import SamplingMesh

MODEL = ModelConfig(
    vocab_size=16384,
    hidden_size=512,
    num_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1024,
    qk_norm=True,
    moe=MoEConfig(num_experts=24, top_k=4, intermediate_size=256, capacity_factor=None),
)
LENGTH = 512  # of a context
BATCHES = (1, 8)  # prompts
PROMPT, TOKENS = 128, 64  # tokens of each prompt, and after it
_WORKER = GOLDEN / "timed.py"


class Timing(NamedTuple):
    """The texts of one batch."""

    tokens: list[list[int]]
    first_s: float  # to the first tokens
    seconds: float
    cpu_s: float  # of all threads


class Transformers:
    """A process with transformers, which generates when it is asked."""

    def __init__(self, python: str, folder: Path):
        command = [python, str(_WORKER), str(folder), str(TOKENS)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, prompts: NDArray[np.int32]) -> Timing:
        """Continue the prompts. Raises UserError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(prompts.tolist()), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise UserError(f"{_WORKER.name} ended with exit code {self._process.wait()}: see above")
        found = json.loads(line)
        self.experts = found.pop("experts")
        return Timing(**found)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main() -> None:
    """Time both in turns, and write the result."""
    parser = CommandParser(prog="python profiling/generate_speed.py", description=__doc__)
    parser.add_argument("--transformers", required=True, metavar="PYTHON", help="python with transformers")
    parser.add_argument("--cores", type=int, metavar="N", help="of this machine (default: all)")
    parser.add_argument("rounds", metavar="ROUNDS", nargs="?", type=int, default=7, help="default: %(default)s")
    arguments = parser.parse_args()
    check_least(arguments, rounds=1, cores=1)
    cores = sorted(os.sched_getaffinity(0))[: arguments.cores]
    os.sched_setaffinity(0, cores)  # also of the process of transformers, and before jax makes threads
    params = jax.tree.map(lambda x: 2 * x, init_params(MODEL, seed=0))  # sharper, so that no two logits tie
    about = {"parameters": sum(x.size for x in jax.tree.leaves(params)), "cores": len(cores)}
    about |= {"prompt_tokens": PROMPT, "new_tokens": TOKENS, "rounds": arguments.rounds}
    about |= versions(arguments.transformers)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "model"
        write_model(folder, MODEL, FAMILIES["qwen3_moe"], params, "float32", LENGTH, Path(home))
        peer = Transformers(arguments.transformers, folder)
        found = {f"batch_{size}": _compared(_ours(params), peer, size, arguments.rounds) for size in BATCHES}
        peer.close()
    about["load_average"] = rounded(os.getloadavg()[2])  # of programs that wanted a core, over 15 minutes
    write_result("generate_speed", about | {"experts_of_transformers": peer.experts} | found)


def _ours(params: Any) -> Any:
    """Return the function that generates with this project."""
    config = Config(model=MODEL, data=DataConfig(seq_len=LENGTH), train=TrainConfig(compute_dtype="float32"))
    where = SamplingMesh.of(config)
    decoder = Decoder(where, where.placed(params), Sampling())

    def generate(prompts: NDArray[np.int32]) -> Timing:
        generation, cpu_s = Generation.of(decoder, prompts.tolist(), TOKENS, seed=0), time.process_time()
        while not generation.is_done:
            generation.advance()
        assert generation.first_token_s is not None
        cpu_s = time.process_time() - cpu_s
        return Timing([row.new for row in generation.rows], generation.first_token_s, generation.seconds, cpu_s)

    return generate


def _compared(ours: Any, theirs: Any, size: int, rounds: int) -> dict[str, Any]:
    prompts = np.random.default_rng(0).integers(0, MODEL.vocab_size, (size, PROMPT), np.int32)
    times: dict[str, list[Timing]] = {"ours": [], "transformers": []}
    warm = ours(prompts), theirs(prompts)
    for _ in range(rounds):
        for name, generate in (("ours", ours), ("transformers", theirs)):
            times[name].append(generate(prompts))
            time.sleep(0.1)
        print(size, [each[-1][1:] for each in times.values()], file=sys.stderr, flush=True)
    pairs = list(zip(*times.values(), strict=True))
    return {
        "equal_tokens": warm[0].tokens == warm[1].tokens,
        "speed_ratio": quartiles([their.seconds / own.seconds for own, their in pairs]),
        "cpu_time_ratio": quartiles([their.cpu_s / own.cpu_s for own, their in pairs]),
        "first_token_ratio": quartiles([their.first_s / own.first_s for own, their in pairs]),
    } | {
        name: {
            "tokens_per_s": rounded(size * TOKENS / statistics.median(each.seconds for each in own)),
            "first_token_s": rounded(statistics.median(each.first_s for each in own)),
        }
        for name, own in times.items()
    }


if __name__ == "__main__":
    run_command(main)
