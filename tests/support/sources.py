"""Source files as trees, each parsed once per process. Do not change the returned trees."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def module(path: Path) -> ast.Module:
    """Return the tree of a file."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, the module first."""
    return tuple(ast.walk(module(path)))
