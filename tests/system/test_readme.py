"""The README is true: its blocks run, its targets, extras and files exist.

They run on the eager back-end, which gives the same text: compiling a program for every shape they use takes minutes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [body for language, body in BLOCKS if language == "python"]
COMMANDS = [line for language, body in BLOCKS if language == "bash" for line in body.splitlines() if line.strip()]
OURS = [line for line in COMMANDS if re.search(r"\bbluejay\b", line)]
SETUP = [line for line in COMMANDS if line not in OURS]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `bluejay` is this source tree's, run by this Python."""
    folder = tmp_path_factory.mktemp("bin")
    script = f"""#!/bin/sh
case "$1" in
  generate|evaluate) set -- "$@" --backend eager ;;
  train) set -- "$@" --set compile=eager ;;
esac
exec {shlex.quote(sys.executable)} -m bluejay "$@"
"""
    (folder / "bluejay").write_text(script, encoding="utf-8")
    (folder / "bluejay").chmod(0o755)
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": path,
        "BLUEJAY_CACHE": str(folder / "cache"),
    }


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a reader types all lines, one after the other."""
    return tmp_path_factory.mktemp("workplace")


def test_blocks_are_all_of_a_kind_that_is_checked() -> None:
    """A block in a language that no test looks at, or none left after a rewrite."""
    assert {language for language, _ in BLOCKS} == {"python", "bash"}
    assert len(PYTHON) >= 1
    assert len(OURS) >= 6
    assert README.count("```") == 2 * len(BLOCKS)


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks_run(code: str, shell: dict[str, str], tmp_path: Path) -> None:
    """An example that uses a name that is gone, or that needs the source tree as the current folder."""
    eager = code.replace('bluejay.load("nano"', 'bluejay.load("nano", backend="eager"')
    assert eager != code
    done = subprocess.run(
        [sys.executable, "-c", eager], cwd=tmp_path, env=shell, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 100


@pytest.mark.parametrize("line", OURS)
def test_commands_run(line: str, shell: dict[str, str], workplace: Path) -> None:
    """An option that was renamed, or a combination that contradicts itself. Later lines use what earlier ones made."""
    command = line.replace(".venv/bin/bluejay", "bluejay")
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=workplace,
        env=shell,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    writes_text = "generate" in line and not re.search(r"--interactive|>", line)
    assert (done.stdout if writes_text else done.stdout + done.stderr).strip()


@pytest.mark.parametrize("line", SETUP)
def test_setup_lines_name_what_exists(line: str) -> None:
    """A make target, an extra or a test folder that is gone; a kind of line that nobody checks."""
    words = shlex.split(line, comments=True)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", MAKEFILE, re.MULTILINE)
        assert re.search(rf"^\.PHONY:.*\b{words[1]}\b", MAKEFILE, re.MULTILINE)
    elif words[1:4] == ["-m", "pip", "install"]:
        assert words[4] == "-e"
        asked = re.fullmatch(r"\.(?:\[([\w,]+)\])?", words[5])
        assert asked
        assert set(filter(None, (asked[1] or "").split(","))) <= set(extras)
        assert words[0].startswith(".venv/bin/")
    elif words[1:3] == ["-m", "pytest"]:
        assert all((ROOT / path).exists() for path in words[3:] if not path.startswith("--"))
        assert " ".join(words[3:]) in MAKEFILE
    else:
        assert words == ["python3", "-m", "venv", ".venv"]


def test_plain_lines_are_those_behind_make() -> None:
    """A demo that makes another text than the lines that claim to stand behind it."""
    prompt = re.search(r"^PROMPT \?= (.*)$", MAKEFILE, re.MULTILINE)
    behind = re.search(r"\$\(BIN\)/bluejay (generate .*)$", MAKEFILE, re.MULTILINE)
    assert prompt
    assert behind
    demo = shlex.split(behind[1].replace("$(PROMPT)", prompt[1]).replace(" --model nano", ""))
    plain = [shlex.split(line)[1:] for line in COMMANDS if line.startswith(".venv/bin/bluejay ")]
    assert plain == [demo]


def test_named_files_exist() -> None:
    """A link or a path in the tables that leads nowhere."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    paths = re.findall(r"`((?:src|docs|recipes|tests|benchmarks)(?:/[\w./-]+)?|[A-Z]+\.md)`", README)
    assert len(links) >= 3
    assert len(paths) >= 8
    missing = [name for name in (*links, *paths) if not (ROOT / name).exists()]
    assert not missing
