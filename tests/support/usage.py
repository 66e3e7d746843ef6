"""Find the Redis commands that a part of streamqd sends, from its source and its scripts.

A part is a list of modules, all of whose code counts. Of the code in `streamqd.store`, only the
functions and classes that these modules refer to count, directly or indirectly. A command has a
form like `hget` or, with a subcommand, `xinfo|stream`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from streamqd.store import scripts

PACKAGE = Path(__file__).parents[2] / "streamqd"
STORE = PACKAGE / "store"
# Commands for which permissions are granted per subcommand.
WORDED = frozenset(
    {"CLIENT", "CLUSTER", "CONFIG", "LATENCY", "MEMORY", "SCRIPT", "SLOWLOG", "XGROUP", "XINFO"}
)
_CALL = re.compile(rb"(?:\bredis\.p?|(?<![.\w]))call\(\s*'(\w+)'(?:,\s*'(\w+)')?")
_COMMAND = re.compile(r"[A-Z]{3,}")

Place = tuple[str, str]  # module of the store, name of a function or class in it


def module_commands(*parts: str) -> set[str]:
    """Return the commands of modules and packages, such as "worker" and "cli/check.py"."""
    found: set[str] = set()
    waiting: list[Place] = []
    for part in parts:
        path = PACKAGE / part
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            tree = ast.parse(file.read_text())
            found |= _commands(tree)
            waiting += _references(tree, tree, "")
    seen: set[Place] = set()
    while waiting:
        place = waiting.pop()
        module = _store().get(place[0])
        if module is None or place in seen or place[1] not in module.named:
            continue
        seen.add(place)
        node = module.named[place[1]]
        found |= _commands(node)
        waiting += _references(node, module.tree, place[0])
    return found


def script_commands(names: Iterable[str]) -> set[str]:
    """Return the commands that scripts call."""
    return {
        _written(name.decode(), word.decode() or None)
        for script in names
        for name, word in _CALL.findall(scripts.get(script).source)
    }


class _Module:
    """A module of the store: its top-level functions, classes and assigned names."""

    def __init__(self, file: Path) -> None:
        self.tree = ast.parse(file.read_text())
        self.named: dict[str, ast.AST] = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.named[node.name] = node
            elif isinstance(node, ast.Assign):
                self.named |= {each.id: node for each in node.targets if isinstance(each, ast.Name)}


@cache
def _store() -> dict[str, _Module]:
    return {file.stem: _Module(file) for file in STORE.glob("*.py")}


def _commands(node: ast.AST) -> set[str]:
    found = set()
    for parts in _sequences(node):
        texts = [each.value if isinstance(each, ast.Constant) else None for each in parts]
        if texts and isinstance(texts[0], str) and _COMMAND.fullmatch(texts[0]):
            word = texts[1] if len(texts) > 1 and isinstance(texts[1], str) else None
            found.add(_written(texts[0], word))
    named = {
        each.args[0].value
        for each in ast.walk(node)
        if isinstance(each, ast.Call)
        and ast.unparse(each.func) in ("scripts.get", "scripts.build_call", "_fenced_call")
        and isinstance(each.args[0], ast.Constant)
    }
    return found | script_commands(named)


def _sequences(node: ast.AST) -> Iterator[list[ast.expr]]:
    """Yield possible commands: the arguments of calls to a link or a packer, and tuples."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            name = ast.unparse(each.func).rpartition(".")[2]
            if name in ("execute", "_pack", "pack"):
                yield each.args
        elif isinstance(each, ast.Tuple) and not _only_names(each):
            yield each.elts


def _only_names(several: ast.Tuple) -> bool:
    """Return True if a tuple lists commands instead of being a single command."""
    return all(isinstance(each, ast.Constant) and each.value in WORDED for each in several.elts)


def _references(node: ast.AST, tree: ast.Module, home: str) -> list[Place]:
    """Return the names of the store that are used below a node.

    They are resolved by the imports of the node's module.
    """
    modules: dict[str, str] = {}
    names: dict[str, Place] = {}
    for each in ast.walk(tree):
        if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("streamqd.store"):
            for alias in each.names:
                local = alias.asname or alias.name
                if each.module == "streamqd.store":
                    modules[local] = alias.name
                else:
                    names[local] = (str(each.module).rpartition(".")[2], alias.name)
    found: list[Place] = []
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            if each.value.id in modules:
                found.append((modules[each.value.id], each.attr))
        elif isinstance(each, ast.Name):
            if each.id in names:
                found.append(names[each.id])
            elif home:
                found.append((home, each.id))
    return found


def _written(command: str, word: str | None) -> str:
    return f"{command}|{word}".lower() if command in WORDED and word else command.lower()
