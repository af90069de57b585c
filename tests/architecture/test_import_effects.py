"""Importing does nothing: seen from inside a fresh interpreter with an empty environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "bluejay"
MODULES = sorted(
    ".".join(("bluejay", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for file in PACKAGE.rglob("*.py")
    if file.name != "__main__.py"
)

# Runs in the fresh interpreter. An effect is ours when, walking up the stack, a file of the package comes before the
# import machinery: what torch does while it is imported has an import between it and us.
WATCH = """
import importlib, json, os, sys, threading

package, modules = sys.argv[1], sys.argv[2:]
effects = []

def ours():
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith("<frozen importlib"):
            return False
        if name.startswith(package):
            return True
        frame = frame.f_back
    return False

def audit(event, args):
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    acts = ("os.mkdir", "os.rename", "os.remove", "os.putenv", "os.fork", "subprocess.Popen", "socket.connect")
    if (writes or event in acts) and ours():
        effects.append(f"{event} {args[0]!r}")

class Watched(type(os.environ)):
    def __getitem__(self, key):
        if ours():
            effects.append(f"environment {key}")
        return super().__getitem__(key)
    def __iter__(self):
        if ours():
            effects.append("environment, all of it")
        return super().__iter__()

os.environ.__class__ = Watched
sys.addaudithook(audit)
start = threading.Thread.start
def watched_start(self):
    if ours():
        effects.append(f"thread {self.name}")
    start(self)
threading.Thread.start = watched_start

for module in modules:
    importlib.import_module(module)
print(json.dumps(effects))
"""


def python(*arguments: str, path: Path | None = None) -> str:
    """Standard output of a fresh interpreter that knows the package and nothing else of the environment."""
    environment = {"PYTHONPATH": str(path or PACKAGE.parent)}
    run = subprocess.run(
        [sys.executable, "-B", *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_importing_does_nothing() -> None:
    """Catches a file written, a thread or process started, or the environment read while a module is imported."""
    assert json.loads(python("-c", WATCH, str(PACKAGE), *MODULES)) == []


@pytest.mark.parametrize(
    ("code", "effect"),
    [
        ("import os\nx = os.environ.get('HOME')", "environment HOME"),
        ("import os\nx = os.getenv('HOME')", "environment HOME"),
        ("from pathlib import Path\nPath('written').write_text('')", "open 'written'"),
        ("import threading\nthreading.Thread(target=int).start()", "thread Thread-1 (int)"),
        ("import subprocess\nsubprocess.run(['true'])", "subprocess.Popen 'true'"),
    ],
)
def test_effects_are_seen(code: str, effect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a watcher that sees nothing: each effect is put into a module and must be reported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "effectful.py").write_text(code)
    assert effect in json.loads(python("-c", WATCH, str(tmp_path), "effectful", path=tmp_path))


HEAVY = "[m for m in ('torch', 'numpy', 'transformers', 'huggingface_hub', 'rich.table') if m in sys.modules]"


def test_the_package_itself_is_light() -> None:
    """Catches `import bluejay` that costs seconds because a name pulls in torch before anyone uses it."""
    assert python("-c", f"import sys, bluejay; print({HEAVY})").strip() == "[]"


@pytest.mark.parametrize("argv", [["--help"], ["doctor", "--help"], ["--nonsense"], ["generate", "--nonsense"]])
def test_help_and_mistakes_answer_without_torch(argv: list[str]) -> None:
    """Catches a verb file that imports a room at its top, which makes every help text and typing error wait."""
    code = f"import sys; from bluejay.cli import run; run({argv!r}); print({HEAVY})"
    assert python("-c", code).strip().splitlines()[-1] == "[]"
