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


def compiler_settings() -> tuple[tuple[str, str], ...]:
    """Variables that steer torch's compiler, as they are set: part of every program's fingerprint."""
    return tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith(("TORCHINDUCTOR_", "AOT_INDUCTOR_"))))
