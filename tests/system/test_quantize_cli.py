"""`bluejay quantize` and `bluejay evaluate`: directories that outlive their source, and processes that are killed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import bluejay
from bluejay import kernels
from bluejay.checkpoint import open_checkpoint
from bluejay.cli.evaluate import read_text
from bluejay.config import QuantSpec
from bluejay.quant import quantize_checkpoint, quantize_model

PACKED = (".codes", ".scales", ".biases")
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the cat sat on the mat and ate the rat. " * 40)
    return file


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


AFTERWARDS = """
import json, sys, torch, bluejay
directory, cache = sys.argv[1:]
engine = bluejay.load(directory, cache=cache, backend="eager")
logits = engine.model(torch.tensor([[7, 3, 44, 20, 9]]))
compiled = bluejay.load(
    directory, cache=cache, max_rows=1, prefill_buckets=(8,), slot_buckets=(), context=32
)
answers = [list(e.generate([7, 3, 44], max_new_tokens=6, ignore_eos=True).ids) for e in (engine, compiled)]
print(json.dumps({"logits": logits.flatten().tolist(), "answers": answers, "made": compiled.figures.compilations}))
"""


def test_the_whole_path(tiny_checkpoint: Path, tmp_path: Path, cli: Cli) -> None:
    """A test that reloads the original; files that are needed and not copied; other bytes the second time; packed
    tensors saved as floats (B-46). Quantize, save, and in a new process load, compile and generate."""
    (tiny_checkpoint / "generation_config.json").write_text('{"eos_token_id": 5}')
    engine = bluejay.load(str(tiny_checkpoint), backend="eager")
    quantize_model(engine.model, QuantSpec(group_size=16))
    kernels.ensure(tmp_path / "cache", force=True)  # as the new process does
    want = engine.model(torch.tensor([[7, 3, 44, 20, 9]]))
    del engine
    outs = tmp_path / "first", tmp_path / "second"
    for out in outs:
        code, printed, _ = cli("quantize", tiny_checkpoint, out, "--group-size", "16", "--json", "--quiet")
        assert code == 0
    assert json.loads(printed)["bits_per_weight"] == 6.0
    assert contents(outs[0]) == contents(outs[1])
    assert {"config.json", "tokenizer.json", "generation_config.json", "quantization.json", "README.md"} < set(
        contents(outs[0])
    )
    tiny_checkpoint.rename(tmp_path / "gone")
    done = subprocess.run(
        [sys.executable, "-c", AFTERWARDS, str(outs[0]), str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["logits"] == want.flatten().tolist()
    assert answer["answers"][0] == answer["answers"][1]
    assert answer["made"] == 2  # programs; the kernels are loaded by then


def test_bytes_of_nano(nano_dir: Path, tmp_path: Path, cli: Cli) -> None:
    """Packed weights that take more than 0.35 of fp16, or are stored as floats (B-46)."""
    assert cli("quantize", "nano", tmp_path / "out", "--quiet")[0] == 0
    original = load_file(nano_dir / "model.safetensors")
    stored = load_file(tmp_path / "out" / "model.int4.safetensors")
    layers = {name.removesuffix(".codes") for name in stored if name.endswith(".codes")}
    assert len(layers) == 37
    half_bytes = sum(2 * original[f"{layer}.weight"].numel() for layer in layers)
    packed = {name: tensor for name, tensor in stored.items() if name.endswith(PACKED)}
    assert sum(tensor.nbytes for tensor in packed.values()) < 0.35 * half_bytes
    assert all(t.dtype == torch.int32 for name, t in packed.items() if name.endswith(".codes"))
    assert torch.equal(stored["transformer.wte.weight"], original["transformer.wte.weight"])
    file = (tmp_path / "out" / "model.int4.safetensors").read_bytes()
    assert (8 + int.from_bytes(file[:8], "little")) % 64 == 0  # codes are mapped where vectors are read aligned


KILLED = """
import os, signal, sys
from bluejay.cli import run
from bluejay.checkpoint import open_checkpoint
from bluejay.cli.evaluate import read_text
from bluejay.cli.display import Display
limit, seen = int(sys.argv[1]), 0

def watch(self, event):
    global seen
    seen += event.name == "quantize"
    if seen == limit:
        os.kill(os.getpid(), signal.SIGKILL)

Display.__call__ = watch
sys.exit(run(sys.argv[2:]))
"""


@pytest.mark.parametrize("method", ["minmax", "gptq"])
def test_a_killed_process_is_gone_on_from(
    tiny_checkpoint: Path, tmp_path: Path, text_file: Path, cli: Cli, method: str
) -> None:
    """Half a directory where a whole one is expected; layers made twice, or from other inputs than in one go."""
    calibration = ["--calibration", str(text_file)] if method == "gptq" else []
    options = ["--method", method, "--group-size", "16", "--quiet", *calibration]
    assert cli("quantize", tiny_checkpoint, tmp_path / "straight", *options)[0] == 0
    out = tmp_path / "out"
    for limit in ("15", "21"):  # in the first block, then in the second
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, limit, "quantize", str(tiny_checkpoint), str(out), *options], check=False
        )
        assert killed.returncode == -signal.SIGKILL
        assert not out.exists()
    journal = tmp_path / ".out.partial" / "journal.jsonl"
    finished = len(journal.read_text().splitlines())
    with journal.open("a") as file:
        file.write('{"done": {"half a li')
    assert finished > 20
    assert cli("quantize", tiny_checkpoint, out, *options)[0] == 0
    assert contents(out) == contents(tmp_path / "straight")
    assert not (tmp_path / ".out.partial").exists()


def test_what_another_setting_left_is_not_used(
    tiny_checkpoint: Path, tmp_path: Path, text_file: Path, cli: Cli
) -> None:
    """Layers of an earlier run with other groups in the file of this one."""
    out = tmp_path / "out"
    subprocess.run(
        [sys.executable, "-c", KILLED, "20", "quantize", str(tiny_checkpoint), str(out), "--group-size", "32"],
        check=False,
    )
    for target in (out, tmp_path / "straight"):
        assert cli("quantize", tiny_checkpoint, target, "--group-size", "16", "--quiet")[0] == 0
    assert contents(out) == contents(tmp_path / "straight")


@pytest.mark.parametrize("damage", ["weights", "journal"])
def test_a_journal_without_its_weights_is_not_believed(
    tiny_checkpoint: Path, tmp_path: Path, cli: Cli, damage: str
) -> None:
    """Zeros where the weights were that somebody deleted from an unfinished directory; a traceback where the journal is
    what a disk kept of it."""
    out = tmp_path / "out"
    subprocess.run(
        [sys.executable, "-c", KILLED, "20", "quantize", str(tiny_checkpoint), str(out), "--group-size", "16"],
        check=False,
    )
    left = tmp_path / ".out.partial"
    if damage == "weights":
        (left / "model.int4.safetensors").unlink()
    else:
        lines = (left / "journal.jsonl").read_bytes().splitlines(keepends=True)
        (left / "journal.jsonl").write_bytes(b"".join([*lines[:5], b"\0\xff\0\n", *lines[6:]]))
    for target in (out, tmp_path / "straight"):
        assert cli("quantize", tiny_checkpoint, target, "--group-size", "16", "--quiet")[0] == 0
    assert contents(out) == contents(tmp_path / "straight")


def test_a_disk_that_gets_full_is_named(
    tiny_checkpoint: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "standard output: no space left", or an unexpected error, for a disk that cannot be written."""
    (tmp_path / "file").touch()
    code, _, err = cli("quantize", tiny_checkpoint, tmp_path / "file" / "out", "--group-size", "16")
    assert (code, "write a quantized checkpoint" in err, "unexpected" in err) == (1, True, False), err

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        code, _, err = cli("quantize", tiny_checkpoint, tmp_path / "out", "--group-size", "16")
    assert (code, "standard output" in err, "No space left" in err) == (1, False, True), err
    assert not (tmp_path / "out").exists()
    assert cli("quantize", tiny_checkpoint, tmp_path / "out", "--group-size", "16")[0] == 0


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["--group-size", "0"], 2, "group_size"),
        (["--group-size", "7"], 2, "group_size"),
        (["--group-size", "64"], 2, "32 input features"),
        (["--bits", "3"], 2, "bits"),
        (["--method", "best"], 2, "minmax"),
        (["--method", "gptq"], 2, "--calibration"),
        (["--calibration", "README.md"], 2, "--calibration"),
        (["--layers", "fc_inn", "--group-size", "16"], 2, "fc_in"),
    ],
)
def test_wrong_use_is_told_at_once(
    tiny_checkpoint: Path, tmp_path: Path, cli: Cli, options: list[str], code: int, word: str
) -> None:
    """A traceback, or a directory begun that cannot be finished (B-42)."""
    got, _, err = cli("quantize", tiny_checkpoint, tmp_path / "out", *options)
    assert (got, word in err) == (code, True), err
    assert "Traceback" not in err
    assert list(tmp_path.glob("*out*")) == []


def test_an_occupied_directory_is_left_alone(tiny_checkpoint: Path, tmp_path: Path, cli: Cli) -> None:
    """Somebody's files overwritten."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert cli("quantize", tiny_checkpoint, tmp_path / "out", "--group-size", "16")[0] == 1
    assert contents(tmp_path / "out") == {"mine.txt": b"mine"}


def test_quantize_on_load_and_evaluate(tiny_checkpoint: Path, tmp_path: Path, text_file: Path, cli: Cli) -> None:
    """`--quantize` that is not passed on; figures that JSON readers cannot read; a card without figures."""
    options = ["--backend", "eager", "--quiet", "--json"]
    out = tmp_path / "out"
    assert cli("quantize", tiny_checkpoint, out, "--group-size", "16", "--quiet", "--layers", "fc_*,lm_head")[0] == 0
    assert cli("quantize", tiny_checkpoint, tmp_path / "all", "--group-size", "16", "--quiet")[0] == 0

    def nll(*arguments: str) -> float:
        code, printed, err = cli("evaluate", *arguments, "--text", text_file, "--stride", "8", *options)
        assert code == 0, err
        return float(json.loads(printed)["nll"])

    assert nll(tmp_path / "all") == nll(tiny_checkpoint, "--quantize", "int4-g16")
    assert len({nll(tmp_path / "all"), nll(out), nll(tiny_checkpoint)}) == 3
    code, printed, _ = cli(
        "generate", "the cat", "--model", tiny_checkpoint, "--quantize", "int4-g16", "--max-new-tokens", "4", *options
    )
    saved = cli("generate", "the cat", "--model", tmp_path / "all", "--max-new-tokens", "4", *options)
    assert code == saved[0] == 0
    assert json.loads(printed)["completions"] == json.loads(saved[1])["completions"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--text", "absent.txt"], "absent.txt"),
        ([], "--text"),
        (["--task", "poetry"], "perplexity"),
        (["--quantize", "int3"], "int3"),
    ],
)
def test_evaluate_wrong_use(tiny_checkpoint: Path, text_file: Path, cli: Cli, options: list[str], word: str) -> None:
    """A mistake that is told after the weights were read, or with a traceback."""
    given = options if "--text" in options or not options else ["--text", text_file, *options]
    code, _, err = cli("evaluate", tiny_checkpoint, "--backend", "eager", *given)
    assert (code, word in err, "Traceback" in err) == (2, True, False), err


def test_the_card_has_figures(tiny_checkpoint: Path, tmp_path: Path, text_file: Path, cli: Cli) -> None:
    """A card that tells bytes and not what they cost in quality."""
    out = tmp_path / "out"
    scored = ("--evaluate", text_file, "--backend", "eager")
    code, printed, err = cli(
        "quantize", tiny_checkpoint, out, "--group-size", "16", "--method", "mse", "--json", *scored
    )
    assert code == 0, err
    quality = json.loads(printed)["perplexity"]
    assert list(quality) == ["original", "int4-g16", "int4-g16-mse"]
    card = (out / "README.md").read_text()
    for name, value in quality.items():
        assert f"| {name} | {value:.4f} |" in card
    assert os.listdir(out).count("README.md") == 1


def test_every_byte_of_a_text_counts(tmp_path: Path) -> None:
    """A text whose ends of lines were made into others before it was scored."""
    file = tmp_path / "lines.txt"
    file.write_bytes("the\r\ncat\u00e9\r".encode())
    assert read_text(file, "--text") == "the\r\ncat\u00e9\r"


EAGER_ON_AN_UNWRITABLE_STORE = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_cache_cli import bound_by_permissions
import bluejay
from bluejay import kernels
from bluejay.compile import Store, compile
from bluejay.config import CompileSpec

warnings = []
def observe(event):
    if event.name == "warning":
        warnings.append(event.fields["text"])

with bound_by_permissions():
    engine = bluejay.load(sys.argv[2], cache=sys.argv[3], backend="eager", observe=observe)
    text = engine.generate([[1, 2, 3]], max_new_tokens=2)
    compile(torch.nn.ReLU(), (torch.ones(2),), CompileSpec(), engine.built.programs.store, observe)
print(json.dumps([warnings, kernels.available_paths()[0]]))
"""


def test_eager_has_kernels_and_an_unwritable_store_is_told_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """`--backend eager` that multiplies by torch, many times slower, without a word; and a store that cannot be written
    named twice, for the kernels and for the programs."""
    packed, store = tmp_path / "packed", tmp_path / "store"
    quantize_checkpoint(open_checkpoint(tiny_checkpoint), packed, QuantSpec(group_size=16))
    store.mkdir(mode=0o555)
    arguments = [str(Path(__file__).parent), str(packed), str(store)]
    done = subprocess.run(
        [sys.executable, "-c", EAGER_ON_AN_UNWRITABLE_STORE, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    warnings, path = json.loads(done.stdout.splitlines()[-1])
    assert path not in ("torch", "reference")
    assert len(warnings) == 1
    assert str(store) in warnings[0]
