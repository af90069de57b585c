"""Booleans on the command line (B-39) and the program's flags, through a parser with every kind of option."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import typer

from bluejay.cli.arguments import normalize
from bluejay.errors import ConfigError

app = typer.Typer(add_completion=False)
nested = typer.Typer(add_completion=False)
app.add_typer(nested, name="cache")


@app.callback()
def program(debug: Annotated[bool, typer.Option("--debug")] = False) -> None: ...


@app.command()
def write(
    prompt: Annotated[str, typer.Argument()] = "",
    json: Annotated[bool, typer.Option("--json")] = False,
    stream: bool = True,
    stop: Annotated[list[str] | None, typer.Option()] = None,
    n: Annotated[int, typer.Option("--n", "-n")] = 1,
) -> dict[str, Any]:
    return {"prompt": prompt, "json": json, "stream": stream, "stop": stop or [], "n": n}


@nested.command("prune")
def prune(yes: bool = False) -> dict[str, Any]:
    return {"yes": yes}


@nested.command("list")
def list_entries() -> None: ...


def parse(*argv: str) -> dict[str, Any]:
    command = typer.main.get_command(app)
    return command.main(normalize(command, argv).words, standalone_mode=False)


@pytest.mark.parametrize(
    "off", [["--no-stream"], ["--stream", "False"], ["--stream=false"], ["--stream=no"], ["--stream=0"]]
)
def test_every_way_of_no(off: list[str]) -> None:
    """Catches B-39: "False" on the command line is true."""
    assert parse("write", *off, "hello") == {"prompt": "hello", "json": False, "stream": False, "stop": [], "n": 1}


@pytest.mark.parametrize("on", [["--json"], ["--json=True"], ["--json", "true"], ["--json=yes"], ["--no-json=false"]])
def test_every_way_of_yes(on: list[str]) -> None:
    """Catches a flag that takes no value, or one whose --no- form with a value means the opposite."""
    assert parse("write", "hello", *on)["json"] is True


def test_a_flag_without_an_off_switch_has_one() -> None:
    """Catches options declared as "--json" alone, for which typer knows no --no-json and no --json=false."""
    assert parse("write", "--no-json")["json"] is False
    assert parse("write", "--json=false")["json"] is False
    assert parse("write", "--json", "--no-json")["json"] is False


@pytest.mark.parametrize("word", ["--stream=maybe", "--json=2", "--no-stream=", "--debug=x"])
def test_a_value_that_is_no_boolean_is_refused(word: str) -> None:
    """Catches B-39's other half: any text taken as true."""
    with pytest.raises(ConfigError) as caught:
        parse("write", word)
    assert caught.value.exit_code == 2
    assert word in caught.value.asked


def test_only_true_and_false_are_values_after_a_space() -> None:
    """Catches a prompt eaten by the flag before it, and `--x maybe` accepted where no argument can follow."""
    assert parse("write", "--json", "hello") == {"prompt": "hello", "json": True, "stream": True, "stop": [], "n": 1}
    with pytest.raises(typer.TyperException, match="maybe"):
        parse("cache", "prune", "--yes", "maybe")
    assert parse("cache", "prune", "--yes", "true") == {"yes": True}


def test_values_of_other_options_are_left_alone() -> None:
    """Catches `--stop --json` read as a flag, and words after `--` read as options."""
    assert parse("write", "--stop", "--json", "-n", "2", "--", "--no-stream") == {
        "prompt": "--no-stream",
        "json": False,
        "stream": True,
        "stop": ["--json"],
        "n": 2,
    }


def test_program_flags_may_follow_the_verb() -> None:
    """Catches --debug accepted only before the verb, where nobody adds it."""
    command = typer.main.get_command(app)
    for argv in (["--debug", "write", "x"], ["write", "x", "--debug"], ["cache", "prune", "--debug"]):
        arguments = normalize(command, argv)
        assert arguments.words[0] == "--debug"
        assert "--debug" in arguments.switched_on
    assert "--debug" not in normalize(command, ["write", "--stop", "--debug"]).switched_on
