"""The C++ compiler that native code generation needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass

_NAMES = ("clang++", "g++", "c++") if sys.platform == "darwin" else ("g++", "clang++", "c++")
# Package managers and the command that installs a C++ compiler with each.
_INSTALL = {
    "apt-get": "apt-get install g++",
    "dnf": "dnf install gcc-c++",
    "zypper": "zypper install gcc-c++",
    "pacman": "pacman -S gcc",
    "apk": "apk add g++",
}


@dataclass(frozen=True)
class Compiler:
    """A working compiler: where it is, and the first line it says of its version."""

    path: str
    version: str


def cxx_compiler(preferred: str = "") -> Compiler | None:
    """The first C++ compiler found that runs, or None. A `preferred` command is the only candidate when given."""
    for name in (preferred,) if preferred else _NAMES:
        path = shutil.which(name)
        if path is None:
            continue
        # A name on the path may be a stub that only asks to install the tools, as macOS has them: run it.
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip():
            return Compiler(path=path, version=answer.stdout.strip().splitlines()[0])
    return None


def how_to_install_compiler() -> str:
    """The command that installs a C++ compiler on this machine."""
    if sys.platform == "darwin":
        return "xcode-select --install"
    found = (command for manager, command in _INSTALL.items() if shutil.which(manager))
    return next(found, "install GCC 11 or newer with its C++ compiler, and put g++ on the PATH")
