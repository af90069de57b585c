"""Peak memory of quantizing and of loading, measured from outside: one process for each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bluejay.checkpoint import open_checkpoint, save_checkpoint
from bluejay.config import ModelConfig, QuantSpec
from bluejay.models import GPTJ
from bluejay.quant import quantize_checkpoint

_MEASURE = """
import json, sys, torch
from bluejay.checkpoint import load_weights, open_checkpoint
from bluejay.config import QuantSpec
from bluejay.models import GPTJ
from bluejay.quant import QuantizedSource, quantize_checkpoint, quantize_model

def convert(directory, target):
    quantize_checkpoint(open_checkpoint(directory), target, QuantSpec())

def load(directory, target, large_pages=False):
    checkpoint = open_checkpoint(directory)
    source = checkpoint if checkpoint.quantization else QuantizedSource(checkpoint, QuantSpec())
    with torch.device("meta"):
        model = GPTJ(source.config)
    quantize_model(model, QuantSpec())
    load_weights(model, source, large_pages=large_pages)
    return model

def place(directory, target):
    return load(directory, target, large_pages=True)

def resident_bytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

work = {"convert": convert, "load": load, "place": place}[sys.argv[1]]
tiny, large, target = sys.argv[2:]
work(tiny, target + "-tiny")  # what torch allocates on first use is not the quantizer's
before = resident_bytes("VmRSS:")
kept = work(large, target)
print(json.dumps(resident_bytes("VmHWM:") - before))
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp32, 120 MB plain and 18 MB packed, most of it in two tensors; and a tiny one."""
    directory = tmp_path_factory.mktemp("memory")
    for name, config in (
        ("tiny", ModelConfig(64, 64, 128, 1, 8, 16)),
        ("large", ModelConfig(12_000, 64, 1024, 1, 8, 16)),
    ):
        save_checkpoint(directory / name, GPTJ(config).state_dict(), config)
        quantize_checkpoint(open_checkpoint(directory / name), directory / f"{name}-packed", QuantSpec())
    assert open_checkpoint(directory / "large").num_bytes > 120e6
    return directory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to measure resident memory")
@pytest.mark.parametrize(
    ("work", "source", "limit_mb"),
    # Packed: 14 MB, the embedding, which stays: 49 MB, and pieces of it all, given back when the allocator likes
    # (converting: 24 to 30 MB in five runs). Both models: 140 MB.
    [("convert", "", 40), ("load", "", 110), ("load", "-packed", 25), ("place", "-packed", 25)],
)
def test_peak_memory(checkpoints: Path, tmp_path: Path, work: str, source: str, limit_mb: int) -> None:
    """The whole model held while it is packed, pages of the source that stay mapped, or a packed model that is held
    twice: in its file's pages and in those it was copied to."""
    arguments = [str(checkpoints / f"{size}{source}") for size in ("tiny", "large")]
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, work, *arguments, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < limit_mb * 10**6
