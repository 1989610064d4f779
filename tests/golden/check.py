"""Whether transformers loads exported folders and finds the logits that are expected.

pip install torch transformers safetensors
python tests/golden/check.py FOLDER golden.safetensors [FOLDER golden.safetensors …]
"""

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file


def check(folder: Path, golden: Path) -> None:
    """Print the largest difference of the logits; stop if a tensor was missing, not used, or differs too much."""
    expected = load_file(golden)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {name: found for name, found in loading.items() if found}
    assert not wrong, f"{folder}: {wrong}"
    with torch.no_grad():
        logits = model.eval()(expected["tokens"].long()).logits
    difference = (logits - expected["logits"]).abs().max().item()
    print(f"{folder.name}: {type(model).__name__}, largest difference {difference:.1e}")
    assert difference <= 2e-5, folder


if __name__ == "__main__":
    for folder, golden in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        check(Path(folder), Path(golden))
