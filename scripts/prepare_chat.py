"""Turn conversations into packed sequences for fine-tuning: a folder for `data.path`.

python scripts/prepare_chat.py conversations.jsonl tokens/chat --tokenizer models/olmoe --seq-len 2048

Each line is {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}, or
{"prompt": "…", "completion": "…"}. The loss counts what the assistant says, and completions.
"""

import argparse

from moe_jax.data.prepare_chat import prepare_chat
from moe_jax.errors import CommandParser, run_command
from moe_jax.files.local_copy import local_path
from moe_jax.files.places import new_folder, parse_place, place, place_of


def main() -> None:
    parser = CommandParser(
        prog="python scripts/prepare_chat.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("input", type=place, help="a .jsonl or .json file (each also as .gz), or a folder of them")
    parser.add_argument("output", type=place, help="the folder to make")
    parser.add_argument(
        "--tokenizer", required=True, metavar="FOLDER", help="of a model: its tokenizer.json and chat template"
    )
    parser.add_argument("--seq-len", type=int, required=True, metavar="N", help="the data.seq_len of the training")
    parser.add_argument("--template", metavar="FILE", help="a chat template, instead of the model's")
    parser.add_argument("--validation-fraction", type=float, default=0.1, metavar="F", help="of the conversations")
    arguments = parser.parse_args()
    with new_folder("OUTPUT", arguments.output) as output:
        made = prepare_chat(
            local_path(arguments.input),
            output,
            tokenizer=parse_place("--tokenizer", arguments.tokenizer),
            seq_len=arguments.seq_len,
            template=None if arguments.template is None else parse_place("--template", arguments.template),
            validation_fraction=arguments.validation_fraction,
        )
    meta, tokens = made.meta, made.meta.train_tokens + made.meta.validation_tokens
    left_out = [f"{made.too_long:,} are longer than a sequence"] if made.too_long else []
    left_out += [f"in {made.silent:,} the assistant says nothing"] if made.silent else []
    if left_out:
        print(f"warning: of {made.conversations:,} conversations {' and '.join(left_out)}: they are left out")
    length = arguments.seq_len + 1
    print(
        f"{meta.train_tokens // length:,} sequences to train and {meta.validation_tokens // length:,} to validate; "
        f"{made.counted_tokens / tokens:.1%} of their tokens count in the loss, {made.padding_tokens / tokens:.1%} are "
        f"padding; use data.path={place_of(output)} data.mask_documents=true data.seq_len={meta.seq_len} "
        f"model.vocab_size={meta.vocab_size}"
    )


if __name__ == "__main__":
    run_command(main)
