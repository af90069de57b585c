"""Everything that Bluejay takes from the environment. No other file reads it."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder of compiled programs: BLUEJAY_CACHE, or `bluejay` in the platform's cache folder."""
    from bluejay.machine import default_cache_folder

    if chosen := os.environ.get("BLUEJAY_CACHE"):
        return Path(chosen).expanduser()
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "bluejay"
    return default_cache_folder()


def preferred_compiler() -> str:
    """The C++ compiler that CXX names, or nothing."""
    return os.environ.get("CXX", "")


def keep_compiled_steps(folder: Path) -> None:
    """Let torch keep the code of compiled training steps in `folder`, unless the environment names another place.

    torch finds it again under a hash of the graph, its own version and the processor, and checks it before use.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
