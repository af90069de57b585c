"""Bluejay compiles GPT-J once and runs it anywhere.

    import bluejay

    engine = bluejay.load("nano")
    print(engine.generate("Once upon a time").text)

Names are loaded when first used, so that `import bluejay` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bluejay.config import GenerationConfig, ModelConfig, RunConfig
    from bluejay.errors import BluejayError
    from bluejay.generate import Completion, Engine, Generation, Piece, load

__version__ = "0.1.0"

_ROOM_OF = {
    "BluejayError": "errors",
    "Completion": "generate",
    "Engine": "generate",
    "Generation": "generate",
    "GenerationConfig": "config",
    "ModelConfig": "config",
    "Piece": "generate",
    "RunConfig": "config",
    "load": "generate",
}

__all__ = [
    "BluejayError",
    "Completion",
    "Engine",
    "Generation",
    "GenerationConfig",
    "ModelConfig",
    "Piece",
    "RunConfig",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
