"""Make the bundled model: tokenizer, first stage from fresh weights, second stage, and its figure on held-out books.

    python recipes/nano/run.py --data ../shared/data/text

Training is `bluejay train` with the configurations beside this file; the same command goes on when interrupted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bluejay.config import preset

HERE = Path(__file__).parent
END_OF_TEXT = "<|endoftext|>"
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "unk_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
}


def make_shape(text_file: Path, folder: Path, vocab_size: int) -> None:
    """Write what fresh weights are drawn for: config.json, and a byte-level BPE trained on a text.

    Id 0 is the end of text; the 256 bytes are always present.
    """
    config = replace(preset("nano"), vocab_size=vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text_file.read_text(encoding="utf-8").split(END_OF_TEXT), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {**SETTINGS, "model_max_length": config.n_positions}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n")


def train(name: str, out: Path, *settings: str) -> None:
    """One stage, from its beginning or from its last checkpoint; one that is finished is left as it is."""
    if (out / "model").exists():
        return
    resume = ["--resume"] if any((out / "checkpoints").glob("update-*")) else []
    words = [word for setting in (f"out={out}", *settings) for word in ("--set", setting)]
    command = [sys.executable, "-m", "bluejay", "train", "--config", str(HERE / name), *words, *resume]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with simple_train.txt, simple_core_valid.txt")
    parser.add_argument("--out", type=Path, default=Path("build/nano"))
    parser.add_argument("--set", action="append", default=[], help="passed on to both stages of `bluejay train`")
    args = parser.parse_args()
    text, valid, shape = args.data / "simple_train.txt", args.data / "simple_core_valid.txt", args.out / "shape"
    if not (shape / "config.json").exists():
        make_shape(text, shape, preset("nano").vocab_size)
    data = (f"data.train={text}", f"data.valid={valid}", *args.set)
    train("first.yaml", args.out / "first", f"model={shape}", *data)
    train("longer.yaml", args.out / "second", f"model={args.out / 'first' / 'model'}", *data)
    score = [str(HERE / "score.py"), str(args.out / "second" / "model"), "--data", str(args.data)]
    subprocess.run([sys.executable, *score], check=True)


if __name__ == "__main__":
    main()
