"""What every verb's options have in common, done once before typer parses them.

A boolean option `--x` may be written `--x`, `--no-x`, `--x=false` or `--x true`, and a value that is no boolean is
refused: plain flags make `--x=false` an error at best, and an option typed as text makes "False" true. The program's
own flags (`--debug`) may stand after the verb as well as before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bluejay.errors import ConfigError

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass
class Level:
    """The words that belong to one command: its flags as chosen so far, and everything else in order."""

    command: Any
    chosen: dict[str, tuple[str, bool]] = field(default_factory=dict)  # on-switch -> (word to pass on, value)
    rest: list[str] = field(default_factory=list)

    def choose(self, flag: Any, value: bool) -> None:
        off = flag.secondary_opts[0] if flag.secondary_opts else ""  # a flag without an off-switch is off by default
        self.chosen[flag.opts[0]] = (flag.opts[0] if value else off, value)

    def words(self) -> list[str]:
        return [word for word, _ in self.chosen.values() if word] + self.rest


@dataclass(frozen=True)
class Arguments:
    """Arguments that typer can parse, and the switches that are on in them."""

    words: list[str]
    switched_on: frozenset[str]


def normalize(root: Any, argv: Sequence[str]) -> Arguments:
    """Rewrite the booleans of `argv` as plain flags in front of their verb's other arguments.

    A word after a flag is its value only when it is `true` or `false`; any other word (`--json hello`) is the verb's
    next argument. After `--` nothing is touched.

    Raises:
        ConfigError: a boolean option was given a value that is neither true nor false.
    """
    levels = [Level(root)]
    queue = list(argv)
    while queue:
        word = queue.pop(0)
        level = levels[-1]
        name, has_value, value = word.partition("=")
        owner, flag, switch = _find_flag(levels, name)
        if word == "--":
            level.rest += [word, *queue]
            break
        if flag is not None:
            if not has_value and queue and queue[0].lower() in ("true", "false"):
                has_value, value = "=", queue.pop(0)
            owner.choose(flag, switch == _boolean(name, value) if has_value else switch)
        elif takes := _values_taken(level.command, word):
            level.rest += [word, *queue[:takes]]
            del queue[:takes]
        else:
            level.rest.append(word)
            if not word.startswith("-") and word in getattr(level.command, "commands", {}):
                levels.append(Level(level.command.commands[word]))
    words = [word for level in levels for word in level.words()]
    on = {switch for level in levels for switch, (_, value) in level.chosen.items() if value}
    return Arguments(words, frozenset(on))


def _find_flag(levels: list[Level], name: str) -> tuple[Level, Any, bool]:
    """The boolean option of that name, of the innermost command or of the program, and what the bare name means."""
    for level in (levels[-1], levels[0]):
        for param in level.command.params:
            if getattr(param, "is_flag", False):
                if name in param.opts:
                    return level, param, True
                if name in param.secondary_opts or name in (f"--no-{opt.lstrip('-')}" for opt in param.opts):
                    return level, param, False
    return levels[-1], None, False


def _values_taken(command: Any, word: str) -> int:
    """Words that the option `word` takes as its values, which must not be read as flags."""
    options = (param for param in command.params if word in param.opts and word.startswith("-"))
    return next((param.nargs for param in options), 0)


def _boolean(name: str, value: str) -> bool:
    if value.lower() in (*_TRUE, *_FALSE):
        return value.lower() in _TRUE
    raise ConfigError(
        asked=f"{name}={value}",
        found=f"the value {value!r}",
        rule=f"{name} is a yes/no option: {' '.join(_TRUE)}, {' '.join(_FALSE)}",
        fix=f"write {name}, {name}=true or {name}=false",
    )
