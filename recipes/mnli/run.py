"""Train nano on entailment and say how well it does: one command for each of two data sets.

    python recipes/mnli/run.py synthetic     # a small world of rules, made here; minutes
    python recipes/mnli/run.py nli           # ../shared/data/nli, part of MultiNLI

Each is `bluejay train` with the configuration beside this file, then `bluejay evaluate --task mnli` on the test part.
The same command goes on when interrupted; a run that is finished is only scored again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def bluejay(*arguments: str) -> None:
    """Run a verb of the command line; its failure is ours."""
    subprocess.run([sys.executable, "-m", "bluejay", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=("synthetic", "nli"))
    parser.add_argument("--set", action="append", default=[], help="passed on to `bluejay train`")
    args = parser.parse_args()
    out, test = "build/mnli", "../shared/data/nli/mnli_test.jsonl"
    if args.data == "synthetic":
        out, test = "build/mnli-synthetic", "build/mnli-data/test.jsonl"
        subprocess.run([sys.executable, str(HERE / "synthetic.py"), str(Path(test).parent)], check=True)
    if not Path(out, "model").exists():
        settings = [word for setting in args.set for word in ("--set", setting)]
        resume = ["--resume"] if any(Path(out, "checkpoints").glob("update-*")) else []
        bluejay("train", "--config", str(HERE / f"{args.data}.yaml"), *settings, *resume)
    bluejay("evaluate", f"{out}/model", "--task", "mnli", "--data", test, "--batch", "8", "--backend", "eager")


if __name__ == "__main__":
    main()
