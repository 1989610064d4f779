"""The command that samples text from a run's newest checkpoint.

python -m moe_jax.generate --run RUN [--prompt TEXT | --prompts FILE] [--chat]

One prompt's continuation is printed while it is generated. Those of a file are printed as JSON lines. With --chat the
prompt is a question, which the model's chat template surrounds; without a prompt, questions are read line by line.
Speed is reported on stderr.
"""

import argparse
import json
import sys

from moe_jax.checkpoint.compatibility import check_same_run
from moe_jax.config import MeshConfig
from moe_jax.config.ranges import SAMPLED, SEEDS, Range, check_number
from moe_jax.config.yaml_io import load_config, load_draft
from moe_jax.data.chat_template import ChatTemplate
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.distributed import processes
from moe_jax.errors import CommandParser, ConfigError, DataError, run_command
from moe_jax.files.local_copy import local_path
from moe_jax.files.places import place
from moe_jax.models.sampling import Sampling
from moe_jax.run.generation import Decoder
from moe_jax.run.model_tokenizer import end_tokens, tokenizer_of_run
from moe_jax.run.sample import printable
from moe_jax.run.sampling_mesh import SamplingMesh, asked_mesh
from moe_jax.run.text_generation import Prompt, TextGenerator, TextSettings, read_prompts
from moe_jax.run.unused_settings import GENERATION, unread_text

_MESH = "mesh."
_VOCABULARY = 2**24  # tokens, the most of a config


def main() -> None:
    """Parse the command line, load the parameters, and print what the model writes."""
    arguments = _arguments()
    arguments.run = local_path(arguments.run)
    config = load_config(arguments.run, [each for each in arguments.overrides if not each.startswith(_MESH)])
    asked = _asked_mesh(arguments)
    processes.initialize(processes.Processes(mode="off"), asked.cpu_devices if asked else None)
    check_same_run(config, arguments.run, ignore_data_order=True)
    tokenizer, template = tokenizer_of_run(config, arguments.run), _template_of(arguments)
    settings, prompt = _settings_of(arguments, tokenizer), arguments.prompt
    prompts = read_prompts(local_path(arguments.prompts), arguments.chat, arguments.system) if arguments.prompts else []
    where = SamplingMesh.of(config, asked)
    if where.missing:
        print(f"on one device: {where.missing}", file=sys.stderr)
    if text := unread_text(arguments.overrides, GENERATION, "generation"):
        print(text, file=sys.stderr)
    _, params = where.load(arguments.run, arguments.ema)
    decoder = Decoder(where, params, settings.sampling)
    generator = TextGenerator(config, decoder, tokenizer, settings, template)
    if prompts:
        for line in generator.continued(prompts, arguments.batch_size):
            print(json.dumps(line, ensure_ascii=False), flush=True)
    elif not arguments.chat:
        first = Prompt("\n" if prompt is None else prompt)
        generator.check(first)
        print(first.text, end="", flush=True)
        _print_stream(generator, first)
    elif prompt is not None:
        _print_stream(generator, Prompt.question(prompt, arguments.system))
    else:
        _converse(generator, arguments.system)
    print(generator.speed(), file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = CommandParser(prog="python -m moe_jax.generate", description="Sample text from a trained run.")
    parser.add_argument("--run", type=place, required=True, help="folder of the run (log.dir)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="text to continue (default: a line break), or the question with --chat")
    source.add_argument("--prompts", type=place, metavar="FILE", help="prompts, one a line; .jsonl: JSON lines")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts of a file at a time (default: 8)")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of a chat")
    parser.add_argument("--tokens", type=int, default=400, help="how many to sample at most (default: 400)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens")
    parser.add_argument("--top-p", type=float, help="draw from the likeliest tokens with this sum of probabilities")
    parser.add_argument("--min-p", type=float, help="draw from tokens with this share of the highest probability")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end a text there; may be repeated")
    parser.add_argument("--ema", action="store_true", help="use the moving average of parameters (optimizer.ema_decay)")
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at the end of a text")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="e.g. mesh.expert=4 mesh.tensor=2"
    )
    arguments = parser.parse_intermixed_args()
    check_number("--tokens", arguments.tokens, SAMPLED._replace(least=1))
    check_number("--batch-size", arguments.batch_size, Range(1, 1024))
    check_number("--seed", arguments.seed, SEEDS)
    check_number("--temperature", arguments.temperature, Range(0, 1e6))
    check_number("--top-k", arguments.top_k, Range(1, _VOCABULARY))
    check_number("--top-p", arguments.top_p, Range(0, 1, above=True))
    check_number("--min-p", arguments.min_p, Range(0, 1))
    if "" in arguments.stop:
        raise ConfigError("--stop= is empty: name a text, or leave it out")
    if arguments.system is not None and not arguments.chat:
        raise ConfigError(f"--system={arguments.system} is for a chat: use --chat, or leave it out")
    return arguments


def _asked_mesh(arguments: argparse.Namespace) -> MeshConfig | None:
    """Return the mesh of the overrides, which need not be one that could train; None without any."""
    given = {each.partition("=")[0].removeprefix(_MESH) for each in arguments.overrides if each.startswith(_MESH)}
    draft = load_draft(arguments.run, arguments.overrides)
    if draft.open:
        raise ConfigError(f"{min(draft.open)}=auto: nothing chooses it here: give a value, or leave it out")
    return asked_mesh(draft.mesh, given)


def _template_of(arguments: argparse.Namespace) -> ChatTemplate | None:
    return ChatTemplate(arguments.run) if arguments.chat else None


def _settings_of(arguments: argparse.Namespace, tokenizer: Tokenizer) -> TextSettings:
    return TextSettings(
        sampling=Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p),
        count=arguments.tokens,
        seed=arguments.seed,
        ends=frozenset() if arguments.ignore_eos else end_tokens(arguments.run, tokenizer),
        stops=tuple(arguments.stop),
    )


def _print_stream(generator: TextGenerator, prompt: Prompt) -> str:
    """Print the text after a prompt while it is generated, and a line break. Return the text."""
    pieces = []
    for piece in generator.stream(prompt):
        print(printable(piece), end="", flush=True)
        pieces.append(piece)
    print(flush=True)
    return "".join(pieces)


def _converse(generator: TextGenerator, system: str | None) -> None:
    """Answer the questions on stdin, line by line. Raises DataError for a line that is no text."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            raise DataError(f"standard input is not {sys.stdin.encoding} text: convert it, e.g. with iconv") from None
        if not line:
            return
        if line.strip():
            messages.append({"role": "user", "content": line.strip()})
            messages.append({"role": "assistant", "content": _print_stream(generator, Prompt(None, messages))})


if __name__ == "__main__":
    run_command(main)
