"""Names of code exist on the pages about the source and in comments: files, classes, members."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages.test_snippets import GENERATED, INLINE, ROOT, report

PAGES = [
    page
    for page in [
        ROOT / "docs" / "explanation" / "design.md",
        *sorted(ROOT.glob("docs/internals/*.md")),
    ]
    if not page.read_text().startswith(GENERATED)
]
FILE = re.compile(r"(?:[\w.-]+/)*[\w-]+\.(?:py|lua|toml)")
MEMBER = re.compile(r"(\w+)\.(\w+)")
PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?:\(\))?")
NAME = re.compile(r"_\w+|[a-z]+_\w*[a-z0-9]|[A-Z]\w*[a-z]\w*")


class Source:
    """The names that the files of the repository define."""

    def __init__(self) -> None:
        self.files = [
            f"/{each.relative_to(ROOT)}"
            for folder in ("streamqd", "lua", "tests")
            for each in (ROOT / folder).rglob("*.*")
        ] + [f"/{each.name}" for each in ROOT.glob("*.*")]
        self.names = {each.stem for each in (ROOT / "lua").glob("*.lua")}
        self.modules: dict[str, set[str]] = defaultdict(set)
        self.classes: dict[str, set[str]] = {}
        self.bases: dict[str, list[str]] = {}
        for path in ROOT.glob("streamqd/**/*.py"):
            self._read(path, ast.parse(path.read_text()))

    def _read(self, path: Path, tree: ast.Module) -> None:
        names = set(_names(tree))
        self.names |= names
        self.modules[path.stem] |= names
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = set(_members(node))
                self.bases[node.name] = [ast.unparse(base) for base in node.bases]

    def contains(self, span: str) -> bool:
        """Return True if this file, member or name exists, or if `span` is none of them."""
        if FILE.fullmatch(span):
            return any(each.endswith(f"/{span}") for each in self.files)
        if found := MEMBER.fullmatch(span):
            owner, name = found.groups()
            if owner in self.classes:
                return self._has(owner, name)
            return name in self.modules[owner] if owner in self.modules else name in self.names
        return span in self.names if NAME.fullmatch(span) else True

    def contains_path(self, span: str) -> bool:
        """Return True if each name of a dotted path exists, or if the path is a string or file."""
        if span in self.names or any(each.endswith(f"/{span}") for each in self.files):
            return True
        names = span.split(".")
        if len(names) == 2 and names[0] in self.classes:
            return self._has(*names)
        return all(name in self.names or name in self.modules for name in names)

    def _has(self, owner: str, name: str) -> bool:
        if name in self.classes.get(owner, ()):
            return True
        return any(
            self._has(re.sub(r"\[.*|^.*\.", "", base), name) for base in self.bases.get(owner, ())
        )


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Name():
                yield node.id
            case ast.Attribute():
                yield node.attr
            case ast.arg():
                yield node.arg
            case ast.Constant(value=str(text)):
                yield text  # for example, a name of a field in Redis


def _members(owner: ast.ClassDef) -> Iterator[str]:
    for node in owner.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.Assign() | ast.AnnAssign():
                yield from (each.id for each in ast.walk(node) if _is_assigned(each))
    for node in ast.walk(owner):
        match node:
            case ast.Attribute(value=ast.Name("self" | "cls")):
                yield node.attr


def _is_assigned(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


@pytest.fixture(scope="module")
def source() -> Source:
    return Source()


def test_every_code_name_on_a_page_exists(source: Source) -> None:
    report(
        f"{page.relative_to(ROOT)}: `{span}` does not exist"
        for page in PAGES
        for span in dict.fromkeys(
            INLINE.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
        )
        if not source.contains(span.removesuffix("()"))
    )


def test_every_code_name_in_a_comment_exists(source: Source) -> None:
    report(
        f"{path.relative_to(ROOT)}: `{span}` does not exist"
        for path in sorted(ROOT.glob("streamqd/**/*.py"))
        for text in _comments(path.read_text())
        for span in INLINE.findall(text)
        if PATH.fullmatch(span) and not source.contains_path(span.removesuffix("()"))
    )


def _comments(text: str) -> Iterator[str]:
    """Yield the docstrings and comments of a module."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(docstring))):
                yield docstring
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@pytest.mark.parametrize(
    ("span", "exists"),
    [
        ("WorkerLoop._serve", True),
        ("ByKey.waiting", True),  # a member of its base class, or its own attribute
        ("WorkerLoop.serve_for_ever", False),
        ("WorkerLoop.ahead", False),  # only a local variable of its methods
        ("settlement.decide", True),
        ("settlement.decline", False),
        ("supervisor/plan.py", True),
        ("supervisor/plans.py", False),
        ("lease_refence", True),
        ("lease_defence", False),
        ("HeldLease", True),
        ("HeldLeash", False),
        ("_plan_actions", True),
        ("_plan_action", False),
        ("XREADGROUP", True),  # not a name of code
    ],
)
def test_name_is_found_only_if_the_source_defines_it(
    source: Source, span: str, exists: bool
) -> None:
    assert source.contains(span) is exists
