"""`python -m bluejay`: the same as the command `bluejay`."""

import sys

from bluejay.cli import run

if __name__ == "__main__":
    sys.exit(run())
