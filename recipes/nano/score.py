"""Bits per byte of a model on the held-out books, by the protocol of nano's card.

python recipes/nano/score.py build/nano-longer/model --data ../shared/data/text
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F

import bluejay

END_OF_TEXT = "<|endoftext|>"


@torch.no_grad()
def bits_per_byte(directory: Path, text_file: Path) -> float:
    """Bits per byte of a file: all documents in windows of n_positions tokens, half of each window as context.

    Every token after a document's first end-of-text is scored exactly once; bytes are those of the scored text.
    """
    engine = bluejay.load(str(directory), dtype="float32", backend="eager")
    model, tokenizer = engine.built.model, engine.tokenizer
    stride = model.config.n_positions // 2
    nats, num_bytes = 0.0, 0
    for document in text_file.read_text(encoding="utf-8").split(END_OF_TEXT):
        document = document.strip("\n")
        if not document:
            continue
        ids = torch.tensor([0, *tokenizer.encode(document)])
        num_bytes += len(document.encode())
        done = 1  # tokens already scored, the first is given
        for start in range(0, len(ids) - 1, stride):
            window = ids[start : start + 2 * stride + 1]
            if start + len(window) <= done:
                continue
            fresh = start + len(window) - done
            nats += F.cross_entropy(model(window[None, :-1])[0][-fresh:], window[-fresh:], reduction="sum").item()
            done = start + len(window)
        assert done == len(ids)
    return nats / math.log(2) / num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder with simple_core_valid.txt")
    args = parser.parse_args()
    weights = (args.model / "model.safetensors").read_bytes()
    figures = {
        "bits_per_byte_valid": bits_per_byte(args.model, args.data / "simple_core_valid.txt"),
        "bytes": len(weights),
        "sha256": hashlib.sha256(weights).hexdigest(),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
