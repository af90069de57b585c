"""Peak memory of loading, measured from outside: one process for each case."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bluejay.checkpoint import open_checkpoint, save_checkpoint
from bluejay.config import ModelConfig
from bluejay.models import GPTJ

_MEASURE = """
import json, sys, torch
from bluejay.checkpoint import load_weights, open_checkpoint
from bluejay.models import GPTJ

def load(directory):
    checkpoint = open_checkpoint(directory)
    with torch.device("meta"):
        model = GPTJ(checkpoint.config)
    load_weights(model, checkpoint, dtype=getattr(torch, sys.argv[3]))
    return sum(parameter.nbytes for parameter in model.parameters()), model

def resident_bytes(field):  # not ru_maxrss, which starts at what the parent process had
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

load(sys.argv[1])  # a tiny one first: what torch allocates on first use is not the loader's
before = resident_bytes("VmRSS:")
num_bytes, model = load(sys.argv[2])
peak = resident_bytes("VmHWM:")
print(json.dumps({"growth": peak - before, "result": num_bytes}))
"""


def in_both_formats(directory: Path, config: ModelConfig) -> None:
    model = GPTJ(config)
    save_checkpoint(directory / "safetensors", model.state_dict(), config)
    (directory / "bin").mkdir()
    torch.save(model.state_dict(), directory / "bin" / "pytorch_model.bin")
    (directory / "bin" / "config.json").write_text((directory / "safetensors" / "config.json").read_text())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp32, 200 MB, half of it in two large matrices; and a tiny one."""
    directory = tmp_path_factory.mktemp("memory")
    shape = {"n_positions": 64, "n_layer": 2, "n_head": 8, "rotary_dim": 16}
    in_both_formats(directory / "tiny", ModelConfig(vocab_size=64, n_embd=128, **shape))
    in_both_formats(directory / "large", ModelConfig(vocab_size=15_000, n_embd=1024, **shape))
    assert 190e6 < open_checkpoint(directory / "large" / "bin").num_bytes < 230e6
    return directory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to measure resident memory")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["safetensors", "bin"])
def test_peak_memory(checkpoints: Path, layout: str, dtype: str) -> None:
    """A second copy of the weights, or a mapping's pages kept beside what was converted from them."""
    arguments = [str(checkpoints / size / layout) for size in ("tiny", "large")]
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *arguments, dtype], capture_output=True, text=True, check=True, timeout=120
    )
    measured = json.loads(done.stdout)
    assert 0.8 < measured["growth"] / measured["result"] < 1.1
