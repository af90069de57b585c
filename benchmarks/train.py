"""Training: tokens/s against transformers.Trainer, model FLOP/s against the machine's matrix rate, memory of LoRA.

    python benchmarks/train.py             # all three; about three minutes on two idle cores
    python benchmarks/train.py --part nano

Contestants run in processes of their own and take turns. Both train the bundled model's shape on the same blocks of
random ids with AdamW in bf16, batch 8 x 512; only real tokens count, and compiling is reported apart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import NANO, ceilings, config_dict, in_fresh_process, write_record

from bluejay.build import build, build_fresh
from bluejay.config import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    preset,
)
from bluejay.machine import measure_gemm, peak_memory_bytes
from bluejay.models import costs
from bluejay.train import Blocks, Samples, Trainer

LENGTH, BATCH, WARM_UP, RUNS, UPDATES = 512, 8, 2, 5, 2
SIX_B = replace(preset("gptj-6b"), n_layer=2, vocab_size=4096, bos_token_id=0, eos_token_ids=(0,))


def blocks(num: int, length: int, vocab_size: int) -> Blocks:
    ids = np.random.default_rng(0).integers(1, vocab_size, num * length + 1).tolist()
    return Blocks(Samples.of([(ids, 0)], vocab_size), length)


def run_of(steps: int, out: str, **more: Any) -> TrainConfig:
    return TrainConfig(
        out=out,
        data=DataConfig(layout="blocks", length=LENGTH),
        steps=steps,
        micro_batch=BATCH,
        precision="bf16",
        optimizer=OptimizerConfig(learning_rate=1e-4, weight_decay=0.01),
        **more,
    )


def timed(trainer: Trainer, updates: int) -> list[float]:
    """Seconds of each update after the warm-up, compiling apart."""
    seconds: list[float] = []
    trainer._observe = lambda e: seconds.append(e.fields["seconds"]) if e.name == "train.update" else None
    trainer.save = lambda: None  # type: ignore[assignment,method-assign,return-value]
    trainer._write_result = lambda: Path()  # type: ignore[method-assign]
    trainer.run()
    return seconds[-updates:]


def nano_ours(out: str) -> dict[str, Any]:
    updates = RUNS * UPDATES
    trainer = Trainer(
        build(RunConfig(model="nano", dtype="float32")), run_of(WARM_UP + updates, out), blocks(200, LENGTH, 4096)
    )
    seconds = timed(trainer, updates)
    return {"tokens_per_second": rates(seconds), "compile_seconds": trainer._step.compile_seconds}  # type: ignore[attr-defined]


def nano_theirs(out: str) -> dict[str, Any]:
    import transformers

    updates = RUNS * UPDATES
    ids = np.random.default_rng(0).integers(1, 4096, (200, LENGTH))
    data = [{"input_ids": row, "labels": row} for row in torch.from_numpy(ids)]
    model = transformers.GPTJForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    settings = transformers.TrainingArguments(
        out,
        per_device_train_batch_size=BATCH,
        max_steps=WARM_UP + updates,
        learning_rate=1e-4,
        weight_decay=0.01,
        bf16=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    marks: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            marks.append(time.perf_counter())

    transformers.Trainer(model=model, args=settings, train_dataset=data, callbacks=[Clock()]).train()
    seconds = [b - a for a, b in itertools.pairwise(marks)]
    return {"tokens_per_second": rates(seconds[-updates:])}


def rates(seconds: list[float]) -> list[float]:
    """Tokens/s of each of RUNS runs of UPDATES updates."""
    parts = [seconds[i * UPDATES : (i + 1) * UPDATES] for i in range(RUNS)]
    return [BATCH * LENGTH * len(part) / sum(part) for part in parts]


def wide(out: str) -> dict[str, Any]:
    """Model FLOP/s of two layers of 6B width, full fine-tuning, against the matrix rate in the same process.

    An update of 2,048 tokens, the micro-batch of the preset `gptj-6b-full`, which has sixteen of them in an update.
    """
    rows, updates = 4, 5
    gemm = [measure_gemm(torch.bfloat16)]
    built = fresh(SIX_B, out)
    config = replace(run_of(WARM_UP + updates, out), micro_batch=rows)
    trainer = Trainer(built, config, blocks(WARM_UP * rows + updates * rows, LENGTH, SIX_B.vocab_size))
    seconds = timed(trainer, updates)
    gemm.append(measure_gemm(torch.bfloat16))
    forward = rows * costs.prefill_flops(SIX_B, LENGTH, num_logits=LENGTH)
    return {
        "tokens_per_update": rows * LENGTH,
        "flops": 3 * forward / statistics.median(seconds),
        "gemm_flops": max(gemm),
        "update_seconds": seconds,
        "compile_seconds": trainer._step.compile_seconds,  # type: ignore[attr-defined]
        "peak_memory_bytes": peak_memory_bytes(),
    }


def lora(out: str) -> dict[str, Any]:
    """Peak memory of a LoRA step on two layers of 6B width, over frozen weights and saved activations."""
    rows = 1
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    built = fresh(SIX_B, out)
    built.model.to(torch.bfloat16)
    frozen = sum(parameter.nbytes for parameter in built.model.parameters())
    config = replace(run_of(2, out, compile="eager"), micro_batch=rows, lora=LoraConfig(rank=8))
    trainer = Trainer(built, config, blocks(8, LENGTH, SIX_B.vocab_size))
    weights = {tensor.untyped_storage().data_ptr() for tensor in built.model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    reset_peak()
    batch = trainer.reader.batches(0)[0]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trainer._step.gradients([batch], torch.tensor(1e-3), [0])
    trainer.weights.forget_gradients()
    timed(trainer, 1)
    peak = peak_now() - before
    ideal = frozen + sum(saved.values())
    return {"peak_bytes": peak, "frozen_bytes": frozen, "activation_bytes": sum(saved.values()), "ratio": peak / ideal}


def reset_peak() -> None:
    """Let the kernel's high-water mark of this process begin anew: building the model is not the step."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_now() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def fresh(config: ModelConfig, out: str) -> Any:
    """A model of a shape with fresh weights, and the bundled tokenizer."""
    folder = Path(out) / "shape"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((NANO / name).read_bytes())
    return build_fresh(RunConfig(model=str(folder)), seed=0)


PARTS = {"nano-ours": nano_ours, "nano-theirs": nano_theirs, "wide": wide, "lora": lora}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("nano", "wide", "lora"))
    parser.add_argument("--contestant", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        with tempfile.TemporaryDirectory(prefix="bluejay-bench-") as out:
            print(json.dumps(PARTS[args.contestant](out)))
        return
    script = Path(__file__)
    found: dict[str, Any] = {}
    if args.part in (None, "nano"):
        rounds = [
            {name: in_fresh_process(script, "--contestant", name) for name in ("nano-ours", "nano-theirs")}
            for _ in range(2)
        ]
        medians = {
            name: statistics.median(rate for one in rounds for rate in one[name]["tokens_per_second"])
            for name in ("nano-ours", "nano-theirs")
        }
        ratio = medians["nano-ours"] / medians["nano-theirs"]
        found["nano"] = {
            "tokens_per_second": medians,
            "ratio": ratio,
            "compile_seconds": rounds[0]["nano-ours"]["compile_seconds"],
            "runs": rounds,
        }
        print(f"nano: {medians['nano-ours']:,.0f} tokens/s, {ratio:.2f}x transformers.Trainer")
    if args.part in (None, "wide"):
        found["wide"] = in_fresh_process(script, "--contestant", "wide")
        found["wide"]["share"] = found["wide"]["flops"] / found["wide"]["gemm_flops"]
        print(f"wide: {found['wide']['flops'] / 1e9:,.0f} GFLOP/s, {found['wide']['share']:.0%} of the matrix rate")
    if args.part in (None, "lora"):
        found["lora"] = in_fresh_process(script, "--contestant", "lora")
        print(f"lora: {found['lora']['ratio']:.2f}x of frozen weights and activations")
    body = {
        "ceilings": ceilings((torch.bfloat16,)),
        "threads": torch.get_num_threads(),
        "config": {"nano": asdict(run_of(WARM_UP + RUNS * UPDATES, "")), "wide": config_dict(SIX_B)},
        **found,
    }
    write_record("train" if args.part is None else f"train-{args.part}", body)


if __name__ == "__main__":
    main()
