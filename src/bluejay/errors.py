"""Every error a user can meet: what was asked, what was found, which rule, what to do.

One base class. `code` is stable and machine-readable; `exit_code` is what the command line returns:
1 for "the request was right, the work failed", 2 for "the request was wrong".
"""

from __future__ import annotations


class BluejayError(Exception):
    """Base of all errors raised for the user. Message parts are kept apart so that servers and `--json` can use them.

    Args:
        asked: what the caller wanted, with its values.
        found: what was there instead, with its values.
        rule: the rule that makes the two incompatible (may be empty where it is obvious).
        fix: the next thing to do.
    """

    code = "error"
    exit_code = 1

    def __init__(self, *, asked: str, found: str, rule: str = "", fix: str) -> None:
        self.asked = asked
        self.found = found
        self.rule = rule
        self.fix = fix
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = [f"asked: {self.asked}", f"found: {self.found}"]
        if self.rule:
            parts.append(f"rule: {self.rule}")
        parts.append(f"do: {self.fix}")
        return "\n  ".join([f"[{self.code}]", *parts])

    def as_dict(self) -> dict[str, str]:
        """The error as plain data, for `--json` and HTTP answers."""
        return {"code": self.code, "asked": self.asked, "found": self.found, "rule": self.rule, "do": self.fix}


class ConfigError(BluejayError):
    """A setting that does not exist, has the wrong type, or contradicts another one."""

    code = "config"
    exit_code = 2


class RequestError(BluejayError):
    """A generation request that cannot be honored: sampling parameters, prompt, window."""

    code = "request"
    exit_code = 2


class CheckpointError(BluejayError):
    """A checkpoint that is absent, incomplete, damaged, or not of the GPT-J architecture."""

    code = "checkpoint"


class TokenizerError(BluejayError):
    """Tokenizer files that are absent, damaged, or do not fit the model."""

    code = "tokenizer"


class MachineError(BluejayError):
    """The machine lacks what the request needs: memory, device, disk, compiler."""

    code = "machine"
