"""Everything that Bluejay takes from the environment. No other file reads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from bluejay.errors import ConfigError

if TYPE_CHECKING:
    from bluejay.parallel import Rank


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


def rank_of_launcher() -> Rank | None:
    """Which rank this process is, by the variables that torchrun and its like set; None when it is none.

    Raises:
        ConfigError: one of them is no number.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    from bluejay.parallel import Rank

    listener = _number("BLUEJAY_LISTENER", -1)
    return Rank(
        index=_number("RANK"),
        count=_number("WORLD_SIZE"),
        host=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        port=_number("MASTER_PORT", 29500),
        keeps_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        listener=None if listener < 0 else listener,
        local=_number("LOCAL_RANK", 0),
        attempt=_number("TORCHELASTIC_RESTART_COUNT", 0),
    )


def _number(name: str, default: int = 0) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            asked=f"the rank that {name} names",
            found=f"{name}={text!r}",
            rule="launchers set whole numbers",
            fix=f"unset {name}, or start ranks with torchrun or --devices",
        ) from None
