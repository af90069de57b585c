"""Generation from a checkpoint of 6B width against transformers: load, prefill, decode step, peak memory.

    python benchmarks/generate.py --layers 8 --prompt 64 --new 24 --rounds 5

Needs about 4 GB of free disk for the random checkpoint, and `transformers` (extra `dev`). Every contestant runs in a
process of its own and in turn; the ceilings are measured between them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from common import ceilings, config_dict, in_fresh_process, random_checkpoint, write_record

import bluejay
from bluejay.config import preset
from bluejay.machine import peak_memory_bytes
from bluejay.models import costs

PROMPT_SEED = 7


def prompt_ids(length: int) -> list[int]:
    return torch.randint(1000, 50000, (length,), generator=torch.Generator().manual_seed(PROMPT_SEED)).tolist()


def run_bluejay(directory: str, prompt: int, new: int, settings: str) -> dict[str, float]:
    """One process of ours: seconds to load, to read the prompt, and per decoded token."""
    before = peak_memory_bytes()
    started = time.perf_counter()
    engine = bluejay.load(directory, max_rows=1, **json.loads(settings))
    loaded = time.perf_counter() - started
    engine.generate(prompt_ids(prompt), max_new_tokens=3, ignore_eos=True)  # warm-up
    seconds = []
    first = 0.0
    for _ in range(3):
        marks = []
        request = engine.submit(prompt_ids(prompt), bluejay.GenerationConfig(max_new_tokens=new, ignore_eos=True))
        while not request.finished:
            engine.step()
            marks.append(time.perf_counter())
        first = engine.collect(request).first_token_seconds or 0.0
        seconds += [b - a for a, b in pairwise(marks[1:])]
    return {
        "load_seconds": loaded,
        "first_token_seconds": first,
        "decode_seconds_per_token": statistics.median(seconds),
        "peak_bytes": peak_memory_bytes(),
        "import_bytes": before,
    }


@torch.inference_mode()
def run_transformers(directory: str, prompt: int, new: int) -> dict[str, float]:
    """One process of transformers: the same figures, from its own forward with its own cache."""
    from transformers import GPTJForCausalLM

    before = peak_memory_bytes()
    started = time.perf_counter()
    model = GPTJForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    loaded = time.perf_counter() - started
    ids = torch.tensor([prompt_ids(prompt)])
    seconds = []
    first = 0.0
    for attempt in range(4):
        began = time.perf_counter()
        out = model(ids, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        first = time.perf_counter() - began
        for _ in range(3 if attempt == 0 else new - 1):
            began = time.perf_counter()
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            if attempt:
                seconds.append(time.perf_counter() - began)
    return {
        "load_seconds": loaded,
        "first_token_seconds": first,
        "decode_seconds_per_token": statistics.median(seconds),
        "peak_bytes": peak_memory_bytes(),
        "import_bytes": before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--new", type=int, default=24, help="new tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", default="{}", help="further settings of bluejay.load, as JSON")
    parser.add_argument("--contestant", choices=("bluejay", "transformers"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant == "bluejay":
        print(json.dumps(run_bluejay(args.directory, args.prompt, args.new, args.settings)))
        return
    if args.contestant == "transformers":
        print(json.dumps(run_transformers(args.directory, args.prompt, args.new)))
        return

    config = replace(preset("gptj-6b"), n_layer=args.layers, dtype="bfloat16")
    weights = costs.weight_bytes(config, 2)
    read = costs.weight_bytes_read_per_decoded_token(config, 2)
    rounds: dict[str, list[dict[str, float]]] = {"bluejay": [], "transformers": [], "ceilings": []}
    with random_checkpoint(config, torch.bfloat16) as directory:
        print(f"{weights / 1e9:.2f} GB of weights; a decoded token reads {read / 1e9:.2f} GB of them")
        for number in range(args.rounds):
            rounds["ceilings"].append(ceilings((torch.bfloat16,)))
            for name in ("bluejay", "transformers"):
                options = ["--contestant", name, "--directory", str(directory), "--settings", args.settings]
                options += ["--prompt", str(args.prompt), "--new", str(args.new)]
                rounds[name].append(in_fresh_process(Path(__file__), *options))
            ours, theirs = rounds["bluejay"][-1], rounds["transformers"][-1]
            print(
                f"round {number + 1}: decode {ours['decode_seconds_per_token']:.4f} s against "
                f"{theirs['decode_seconds_per_token']:.4f} s, first token {ours['first_token_seconds']:.3f} s against "
                f"{theirs['first_token_seconds']:.3f} s",
                flush=True,
            )
    median = {name: {key: statistics.median(r[key] for r in runs) for key in runs[0]} for name, runs in rounds.items()}
    ours, theirs, ceiling = median["bluejay"], median["transformers"], median["ceilings"]
    floor = read / ceiling["read_bytes_per_second"]
    summary = {
        "weight_bytes": weights,
        "weight_bytes_read_per_token": read,
        "decode_floor_seconds": floor,
        "decode_over_transformers": ours["decode_seconds_per_token"] / theirs["decode_seconds_per_token"],
        "decode_bandwidth_share": floor / ours["decode_seconds_per_token"],
        "first_token_over_transformers": ours["first_token_seconds"] / theirs["first_token_seconds"],
        "prefill_flops_per_second": costs.prefill_flops(config, args.prompt) / ours["first_token_seconds"],
        "peak_over_weights": ours["peak_bytes"] / weights,
        "peak_over_weights_transformers": theirs["peak_bytes"] / weights,
    }
    for key, value in summary.items():
        print(f"{key:32} {value:,.4g}")
    write_record(
        f"generate-{args.layers}-layers",
        {
            "config": {"model": config_dict(config), "prompt": args.prompt, "new": args.new, "settings": args.settings},
            "rounds": args.rounds,
            "medians": median,
            "summary": summary,
        },
    )


if __name__ == "__main__":
    main()
