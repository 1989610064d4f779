"""Turn text into token files for training: a folder for `data.path`.

python scripts/prepare_text.py my_texts tokens/mine                                    # bytes
python scripts/prepare_text.py corpus.jsonl tokens/mine --tokenizer bpe --vocab-size 8192
python scripts/prepare_text.py my_texts tokens/mine --tokenizer models/olmoe             # a model's tokenizer
python scripts/prepare_text.py --verify tokens/mine                                    # verify all checksums
"""

import argparse

from moe_jax.data.prepare import prepare_text
from moe_jax.data.tokens import verify_tokens
from moe_jax.errors import CommandParser, run_command
from moe_jax.files.local_copy import local_path
from moe_jax.files.places import new_folder, parse_place, place, place_of


def main() -> None:
    parser = CommandParser(
        prog="python scripts/prepare_text.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "input",
        type=place,
        help="a .txt, .jsonl, .json (each also as .gz), .parquet, .arrow or .array_record file, or a folder of them",
    )
    parser.add_argument("output", type=place, nargs="?", help="the folder to make")
    parser.add_argument(
        "--tokenizer", default="bytes", help="bytes, bpe (a new one), or a folder with a tokenizer.json"
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="of the BPE at most (default 8192)")
    parser.add_argument("--validation-fraction", type=float, default=0.1, metavar="F", help="of the text: its end")
    parser.add_argument("--text-key", default="text", help="of a .jsonl object or .parquet row (default text)")
    parser.add_argument("--verify", action="store_true", help="check the checksums of a folder made before")
    arguments = parser.parse_args()
    if arguments.verify == bool(arguments.output):
        parser.error("give INPUT and OUTPUT, or --verify and a folder")
    arguments.input = local_path(arguments.input)
    if arguments.verify:
        folder, meta = arguments.input, verify_tokens(arguments.input)
    else:
        tokenizer = arguments.tokenizer
        with new_folder("OUTPUT", arguments.output) as folder:
            meta = prepare_text(
                arguments.input,
                folder,
                tokenizer=tokenizer if tokenizer in ("bytes", "bpe") else parse_place("--tokenizer", tokenizer),
                vocab_size=arguments.vocab_size,
                validation_fraction=arguments.validation_fraction,
                text_key=arguments.text_key,
            )
    packed = f" data.mask_documents=true data.seq_len={meta.seq_len}" if meta.seq_len else ""
    print(
        f"{meta.train_tokens:,} tokens to train and {meta.validation_tokens:,} to validate "
        f"(text files: {len(meta.sources)}); use data.path={place_of(folder)}{packed} "
        f"model.vocab_size={meta.vocab_size}"
    )


if __name__ == "__main__":
    run_command(main)
