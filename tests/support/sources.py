"""Source files as syntax trees, each parsed once per process. Do not change the returned trees."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def module(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, starting with the module."""
    return tuple(ast.walk(module(path)))
