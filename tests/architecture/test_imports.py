"""docs/design.md is the rule: its table, and the sentences under it, against every file of the package."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "bluejay"
LEAVES = ("errors", "units", "events", "files")
FILES = sorted(PACKAGE.rglob("*.py"))
OUTSIDE_FILES = sorted(file for folder in ("benchmarks", "recipes") for file in (ROOT / folder).rglob("*.py"))


def import_table(page: Path = ROOT / "docs" / "design.md") -> dict[str, set[str]]:
    """Row -> columns marked x, from the table that begins with an empty corner and `leaves`."""
    lines = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in page.read_text().splitlines()]
    start = next(i for i, cells in enumerate(lines) if cells[:2] == ["leaves", "config"])
    columns = lines[start]
    rows = {}
    for line in page.read_text().splitlines()[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *marks = (cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|"))
        assert len(marks) == len(columns), f"row {name} has {len(marks)} cells for {len(columns)} columns"
        assert set(marks) <= {"", "x"}, f"row {name} holds something else than x: {marks}"
        rows[name] = {column for column, mark in zip(columns, marks, strict=True) if mark}
    return rows


TABLE = import_table()
ALLOWED = {
    **TABLE,
    "bluejay": {*TABLE, "cli"},  # `python -m bluejay`
    "cli": {*TABLE, "bluejay"},
    "compat": {*TABLE, "bluejay"},
    "outside": {*TABLE, "bluejay"},
}


@dataclass(frozen=True)
class Import:
    """One import: where it stands, the module, and the names taken from it (none for `import module`)."""

    file: Path
    line: int
    module: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        taken = f"from {self.module} import {', '.join(self.names)}" if self.names else f"import {self.module}"
        return f"{self.file.relative_to(ROOT)}:{self.line}: {taken}"


def imports_of(file: Path) -> Iterator[Import]:
    """Every import of a file, wherever it stands, with relative ones made absolute."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, ())
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                folder = file.parents[node.level - 1]
                parts = ("bluejay", *folder.relative_to(PACKAGE).parts, *([module] if module else []))
                module = ".".join(parts)
            names = tuple(alias.name for alias in node.names)
            if module == "bluejay":  # `from bluejay import config` imports the room
                for name in names:
                    yield Import(file, node.lineno, f"bluejay.{name}" if is_room(name) else "bluejay", (name,))
            else:
                yield Import(file, node.lineno, module, names)


def is_room(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def room_of(file: Path) -> str:
    """The row of the table that a file of the package belongs to."""
    first = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "bluejay" if first in ("__init__", "__main__") else "leaves" if first in LEAVES else first


def room_of_module(module: str) -> str:
    """The room of a dotted name inside the package."""
    first = f"{module}.".split(".")[1]
    return "leaves" if first in LEAVES else first or "bluejay"


def public_names(room: str) -> set[str]:
    """What a room's `__all__` lists, read without importing it; a one-file room may do without (no underscores)."""
    folder = PACKAGE / room
    file = folder / "__init__.py" if folder.is_dir() else PACKAGE / f"{room}.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return set(ast.literal_eval(node.value))
    assert not folder.is_dir(), f"room {room} has no __all__"
    targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    names = {t.id for t in targets if isinstance(t, ast.Name)}
    names |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {name for name in names if not name.startswith("_")}


def complaints(files: list[Path]) -> Iterator[str]:
    """Every import inside the project that the table, or the rule of public names, forbids."""
    for file in files:
        inside = file.is_relative_to(PACKAGE)
        room = room_of(file) if inside else "outside"
        for found in imports_of(file):
            if found.module.split(".")[0] != "bluejay":
                continue
            target = room_of_module(found.module)
            if target == room != "leaves":
                continue  # within a room
            allowed = target in ALLOWED.get(room, set())
            if not allowed:
                yield f"{found}: {room} may not import {target}"
            elif found.module.count(".") > 1:
                yield f"{found}: reaches into a file of {target}"
            elif found.module.count(".") == 1:
                name = found.module.split(".")[1]
                hidden = [n for n in found.names if n != name and n not in public_names(name)]
                if hidden:
                    yield f"{found}: {', '.join(hidden)} not public in {name}"


def test_every_room_is_in_the_table() -> None:
    """Catches a new folder that no rule holds."""
    assert {room_of(file) for file in FILES} <= set(ALLOWED), "rooms without a row in docs/design.md"
    assert {column for row in TABLE.values() for column in row} <= set(TABLE)


def test_the_table_has_no_cycle() -> None:
    """Catches two rows that allow each other."""
    order: list[str] = []
    left = {room: set(row) for room, row in TABLE.items()}
    while left:
        free = [room for room, row in left.items() if not row - set(order)]
        assert free, f"cycle among {sorted(left)}"
        order += free
        left = {room: row for room, row in left.items() if room not in free}


def test_imports_follow_the_table() -> None:
    """Catches an import against the table, into another room's file, or of a private name; in functions too."""
    assert list(complaints(FILES)) == []


def test_benchmarks_and_recipes_use_public_names() -> None:
    """Catches a recipe that breaks when a room's inside changes."""
    assert list(complaints(OUTSIDE_FILES)) == []


FAULTS = [
    ("config", "from bluejay.models import GPTJ", "config may not import models"),
    ("config", "def f():\n    import bluejay.models", "config may not import models"),
    ("config", "if TYPE_CHECKING:\n    from bluejay import models", "config may not import models"),
    ("config", "from ..models import GPTJ", "config may not import models"),
    ("models", "from bluejay.config.model import ModelConfig", "reaches into a file of config"),
    ("models", "from ..config.model import ModelConfig", "reaches into a file of config"),
    ("models", "from bluejay.config import _hidden", "_hidden not public in config"),
    ("models", "import bluejay", "models may not import bluejay"),
    ("models", "from bluejay.cli import run", "models may not import cli"),
    ("cli", "from bluejay.compat import anything", "cli may not import compat"),
]


@pytest.mark.parametrize(("room", "text", "complaint"), FAULTS)
def test_each_kind_of_fault_is_seen(room: str, text: str, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check that only looks at the top of a file, or only at absolute names: each fault is put in."""
    file = PACKAGE / room / "put_in.py"
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, **how: text if self == file else read(self, **how))
    assert [complaint in found for found in complaints([file])] == [True]


ROOMS = [*sorted({room_of(file) for file in FILES} - {"bluejay", "leaves"}), *LEAVES]


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_public_names_exist(room: str) -> None:
    """Catches a name in `__all__` that nothing defines, and a list that is not sorted or repeats itself."""
    module = import_module(f"bluejay.{room}" if room else "bluejay")
    names = getattr(module, "__all__", None)
    if names is None:
        assert not hasattr(module, "__path__"), f"room {room} has no __all__"
        return
    assert len(names) == len(set(names))
    for name in names:
        assert getattr(module, name) is not None


def test_leaves_import_the_standard_library_only() -> None:
    """Catches a leaf that pulls in torch, or another leaf."""
    for leaf in LEAVES:
        for found in imports_of(PACKAGE / f"{leaf}.py"):
            assert found.module.split(".")[0] in sys.stdlib_module_names, str(found)


def test_third_parties_stay_in_their_rooms() -> None:
    """Catches the reference imported by the thing it judges, and terminal libraries below the command line."""
    for file in FILES:
        for found in imports_of(file):
            top = found.module.split(".")[0]
            assert top != "transformers", f"{found}: transformers is for tests only"
            assert top not in ("typer", "rich") or room_of(file) == "cli", f"{found}: only cli talks to the terminal"


def test_only_cli_prints_and_reads_the_environment() -> None:
    """Catches a stray print in a stream that a program reads, and a setting that no fingerprint can know of."""
    found = []
    hides_it = PACKAGE / "compile" / "pristine.py"  # from torch, while a program is built: decision 0014
    for file in FILES:
        if room_of(file) == "cli" or file == hides_it:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if dotted in ("os.environ", "os.getenv", "os.environb", "sys.stdout", "sys.stderr", "sys.argv"):
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}: {dotted}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "input"):
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}: {node.func.id}")
        found += [str(i) for i in imports_of(file) if i.module == "os" and {"environ", "getenv"} & set(i.names)]
    assert found == []


def test_model_files_can_be_read_in_one_sitting() -> None:
    """Catches a model file that has grown past what one reads from top to bottom."""
    for file in sorted((PACKAGE / "models").glob("*.py")):
        assert len(file.read_text(encoding="utf-8").splitlines()) < 350, file.name
