"""The command line: one entry point, one parser, one verb per file. The only room that prints and reads the
environment."""

from bluejay.cli.main import run

__all__ = ["run"]
