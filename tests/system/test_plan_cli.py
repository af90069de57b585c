"""`bluejay plan` as people call it, and docs/scale.md, whose tables are its output."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from bluejay.cli import run

SCALE = Path(__file__).parents[2] / "docs" / "scale.md"
BLOCKS = re.findall(r"```text\n\$ bluejay (plan [^\n]*)\n(.*?)```", SCALE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_the_page_shows_what_the_planner_says(command: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a table in docs/scale.md that the planner no longer prints."""
    run(shlex.split(command))
    captured = capsys.readouterr()
    assert (captured.out or captured.err).strip() == shown.strip()


def test_a_plan_reads_no_weight(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a planner that opens the weights: with the weight file gone, directory and config.json give one plan."""
    for file in tiny_checkpoint.glob("*.safetensors"):
        file.unlink()
    plans = []
    for model in (tiny_checkpoint, tiny_checkpoint / "config.json"):
        assert run(["plan", str(model), "--tensor", "2", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0]["stages"] == plans[1]["stages"]
    assert plans[0]["num_devices"] == 2


def test_a_quantized_directory_is_planned_as_it_is(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches packed weights counted as plain ones, and packing of what is packed."""
    out, some = tmp_path / "out", tmp_path / "some"
    assert run(["quantize", str(tiny_checkpoint), str(out), "--group-size", "16", "--quiet"]) == 0
    assert run(["quantize", str(tiny_checkpoint), str(some), "--group-size", "16", "--quiet", "--layers", "fc_in"]) == 0
    capsys.readouterr()
    plans = []
    for command in ([str(out)], [str(tiny_checkpoint), "--quantize", "int4-g16"]):
        assert run(["plan", *command, "--json"]) == 0
        plans.append({**json.loads(capsys.readouterr().out), "model": ""})
    assert plans[0] == plans[1]
    assert run(["plan", str(out), "--quantize", "int4-g16"]) == 2
    assert "already packed as int4-g16" in capsys.readouterr().err
    assert run(["plan", str(some)]) == 2
    assert "layers fc_in packed" in capsys.readouterr().err


def test_a_file_gives_settings_and_options_override_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a setting of the file that is dropped, one that beats the command line, and an unknown one."""
    file = tmp_path / "plan.yaml"
    file.write_text("stages: 4\njob: train\ngradient_accumulation: 8\nlayers_per_device: [7, -1, -1, 7]\n")
    assert run(["plan", "gptj-6b", "--config", str(file), "--gradient-accumulation", "16", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [stage["num_layers"] for stage in made["stages"]] == [7, 7, 7, 7]
    assert made["workload"]["gradient_accumulation"] == 16
    for wrong in ("devices: four", "devices: 2.0", "quantize: 4", "layers_per_device: [7.9, 7.2, 7, 7]", "rows: [1]"):
        file.write_text(f"{wrong}\n")
        assert run(["plan", "gptj-6b", "--config", str(file)]) == 2, wrong
        assert "[config]" in capsys.readouterr().err
    for wrong in ("layers_per_device: true", "device_memory: 16"):
        file.write_text(f"{wrong}\n")
        assert run(["plan", "gptj-6b", "--config", str(file)]) == 2, wrong
    capsys.readouterr()
    file.write_text("stage: 4\n")
    assert run(["plan", "gptj-6b", "--config", str(file)]) == 2
    assert "stages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["--layers-per-device", "8,8,8,8,8,8,7,7"], 2, "[4, 4, 4, 4, 3, 3, 3, 3]"),
        (["--tensor", "3"], 2, "1, 2, 4, 8, 16"),
        (["--devices", "4", "--stages", "3"], 2, "--devices 3"),
        (["--devices", "2", "--device-memory", "2GiB"], 1, "weights"),
        (["--device-memory", "much"], 2, "16GiB"),
        (["--layers-per-device", "some"], 2, "4,4,-1"),
        (["--devices", "0"], 2, "a whole number from 1"),
        (["--devices", "-1"], 2, "a whole number from 1"),
        (["--devices", "2", "--layers-per-device", "auto", "--device-memory", "2GiB"], 1, "2 devices"),
        (["--device-memory", "16"], 2, "no unit"),
        (["--recompute", "--schedule", "gpipe"], 2, "recompute, schedule"),
        (["--job", "train", "--prompt-tokens", "8"], 2, "prompt_tokens"),
        (["--job", "train", "--optimizer", "sgd"], 2, "adamw, muon"),
    ],
)
def test_wrong_plans_end_with_what_to_do(
    options: list[str], code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a request that cannot be met and is not refused, or without the way out."""
    assert run(["plan", "gptj-6b", *options]) == code
    assert word in capsys.readouterr().err
