"""Four bits end to end at 6B width: quantizing, loading, memory, and decoding against bf16.

    python benchmarks/quantized.py make --layers 28       # random weights, quantized while they are drawn: 3.7 GB
    python benchmarks/quantized.py start --layers 28      # load and first token from a warm page cache
    python benchmarks/quantized.py memory --layers 28 --context 512
    python benchmarks/quantized.py decode --layers 8      # int4 against bf16, in turns
    python benchmarks/quantized.py record                 # all that was measured, as one record

Each step keeps its figures beside the models in --folder, so that a machine that is shared is taken for minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import NANO, buffer_to_read, config_dict, in_fresh_process, measure_read, write_record

import bluejay
from bluejay.checkpoint import TensorInfo, save_checkpoint
from bluejay.config import GenerationConfig, ModelConfig, QuantSpec, preset
from bluejay.generate import Engine
from bluejay.models import GPTJ, costs
from bluejay.quant import quantize_checkpoint

# Long enough for any prompt of the benchmark; the content of random models is noise whatever is asked.
PROMPT = [300 + i % 3000 for i in range(4096)]


class Drawn:
    """A checkpoint that does not exist: what `quantize_checkpoint` asks of one, answered with random bf16 numbers."""

    quantization = None
    dtype = torch.bfloat16

    def __init__(self, config: ModelConfig, directory: Path) -> None:
        self.config, self.directory = dataclasses.replace(config, dtype="bfloat16"), directory
        with torch.device("meta"):
            shapes = {name: tuple(p.shape) for name, p in GPTJ(config).named_parameters()}
        self.tensors = {n: TensorInfo(n, shape, torch.bfloat16, "config.json") for n, shape in shapes.items()}
        self.seconds = self.cpu_seconds = 0.0  # spent on drawing
        self._generator = torch.Generator().manual_seed(0)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        started, busy = time.perf_counter(), time.process_time()
        shape = (stop - start, *self.tensors[name].shape[1:])
        if len(shape) > 1:
            drawn = torch.empty(shape).normal_(0, 0.02, generator=self._generator).bfloat16()
        else:
            drawn = torch.full(shape, float(name.endswith(("ln_1.weight", "ln_f.weight"))), dtype=torch.bfloat16)
        self.seconds += time.perf_counter() - started
        self.cpu_seconds += time.process_time() - busy
        return drawn


def config_of(layers: int) -> ModelConfig:
    return dataclasses.replace(preset("gptj-6b"), n_layer=layers)


def packed_folder(options: argparse.Namespace) -> Path:
    return options.folder / f"int4-{options.layers}"


def make(options: argparse.Namespace) -> dict[str, Any]:
    """Draw and quantize; what drawing takes is not counted."""
    tokenizer = options.folder / "tokenizer"
    tokenizer.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(NANO / name, tokenizer / name)
    target = packed_folder(options)
    shutil.rmtree(target, ignore_errors=True)
    source: Any = Drawn(config_of(options.layers), tokenizer)
    started, busy = time.perf_counter(), time.process_time()
    quantize_checkpoint(source, target, QuantSpec(group_size=options.group))
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    return {
        "quantize_seconds": seconds - source.seconds,
        "quantize_cpu_seconds": busy - source.cpu_seconds,
        "drawing_seconds": source.seconds,
        "threads": torch.get_num_threads(),
        "file_bytes": (target / "model.int4.safetensors").stat().st_size,
        "peak_memory_bytes": peak_bytes(),
    }


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Load and first token in fresh processes; the first one compiles and fills the page cache and is not counted."""
    arguments = (str(packed_folder(options)), str(options.folder / "cache"), "512", "16", "1", "bfloat16")
    runs = [in_fresh_process(Path(__file__), "child", *arguments) for _ in range(1 + options.rounds)][1:]
    return {
        name: statistics.median(run[name] for run in runs) for name in ("load_seconds", "first_token_seconds", "total")
    }


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of a fresh process that fills a context of tokens."""
    new = 16
    arguments = (str(options.context), str(options.context - new), str(new), "bfloat16")
    found = in_fresh_process(
        Path(__file__), "child", str(packed_folder(options)), str(options.folder / "cache"), *arguments
    )
    return {f"context_{options.context}": found}


def decode(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds a token of int4 and bf16, compiled, one row; they take turns."""
    config = config_of(options.layers)
    plain = options.folder / f"bf16-{options.layers}"
    if not plain.is_dir():
        source = Drawn(config, options.folder)
        tensors = {name: source.read_rows(name, 0, info.shape[0]) for name, info in source.tensors.items()}
        save_checkpoint(plain, tensors, source.config, tokenizer_from=NANO)
        del tensors
    cache = str(options.folder / "cache")
    buffer, reads = buffer_to_read(), []
    engines = {
        name: bluejay.load(str(folder), cache=cache, context=256, max_rows=1, dtype="bfloat16")
        for name, folder in (("int4", packed_folder(options)), ("bf16", plain))
    }
    asked = GenerationConfig(max_new_tokens=17, ignore_eos=True)
    for engine in engines.values():
        engine.generate(PROMPT[:16], asked)
    rounds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.rounds):
        reads.append(measure_read(buffer))
        for name, engine in engines.items():
            before = engine.figures
            engine.generate(PROMPT[:16], asked)
            after = engine.figures
            tokens = after.decoded_tokens - before.decoded_tokens
            rounds[name].append((after.decode_seconds - before.decode_seconds) / tokens)
    seconds = {name: statistics.median(values) for name, values in rounds.items()}
    read = statistics.median(reads)
    bytes_read = {
        "int4": sum(b.nbytes for b in engines["int4"].model.buffers()),
        "bf16": costs.weight_bytes_read_per_decoded_token(config, 2),
    }
    return {
        "ceilings": {"read_bytes_per_second": read},
        "seconds_per_token": seconds,
        "speedup": seconds["bf16"] / seconds["int4"],
        "share_of_read_bandwidth": {name: bytes_read[name] / seconds[name] / read for name in seconds},
        "bytes_read_per_token": bytes_read,
    }


def child(folder: str, cache: str, context: str, prompt: str, new: str, dtype: str) -> None:
    """One fresh process: load, first token, the rest; its last line is the answer."""
    started = time.perf_counter()
    engine: Engine = bluejay.load(folder, cache=cache, context=int(context), max_rows=1, dtype=dtype)
    loaded = time.perf_counter()
    result = engine.generate(PROMPT[: int(prompt)], max_new_tokens=int(new), ignore_eos=True)
    assert result.first_token_seconds is not None
    figures = engine.figures
    answer = {
        "load_seconds": loaded - started,
        "first_token_seconds": result.first_token_seconds,
        "total": loaded - started + result.first_token_seconds,
        "peak_memory_bytes": peak_bytes(),
        "cache_bytes": costs.kv_bytes_per_token(engine.model.config, 2) * int(context),
        "packed_bytes": sum(b.nbytes for b in engine.model.buffers()),
        "prefill_tokens_per_second": figures.prompt_tokens / figures.prefill_seconds,
        "decode_seconds_per_token": figures.decode_seconds / max(figures.decoded_tokens, 1),
        "compilations": figures.compilations,
    }
    print(json.dumps(answer))


def peak_bytes() -> int:
    """This process's own high-water mark; `ru_maxrss` begins with its parent's."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


STEPS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "make": make,
    "start": start,
    "memory": memory,
    "decode": decode,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=[*STEPS, "record"])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bluejay-quantized"))
    options = parser.parse_args()
    figures_file = options.folder / "figures.json"
    figures = json.loads(figures_file.read_text()) if figures_file.exists() else {}
    if options.step == "record":
        write_record("quantized", {"config": config_dict(config_of(28)), **figures})
        return
    found = STEPS[options.step](options)
    key = f"{options.step}_{options.layers}_layers"
    figures[key] = {**(figures.get(key, {}) if options.step == "memory" else {}), **found}
    figures_file.write_text(json.dumps(figures, indent=2))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    import sys

    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
    else:
        main()
