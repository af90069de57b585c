"""The laws on a GPU, in one short file: `pytest tests/device`. Skipped, by name, where torch finds no CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bluejay
from bluejay.config import GenerationConfig
from bluejay.models import GPTJ, KVCache, positions_from_mask

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = ["Once upon a time", "The old man looked at the sea and", "No"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padded_rows_are_finite(tiny_model: GPTJ, dtype: torch.dtype) -> None:
    """B-28: attention kernels of GPUs have given NaN for rows that see nothing where a CPU does not."""
    model = tiny_model.to("cuda", dtype)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]], device="cuda")
    cache = KVCache(model.config, 4, 32, dtype, "cuda")
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    with torch.no_grad():
        logits = model(torch.ones(4, 6, dtype=torch.int64, device="cuda"), positions_from_mask(mask), cache)
    assert logits.isfinite().all()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("loop", ["host", "device"])
def test_ids_equal_the_cpus(nano_dir: Path, tmp_path: Path, backend: str, loop: str) -> None:
    """Laws 2 and 3 across devices: greedy, seeded sampling and beams, prompts of unequal lengths in one batch."""
    here: dict[str, Any] = {"max_rows": 4, "batch_buckets": (4,), "prefill_buckets": (16,), "dtype": "float32"}
    cpu = bluejay.load(str(nano_dir), device="cpu", backend="eager", **here)
    gpu = bluejay.load(str(nano_dir), device="cuda", backend=backend, loop=loop, cache=str(tmp_path), **here)
    for config in (
        GenerationConfig(max_new_tokens=24),
        GenerationConfig(max_new_tokens=24, temperature=0.9, top_p=0.95, seed=3),
        GenerationConfig(max_new_tokens=24, num_beams=3),
    ):
        for ours, theirs in zip(gpu.generate(PROMPTS, config), cpu.generate(PROMPTS, config), strict=True):
            assert ours.ids == theirs.ids
