"""A description of a kind of machine, from a YAML file: what programs are made for and must fit."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from bluejay.config.checks import read_mapping
from bluejay.errors import ConfigError
from bluejay.units import parse_bytes


@dataclass(frozen=True)
class Target:
    """A kind of machine. What is left out is not asked for.

    Attributes:
        name: for people.
        memory_bytes: memory that weights and cache must fit; 0 is not asked. In the file: `memory: 16GiB`.
        threads: CPU threads that programs are made for; 0 takes this machine's.
        cpu_features: instruction sets that the machine has, as `bluejay doctor --json` names them.
    """

    name: str = ""
    memory_bytes: int = 0
    threads: int = 0
    cpu_features: tuple[str, ...] = ()


def load_target(path: Path) -> Target:
    """The target that a YAML file describes.

    Raises:
        ConfigError: unreadable, an unknown key, or a value of the wrong kind.
    """
    known = [f.name.replace("memory_bytes", "memory") for f in fields(Target)]

    def refuse(found: str, fix: str) -> ConfigError:
        rule = f"a target is a mapping with any of {', '.join(known)}"
        return ConfigError(asked=f"the target in {path}", found=found, rule=rule, fix=fix)

    raw = read_mapping(path, refuse)
    if unknown := [str(key) for key in raw if key not in known]:
        raise refuse(f"unknown keys {', '.join(unknown)}", "correct or remove them")
    features = raw.get("cpu_features", ())
    if not isinstance(features, list | tuple) or not all(isinstance(f, str) for f in features):
        raise refuse(f"cpu_features: {features!r}", "give a list of names")
    threads = raw.get("threads", 0)
    if type(threads) is not int or threads < 0:
        raise refuse(f"threads: {threads!r}", "give a whole number from 0")
    try:
        memory_bytes = parse_bytes(raw.get("memory", 0))
    except ValueError as error:
        raise refuse(f"memory: {error}", "write for example memory: 16GiB") from None
    return Target(str(raw.get("name", path.stem)), memory_bytes, threads, tuple(features))
