"""What compiling costs and gives: nano against eager and transformers, and 28 layers of 6B width against eager.

    python benchmarks/compiled.py nano
    python benchmarks/compiled.py large --layers 28      # needs 13 GB of free memory

Contestants take turns in one process (start-up: in fresh ones); compiling is timed apart from running.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import NANO, ceilings, config_dict, fill_randomly, write_record

import bluejay
from bluejay.build import Built, Programs
from bluejay.config import CompileSpec, GenerationConfig, RunConfig, preset
from bluejay.generate import Engine, compile_ahead
from bluejay.models import GPTJ, costs

PROMPT = list(range(300, 316))


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def take_turns(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each contestant; they run in turn, so that a busy moment meets all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, work in contestants.items():
            seconds[name].append(seconds_of(work))
    return {name: statistics.median(values) for name, values in seconds.items()}


def run_nano(rounds: int, new: int) -> None:
    from transformers import GPTJForCausalLM

    config = GenerationConfig(max_new_tokens=new, ignore_eos=True)
    with tempfile.TemporaryDirectory() as cache:
        compiled = bluejay.load("nano", max_rows=1, cache=cache)
        compile_seconds = seconds_of(lambda: compiled.generate(PROMPT, config))
        eager = bluejay.load("nano", max_rows=1, backend="eager")
        eager.generate(PROMPT, config)
        device = bluejay.load("nano", max_rows=1, cache=cache, loop="device", iterations=16)
        device.generate(PROMPT, config)
        peer = GPTJForCausalLM.from_pretrained(NANO).eval()
        ids = torch.tensor([PROMPT])

        def run_peer() -> None:
            with torch.inference_mode():
                peer.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=new,
                    min_new_tokens=new,
                    pad_token_id=0,
                )

        run_peer()
        seconds = take_turns(
            {
                "compiled": lambda: compiled.generate(PROMPT, config),
                "compiled_device_loop": lambda: device.generate(PROMPT, config),
                "eager": lambda: eager.generate(PROMPT, config),
                "transformers": run_peer,
            },
            rounds,
        )
        start = start_up(cache, rounds)
    rates = {name: new / value for name, value in seconds.items()}
    ceiling = ceilings()
    floor = costs.weight_bytes_read_per_decoded_token(preset("nano"), 4) / ceiling["read_bytes_per_second"]
    summary = {
        "compiled_over_eager": rates["compiled"] / rates["eager"],
        "compiled_over_transformers": rates["compiled"] / rates["transformers"],
        "device_loop_over_host_loop": rates["compiled_device_loop"] / rates["compiled"],
        "decode_floor_tokens_per_second": 1 / floor,
        **start,
    }
    report(
        "compiled-nano",
        {"new": new, "prompt": len(PROMPT), "rounds": rounds, "model": config_dict(preset("nano"))},
        {"tokens_per_second": rates, "cold_first_run_seconds": compile_seconds, "ceilings": ceiling},
        summary,
    )


def start_up(cache: str, rounds: int) -> dict[str, float]:
    """From starting a process to its first token with a warm store, against importing torch and reading the weights."""
    first_token = (
        f"import bluejay; e = bluejay.load('nano', max_rows=1, cache={cache!r});"
        "next(e.stream(list(range(300, 316)), max_new_tokens=64, ignore_eos=True))"
    )
    weights = str(Path(NANO) / "model.safetensors")
    contestants = {
        "first_token": lambda: subprocess.run([sys.executable, "-c", first_token], check=True),
        "import_torch": lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True),
        "read_weights": lambda: Path(weights).read_bytes(),
    }
    seconds = take_turns(contestants, rounds)
    bound = seconds["import_torch"] + seconds["read_weights"]
    return {
        "first_token_seconds": seconds["first_token"],
        "import_torch_and_read_seconds": bound,
        "first_token_over_import": seconds["first_token"] / bound,
    }


def run_large(layers: int, rounds: int, new: int, context: int) -> None:
    config = replace(preset("gptj-6b"), n_layer=layers, dtype="bfloat16")
    with tempfile.TemporaryDirectory() as cache:
        run = RunConfig("random", max_rows=1, context=context, cache=cache, slot_buckets=(context,))
        with torch.device("meta"):
            model = GPTJ(config).to(torch.bfloat16).eval().requires_grad_(False)
        hollow = built_of(run, model, has_weights=False)
        started = time.perf_counter()
        programs = compile_ahead(hollow)
        total = time.perf_counter() - started
        print(f"{len(programs)} programs in {total:.1f} s", flush=True)
        fill_randomly(model)
        compiled = Engine(built_of(run, model))
        eager = Engine(built_of(replace(run, compile=CompileSpec(backend="eager")), model))
        asked = GenerationConfig(max_new_tokens=new, ignore_eos=True)
        for engine in (compiled, eager):
            engine.generate(PROMPT, asked, max_new_tokens=3)
        warm_compilations = compiled.figures.compilations
        per_token: dict[str, list[float]] = {"compiled": [], "eager": []}
        ceiling = []
        for number in range(rounds):
            ceiling.append(ceilings((torch.bfloat16,)))
            for name, engine in (("compiled", compiled), ("eager", eager)):
                before = engine.figures
                engine.generate(PROMPT, asked)
                after = engine.figures
                seconds = after.decode_seconds - before.decode_seconds
                per_token[name].append(seconds / (after.decoded_tokens - before.decoded_tokens))
            ours, theirs = per_token["compiled"][-1], per_token["eager"][-1]
            print(f"round {number + 1}: {ours:.3f} s against {theirs:.3f} s", flush=True)
    median = {name: statistics.median(values) for name, values in per_token.items()}
    read = statistics.median(c["read_bytes_per_second"] for c in ceiling)
    floor = costs.weight_bytes_read_per_decoded_token(config, 2) / read
    report(
        f"compiled-{layers}-layers",
        {"model": config_dict(config), "context": context, "new": new, "rounds": rounds},
        {"programs": programs, "decode_seconds_per_token": median, "read_bytes_per_second": read},
        {
            "compile_seconds_all_programs": total,
            "warm_compilations": warm_compilations,
            "decode_over_eager": median["compiled"] / median["eager"],
            "decode_floor_seconds": floor,
            "decode_bandwidth_share": floor / median["compiled"],
        },
    )


def built_of(run: RunConfig, model: GPTJ, has_weights: bool = True) -> Built:
    tokenizer: Any = _NoText()
    device = torch.device("cpu")
    return Built(run, model, tokenizer, Programs(run), device, torch.bfloat16, run.context, (), has_weights)


class _NoText:
    special_ids: frozenset[int] = frozenset()
    eos_id = None

    def token_bytes(self, token: int) -> bytes:
        return b"x"


def report(name: str, config: dict[str, Any], body: dict[str, Any], summary: dict[str, Any]) -> None:
    for key, value in summary.items():
        print(f"{key:36} {value:,.4g}")
    write_record(name, {"config": config, **body, "summary": summary})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("nano", "large"))
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, help="new tokens (128 for nano, 6 for large)")
    parser.add_argument("--context", type=int, default=512, help="tokens a row may hold (large)")
    args = parser.parse_args()
    if args.what == "nano":
        run_nano(args.rounds, args.new or 128)
    else:
        run_large(args.layers, args.rounds, args.new or 6, args.context)


if __name__ == "__main__":
    main()
