"""Train the bundled `nano` model from scratch on a CPU: tokenizer, weights, figures and samples for its card.

    python recipes/nano/train.py --data ../shared/data/text --out build/nano

One seed, under half an hour on two idle cores with bf16 instructions. State is saved every few minutes; run the same
command again to go on after an interruption. The result is a Hugging Face checkpoint directory with its card.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import bluejay
from bluejay.checkpoint import save_checkpoint
from bluejay.config import ModelConfig
from bluejay.models import GPTJ

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE,
    n_positions=512,
    n_embd=256,
    n_layer=6,
    n_head=4,
    rotary_dim=32,
    bos_token_id=0,
    eos_token_ids=(0,),
    dtype="float32",
)


def train_tokenizer(text_file: Path, out: Path) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE entries; id 0 is end of text, the 256 bytes are always present."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    documents = text_file.read_text(encoding="utf-8").split(END_OF_TEXT)
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(out))
    return tokenizer


def encode_file(tokenizer: Tokenizer, text_file: Path) -> np.ndarray:
    """Token ids of all documents, an end-of-text before each: the stream that training windows are cut from."""
    ids: list[int] = []
    for document in text_file.read_text(encoding="utf-8").split(END_OF_TEXT):
        if document.strip():
            ids.append(0)
            for part in tokenizer.encode_batch(document.strip("\n").split("\n\n")):
                ids.extend(part.ids)
                ids.extend(tokenizer.encode("\n\n").ids)
    return np.array(ids, dtype=np.uint16)


def batch_of(stream: np.ndarray, step: int, batch: int, context: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Step `step` of a walk that visits every window once an epoch, in an order fixed by seed and epoch.

    Shapes:
        returns: inputs [batch, context], targets [batch, context]
    """
    windows = (len(stream) - 1 - context) // context
    rows = []
    for i in range(step * batch, (step + 1) * batch):
        epoch, index = divmod(i, windows)
        rng = np.random.default_rng((seed, epoch))
        offset = int(rng.integers(context))
        rows.append(int(_order(seed, epoch, windows)[index]) * context + offset)
    taken = np.stack([stream[start : start + context + 1] for start in rows]).astype(np.int64)
    return torch.from_numpy(taken[:, :-1].copy()), torch.from_numpy(taken[:, 1:].copy())


_orders: dict[tuple[int, int, int], np.ndarray] = {}


def _order(seed: int, epoch: int, windows: int) -> np.ndarray:
    key = (seed, epoch, windows)
    if key not in _orders:
        _orders.clear()
        _orders[key] = np.random.default_rng((seed, epoch, 1)).permutation(windows)
    return _orders[key]


def schedule(step: int, total: int, warmup: int) -> float:
    """Learning-rate factor: linear warm-up, flat, then linear to zero over the last 40 %."""
    if step < warmup:
        return (step + 1) / warmup
    return min(1.0, (total - step) / (0.4 * total))


@torch.no_grad()
def bits_per_byte(model: GPTJ, tokenizer: Tokenizer, text_file: Path, limit: int | None = None) -> float:
    """Bits per byte of a file: all documents in windows of n_positions tokens, half of each window as context.

    Every token after a document's first end-of-text is scored exactly once; bytes are those of the scored text.
    """
    context = model.config.n_positions
    stride = context // 2
    nats, num_bytes = 0.0, 0
    for document in text_file.read_text(encoding="utf-8").split(END_OF_TEXT):
        document = document.strip("\n")
        if not document:
            continue
        document = document[:limit]
        ids = torch.tensor([0, *tokenizer.encode(document).ids])
        num_bytes += len(document.encode())
        done = 1  # tokens already scored, the first is given
        for start in range(0, len(ids) - 1, stride):
            window = ids[start : start + context + 1]
            if start + len(window) <= done:
                continue
            logits = model(window[None, :-1])[0].float()
            fresh = start + len(window) - done
            nats += F.cross_entropy(logits[-fresh:], window[-fresh:], reduction="sum").item()
            done = start + len(window)
        assert done == len(ids)
    return nats / math.log(2) / num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with simple_train.txt, simple_core_valid.txt")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=16, help="windows per update")
    parser.add_argument("--micro-batch", type=int, default=8, help="windows at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--stop-after", type=int, help="end at this step as if interrupted (for tests)")
    args = parser.parse_args()
    train_file, valid_file = args.data / "simple_train.txt", args.data / "simple_core_valid.txt"
    for needed in (train_file, valid_file):
        if not needed.exists():
            parser.error(f"{needed} is absent; --data must hold simple_train.txt and simple_core_valid.txt")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)

    tokenizer_file = args.out / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file.exists() else None
    tokenizer = tokenizer or train_tokenizer(train_file, tokenizer_file)
    ids_file = args.out / "train_ids.npy"
    if not ids_file.exists():
        np.save(ids_file, encode_file(tokenizer, train_file))
    stream = np.load(ids_file)
    print(f"{len(stream):,} tokens, {train_file.stat().st_size / len(stream):.2f} bytes per token", flush=True)

    model = GPTJ(CONFIG)
    model.init_weights(torch.Generator().manual_seed(args.seed))
    matrices = [p for n, p in model.transformer.h.named_parameters() if p.dim() == 2]
    others = [p for n, p in model.named_parameters() if p.dim() == 1]
    tables = [model.transformer.wte.weight, model.lm_head.weight]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.02, momentum=0.95, adjust_lr_fn="original"),
        torch.optim.AdamW(
            [
                {"params": tables, "lr": 4e-3, "weight_decay": 0.01},
                {"params": others, "lr": 4e-3, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
        ),
    ]
    base_rates = [[group["lr"] for group in o.param_groups] for o in optimizers]

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    state_file = args.out / "state.pt"
    first = 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first = state["step"]
        print(f"going on at step {first}", flush=True)

    started, tokens = time.perf_counter(), 0
    for step in range(first, args.steps):
        inputs, targets = batch_of(stream, step, args.batch, CONFIG.n_positions, args.seed)
        for optimizer, rates in zip(optimizers, base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule(step, args.steps, warmup=100)
        loss = torch.zeros(())
        for part, wanted in zip(inputs.split(args.micro_batch), targets.split(args.micro_batch), strict=True):
            part_loss = loss_of(part, wanted) * (len(part) / args.batch)
            part_loss.backward()
            loss += part_loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        tokens += inputs.numel()
        if step % 20 == 0 or step + 1 == args.steps:
            rate = tokens / (time.perf_counter() - started)
            left = (args.steps - step - 1) * args.batch * CONFIG.n_positions / rate
            print(
                f"step {step}/{args.steps}  loss {loss.item():.4f}  {rate:,.0f} tokens/s  {left / 60:.0f} min left",
                flush=True,
            )
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step + 1}
            torch.save(state, state_file.with_suffix(".tmp"))
            os.replace(state_file.with_suffix(".tmp"), state_file)
            model.eval()
            print(f"  valid {bits_per_byte(model, tokenizer, valid_file, 8_000):.4f} bits per byte (part)", flush=True)
            model.train()
        if args.stop_after is not None and step + 1 >= args.stop_after:
            return
    finish(model.eval(), tokenizer, args, train_file, valid_file)


SAMPLES = (
    ("Once upon a time", 7),
    ("The old man looked at the sea and", 11),
    ('"Where are you going?" said the fox.', 13),
)

CARD = Path(__file__).parent / "card.md"


def finish(model: GPTJ, tokenizer: Tokenizer, args: argparse.Namespace, train_file: Path, valid_file: Path) -> None:
    """Write the checkpoint directory with its model card, and the card's figures as JSON."""
    directory = args.out / "model"
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONFIG.n_positions,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    save_checkpoint(directory, model.state_dict(), CONFIG, tokenizer_from=args.out, overwrite=True)
    weights = (directory / "model.safetensors").read_bytes()
    stream = np.load(args.out / "train_ids.npy", mmap_mode="r")
    tokens = args.steps * args.batch * CONFIG.n_positions
    figures = {
        "steps": args.steps,
        "batch": args.batch,
        "seed": args.seed,
        "tokens": tokens,
        "epochs": tokens / len(stream),
        "train_tokens": len(stream),
        "train_mb": train_file.stat().st_size / 1e6,
        "books": train_file.read_text(encoding="utf-8").count(END_OF_TEXT) + 1,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bits_per_byte_valid": bits_per_byte(model, tokenizer, valid_file),
        "bytes": len(weights),
        "sha256": hashlib.sha256(weights).hexdigest(),
        "torch": torch.__version__,
    }
    (args.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    engine = bluejay.load(str(directory))
    samples = []
    for prompt, seed in SAMPLES:
        answer = engine.generate(prompt, max_new_tokens=80, temperature=0.8, top_p=0.95, seed=seed)
        text = (prompt + answer.text).replace("\n", "\n> ")
        samples.append(f"> {text}\n")
    card = CARD.read_text(encoding="utf-8").format(**asdict(CONFIG), **figures, samples="\n".join(samples))
    (directory / "README.md").write_text(card, encoding="utf-8")
    print(card)


if __name__ == "__main__":
    main()
