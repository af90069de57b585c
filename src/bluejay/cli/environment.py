"""Everything that Bluejay takes from the environment. No other file reads it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The folder of compiled programs: BLUEJAY_CACHE, or `bluejay` in the platform's cache folder."""
    if chosen := os.environ.get("BLUEJAY_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bluejay"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "bluejay" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bluejay"


def preferred_compiler() -> str:
    """The C++ compiler that CXX names, or nothing."""
    return os.environ.get("CXX", "")
