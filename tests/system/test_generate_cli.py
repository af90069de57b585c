"""`bluejay generate` as people use it: real processes for what only they can show, the entry point for the rest."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bluejay
from bluejay.cli import run
from bluejay.errors import RequestError

EAGER = ("--backend", "eager")  # what is tested here does not depend on compiled programs
COMMAND = (sys.executable, "-m", "bluejay", "generate", *EAGER)
PROMPT = "Once upon a time"
Answer = tuple[int, str, str]  # exit code, standard output, standard error
Cli = Callable[..., Answer]


def process(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """The finished command; neither its input nor its output is a terminal."""
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, text=True, check=False)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`bluejay generate` in this process, which spares a second of imports."""

    def call(*arguments: str, stdin: bytes = b"") -> Answer:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = run(["generate", *EAGER, *arguments])
        return (code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def engine() -> bluejay.Engine:
    """nano through the Python API, to compare the command line with."""
    return bluejay.load("nano", backend="eager")


# ---- what comes out, and where -------------------------------------------------------------------------------------


def test_text_to_stdout_and_figures_to_stderr(engine: bluejay.Engine) -> None:
    """Figures in the text of a pipe; a text that differs from the API's; tokens counted that were not asked for."""
    done = process(PROMPT, "--max-new-tokens", "12")
    assert done.returncode == 0, done.stderr
    assert done.stdout == engine.generate(PROMPT, max_new_tokens=12).text + "\n"
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    prompt_tokens = len(engine.tokenizer.encode(PROMPT))
    assert lines[0].startswith(f"bluejay: {prompt_tokens} prompt tokens at ")
    for figure in (", 12 new tokens, decoded at ", ", first after ", ", peak memory "):
        assert figure in lines[0]


def test_json_of_samples_repeats_with_its_seed(cli: Cli, engine: bluejay.Engine) -> None:
    """JSON mixed with text or progress; a seed that is not told, so that nobody can have the same answer again."""
    code, out, err = cli(
        PROMPT, "--json", "--quiet", "--n", "3", "--temperature=0.9", "--max-new-tokens=6", "--logprobs=2",
        "--prompt-logprobs", "0", "--stop-id", "0",
    )  # fmt: skip
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert set(record) == {
        "model", "prompt", "prompt_ids", "seed", "completions", "prompt_logprobs", "figures", "warnings",
    }  # fmt: skip
    assert (record["model"], record["prompt"], record["warnings"]) == ("nano", PROMPT, [])
    assert record["prompt_ids"] == engine.tokenizer.encode(PROMPT)
    settings: dict[str, Any] = {"n": 3, "temperature": 0.9, "max_new_tokens": 6, "stop_ids": 0}
    again = engine.generate(PROMPT, seed=record["seed"], logprobs=2, **settings)
    assert len({c.text for c in again.completions}) > 1
    for found, completion in zip(record["completions"], again.completions, strict=True):
        assert (found["text"], found["stop_reason"]) == (completion.text, completion.stop_reason)
        assert found["ids"] == [entry["id"] for entry in found["logprobs"]] == list(completion.ids)
        assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in found["logprobs"])
    assert [entry["id"] for entry in record["prompt_logprobs"]] == record["prompt_ids"]
    assert record["prompt_logprobs"][0]["logprob"] is None
    figures = record["figures"]
    assert (
        figures["prompt_tokens"] == len(record["prompt_ids"]) - 1
    )  # read once; the last token is each answer's first step
    assert figures["new_tokens"] == sum(len(c.ids) for c in again.completions)
    assert figures["peak_memory_bytes"] > 10**7
    assert 0 < figures["first_token_seconds"] < 600


def test_several_answers_as_text(cli: Cli, engine: bluejay.Engine) -> None:
    """Answers that run into each other; beams out of order; scores missing."""
    code, out, _ = cli(PROMPT, "--num-beams", "3", "-n", "2", "--max-new-tokens", "5", "--length-penalty", "0.5")
    expected = engine.generate(PROMPT, num_beams=3, n=2, max_new_tokens=5, length_penalty=0.5).completions
    assert code == 0
    assert out == "".join(
        f"--- answer {i} of 2 ({c.stop_reason}, score {c.score:.3f})\n{c.text}\n\n" for i, c in enumerate(expected, 1)
    )


def test_prompts_from_everywhere(cli: Cli, tmp_path: Path) -> None:
    """A newline at the end of a file that becomes part of the prompt, or a second one that is lost with it."""
    short = ("--max-new-tokens", "4", "--quiet", "--echo")
    expected = cli(PROMPT, *short)
    assert expected[0] == 0
    assert expected[1].startswith(PROMPT)
    assert expected[2] == ""
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n", encoding="utf-8")
    assert cli("--file", str(file), *short) == expected
    assert cli(*short, stdin=PROMPT.encode() + b"\n") == expected
    assert cli("-", *short, stdin=PROMPT.encode()) == expected
    assert cli(*short, stdin=PROMPT.encode() + b"\n\n")[1].startswith(PROMPT + "\n")


def test_a_prompt_is_a_line(tmp_path: Path) -> None:
    """Catches a carriage return that the model reads, a line cut at a character that only looks like an end of line, a
    blank line that is answered, and one that is dropped so that answers move up."""
    from bluejay.cli.generate import _read_prompts

    file = tmp_path / "prompts.txt"
    file.write_bytes("One\r\nÉté\u2028\r\n two \r\n".encode())
    assert _read_prompts(None, None, file) == ["One", "Été\u2028", " two "]
    for content, number in (("One\r\n\r\nTwo\r\n", 2), ("", 1), ("One\n\n", 2)):
        file.write_bytes(content.encode())
        with pytest.raises(RequestError, match=f"nothing in line {number}"):
            _read_prompts(None, None, file)


def test_stop_strings_and_reasons(cli: Cli, engine: bluejay.Engine) -> None:
    """B-60 through the command line: the text ends before the first of several stops."""
    free = engine.generate(PROMPT, max_new_tokens=20).text
    code, out, _ = cli(PROMPT, "--max-new-tokens=20", "--stop", free[12:15], "--stop", free[7:9], "--json")
    completion = json.loads(out)["completions"][0]
    assert code == 0
    assert completion["stop_reason"] == "stop"
    assert completion["text"] == free[: min(free.index(free[12:15]), free.index(free[7:9]))]


def test_a_warning_reaches_both_readers(cli: Cli) -> None:
    """Law 10: float16 on a CPU is slow, which is said on stderr, even when quiet, and in the JSON."""
    code, out, err = cli(PROMPT, "--dtype", "float16", "--device", "cpu", "--max-new-tokens", "1", "--json", "--quiet")
    assert code == 0
    assert err.startswith("bluejay: warning: float16")
    assert len(json.loads(out)["warnings"]) == 1
    assert json.loads(out)["figures"]["new_tokens"] == 1  # which the prompt's program wrote, and no decode program


def test_loading_shows_progress_when_it_takes_long(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of silence on a terminal; a bar, or the blank line it leaves, in a pipe or when quiet."""
    from bluejay.cli import display

    monkeypatch.setattr(display, "PATIENCE_SECONDS", 0.0)
    short = (PROMPT, "--max-new-tokens", "1")
    _, out, err = cli(*short)
    assert err.count("\n") == 1
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True)
    _, same, err = cli(*short)
    assert same == out
    assert "loading weights" in err
    assert cli(*short, "--quiet") == (0, out, "")
    monkeypatch.setattr(display, "PATIENCE_SECONDS", 1e9)
    assert "loading weights" not in cli(*short)[2]


# ---- turns on a terminal, and leaving early ------------------------------------------------------------------------


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def write(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read_until(self, mark: str, timeout_seconds: float = 120) -> str:
        """What appears up to and with `mark`; all of it, when the command ends first."""
        read, deadline = b"", time.monotonic() + timeout_seconds
        while not read.endswith(mark.replace("\n", "\r\n").encode()):
            ready, _, _ = select.select([self.master], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no {mark!r} in {read!r}"
            try:
                piece = os.read(self.master, 1)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            read += piece
        return read.decode().replace("\r\n", "\n")


def test_a_conversation(engine: bluejay.Engine) -> None:
    """A model that forgets the turns before, or does not forget them after /new; Ctrl-C that ends it all."""
    config = bluejay.GenerationConfig(max_new_tokens=12, temperature=1, seed=3)
    first = engine.generate(PROMPT, config)
    ids = [*first.prompt_ids, *first.ids, *engine.tokenizer.encode("\nThe dog")]
    second = engine.generate(ids, config)
    assert second.text != engine.generate("The dog", config).text  # else the test could not tell
    options = ("--max-new-tokens", "12", "--temperature", "1", "--seed", "3", "--quiet")
    with Terminal("--interactive", *options) as terminal:
        assert terminal.read_until("> ") == "> "
        for line, answer in (
            (PROMPT, first.text + "\n"),
            ("The dog", second.text + "\n"),
            ("/new", ""),
            ("", ""),
            ("The dog", engine.generate("The dog", config).text + "\n"),
        ):
            terminal.write(line + "\n")
            assert terminal.read_until("\n> ") == f"{line}\n{answer}> "
        terminal.write("\x04")
        terminal.read_until("nothing more comes")
        assert terminal.process.wait(timeout=60) == 0


def test_an_interrupted_turn_keeps_the_conversation() -> None:
    """Ctrl-C while the model writes ends its answer; at the prompt it ends the program, with 130."""
    with Terminal("--interactive", "--max-new-tokens", "400", "--ignore-eos", "--quiet") as terminal:
        terminal.read_until("> ")
        terminal.write(PROMPT + "\n")
        terminal.read_until(PROMPT + "\n")
        terminal.read_until(" ")  # it writes
        terminal.process.send_signal(signal.SIGINT)
        interrupted = terminal.read_until("\n> ")
        assert len(interrupted.split()) < 300
        for _ in range(8):  # one that comes between the prompt and the reading of the line waits for the line
            terminal.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                terminal.process.wait(timeout=6)  # and a second one, while Python ends, would kill it
                break
        rest = terminal.read_until("nothing more comes")
        assert "Traceback" not in interrupted + rest
        assert terminal.process.wait(timeout=60) == 130


def test_control_c_ends_an_answer_cleanly() -> None:
    """A traceback through torch, or exit code 0, when somebody has read enough."""
    command = [*COMMAND, PROMPT, "--max-new-tokens", "480", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.read(1)  # it writes
        started.send_signal(signal.SIGINT)
        _, errors = started.communicate(timeout=60)
    assert started.returncode == 130
    assert errors.decode().split("\n") == ["", "bluejay: interrupted", ""]


def test_a_closed_pipe_is_quiet() -> None:
    """BrokenPipeError, or figures of an answer that nobody has, after `| head -c 10`."""
    line = f"{' '.join(COMMAND)} '{PROMPT}' --max-new-tokens 100 --ignore-eos | head -c 10"
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=False)
    assert len(done.stdout) == 10
    assert done.stderr == b""


# ---- bad input: one clear error each -------------------------------------------------------------------------------

SHORT = ("--max-new-tokens", "2")
Damage = Callable[[Path], object]


def edit_json(directory: Path, name: str, **changes: Any) -> None:
    path = directory / name
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def shard(directory: Path) -> list[Path]:
    """Split the weights into shards with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    parts = [dict(list(tensors.items())[i::3]) for i in range(3)]
    names = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, directory / name, {"format": "pt"})
    weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return [directory / name for name in names]


def remove_shard(directory: Path) -> None:
    shard(directory)[1].unlink()


def truncate_shard(directory: Path) -> None:
    path = shard(directory)[2]
    path.write_bytes(path.read_bytes()[:-1])


def set_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["transformer.h.1.mlp.fc_in.bias"][3] = torch.nan


def remove_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").unlink()


def grow_tokenizer(directory: Path) -> None:
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"] |= {f"zz{i}": 57 + i for i in range(10)}
    edit_json(directory, "tokenizer.json", **tokenizer)


DAMAGES: dict[str, tuple[Damage, list[str]]] = {
    "directory missing": (shutil.rmtree, ["no such directory"]),
    "directory empty": (lambda d: (shutil.rmtree(d), d.mkdir()), ["config.json", "holds nothing"]),
    "config not JSON": (lambda d: (d / "config.json").write_text("{"), ["config.json", "not JSON"]),
    "another architecture": (lambda d: edit_json(d, "config.json", model_type="llama"), ["model_type: 'llama'"]),
    "size missing": (lambda d: edit_json(d, "config.json", rotary_dim=None), ["rotary_dim", "null"]),
    "weights missing": (lambda d: (d / "model.safetensors").unlink(), ["model.safetensors"]),
    "weights truncated": (lambda d: os.truncate(d / "model.safetensors", 500), ["model.safetensors", "500 bytes"]),
    "shard missing": (remove_shard, ["1 missing: model-00002-of-00003.safetensors"]),
    "shard truncated": (truncate_shard, ["model-00003-of-00003.safetensors", "download or copy it again"]),
    "wrong shapes": (lambda d: edit_json(d, "config.json", n_inner=48), ["[128] instead of [48]"]),
    "unknown key": (
        lambda d: edit_tensors(d, lambda t: t.update({"transformer.h.0.attn.q_proj.extra": torch.zeros(3)})),
        ["1 unknown: transformer.h.0.attn.q_proj.extra"],
    ),
    "tensor missing": (lambda d: edit_tensors(d, lambda t: t.pop("lm_head.bias")), ["1 missing: lm_head.bias"]),
    "NaN weights": (lambda d: edit_tensors(d, set_nan), ["NaN", "transformer.h.1.mlp.fc_in.bias"]),
    "no tokenizer": (remove_tokenizer, ["read the tokenizer", "tokenizer.json"]),
    "tokenizer not JSON": (lambda d: (d / "tokenizer.json").write_text("not json"), ["tokenizer.json"]),
    "tokenizer too large": (grow_tokenizer, ["64 rows", "ids up to 66"]),
}


def check_error(answer: Answer, code: int, parts: list[str]) -> None:
    """One error of four parts, nothing on standard output, no traceback."""
    found_code, out, err = answer
    assert found_code == code, err
    assert out == ""
    assert "Traceback" not in err
    assert err.count("bluejay: ") == 1
    for part in parts:
        assert part in err


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_one_clear_error(cli: Cli, tiny_checkpoint: Path, damage: str) -> None:
    """B-02, B-03, B-06, B-12, B-16: noise instead of an error; a traceback; an error that names no file or tensor."""
    act, parts = DAMAGES[damage]
    act(tiny_checkpoint)
    answer = cli("the cat", "--model", str(tiny_checkpoint), *SHORT)
    check_error(answer, 1, [*parts, str(tiny_checkpoint), "asked: ", "found: ", "do: "])


def test_a_whole_checkpoint_is_no_error(cli: Cli, tiny_checkpoint: Path) -> None:
    """The directory that the damages start from must work, sharded as well, or they prove nothing."""
    expected = cli("the cat", "--model", str(tiny_checkpoint), *SHORT, "--quiet")
    assert expected[::2] == (0, "")
    shard(tiny_checkpoint)
    assert cli("the cat", "--model", str(tiny_checkpoint), *SHORT, "--quiet") == expected


WRONG_USE: dict[str, tuple[list[str], list[str]]] = {
    "empty prompt": ([""], ["empty prompt", "0 tokens"]),
    "prompt over the window": (["a" * 40], ["40 prompt tokens", "a window of 32 tokens"]),
    "answer over the window": (["aaaa", "--max-new-tokens", "30"], ["4 prompt tokens + max_new_tokens=30", "32", "28"]),
    "characters without entry": (["caf\u00e9"], ["caf\u00e9"]),
    "no such setting": (["a", "--tempature", "1"], ["--tempature", "--temperature"]),
    "second prompt": (["a", "b"], ["b"]),
    "not a number": (["a", "--temperature", "hot"], ["--temperature", "valid number"]),
    "not a boolean": (["a", "--echo=maybe"], ["--echo=maybe", "'maybe'"]),
    "nan": (["a", "--temperature", "nan"], ["temperature=nan"]),
    "negative": (["a", "--max-new-tokens", "-1"], ["max_new_tokens=-1"]),
    "out of range": (["a", "--top-p", "1.5"], ["top_p=1.5", "between 0 and 1"]),
    "empty stop": (["a", "--stop", ""], ["stop"]),
    "beams that sample": (["a", "--num-beams", "2", "--temperature", "0.5"], ["num_beams=2", "temperature=0.5"]),
    "equal answers": (["a", "--n", "2"], ["n=2", "same answer"]),
    "least above most": (["a", "--min-new-tokens", "9", "--max-new-tokens", "3"], ["9", "3"]),
    "beam setting without beams": (["a", "--early-stopping", "never"], ["num_beams"]),
    "bad early stopping": (["a", "--num-beams", "2", "--early-stopping", "maybe"], ["'maybe'"]),
    "bad over window": (["a", "--over-window", "wrap"], ["'wrap'", "refuse"]),
    "foreign stop id": (["a", "--stop-id", "64"], ["64"]),
    "log-probabilities as text": (["a", "--logprobs", "1"], ["--json"]),
    "unknown dtype": (["a", "--dtype", "int8"], ["int8", "bfloat16"]),
    "unknown device": (["a", "--device", "tpu"], ["tpu"]),
    "context over the window": (["a", "--context", "33"], ["33", "32"]),
    "prompt twice": (["a", "--file", "b.txt"], ["'a'", "b.txt"]),
    "no such file": (["--file", "no-such-file.txt"], ["no-such-file.txt", "No such file"]),
    "a directory as file": (["--file", "."], ["directory"]),
    "turns with a prompt": (["a", "--interactive"], ["--interactive with a prompt"]),
    "turns with n": (["--interactive", "--n", "2", "--temperature", "1"], ["--n 2"]),
}


@pytest.mark.parametrize("mistake", WRONG_USE)
def test_wrong_use_is_code_2(cli: Cli, tiny_checkpoint: Path, mistake: str) -> None:
    """A setting that is dropped silently; code 1 or a traceback for a user's mistake; a message without numbers."""
    arguments, parts = WRONG_USE[mistake]
    short = [] if any(word.endswith("-new-tokens") for word in arguments) else SHORT
    check_error(cli(*arguments, *short, "--model", str(tiny_checkpoint)), 2, [*parts, "do: "])


def test_more_ends_than_a_row_watches_for(cli: Cli, tiny_checkpoint: Path) -> None:
    """15 stop ids are allowed, but not beside a checkpoint that has two ends of text itself."""
    edit_json(tiny_checkpoint, "generation_config.json", eos_token_id=[0, 1])
    ids = [word for i in range(15) for word in ("--stop-id", str(i + 2))]
    asked = ("a", "--model", str(tiny_checkpoint), *SHORT, *ids)
    check_error(cli(*asked), 2, ["15 stop_ids", "17 with the checkpoint's 2", "at most 16"])
    assert cli(*asked, "--ignore-eos")[0] == 0


def test_input_that_is_no_text(cli: Cli, tmp_path: Path) -> None:
    """A UnicodeDecodeError, or bytes that become question marks without a word."""
    check_error(cli(stdin=b"caf\xe9"), 2, ["byte 0xe9 at offset 3", "standard input"])
    (tmp_path / "latin.txt").write_bytes(b"\xff")
    check_error(cli("--file", str(tmp_path / "latin.txt")), 2, ["byte 0xff at offset 0", "latin.txt"])
    check_error(cli("caf\udce9"), 2, ["valid Unicode"])


def test_errors_for_programs_and_for_us(cli: Cli, tiny_checkpoint: Path) -> None:
    """An empty answer to a program that reads JSON; no traceback for those who ask for it."""
    (tiny_checkpoint / "config.json").unlink()
    code, out, err = cli("a", "--model", str(tiny_checkpoint), "--json")
    assert code == 1
    assert set(json.loads(out)["error"]) == {"code", "asked", "found", "rule", "do"}
    assert json.loads(out)["error"]["code"] == "checkpoint"
    assert "Traceback" not in err
    assert "Traceback" in cli("a", "--model", str(tiny_checkpoint), "--debug")[2]
