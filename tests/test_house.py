"""The rules of the house that a machine can check. Each one says how to mend what it finds."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak.__main__ import SOAKS
from tests.support.sources import module, nodes

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent

FUNCTION_LINES_MAX = 70
LUA_LINES_MAX = 80
TEXT = {".py", ".lua", ".toml", ".md", ".service", ".yml", ".yaml", ".conf", ""}


def repository() -> list[Path]:
    """All files of the repository, as git sees them; of an unpacked sdist, all files."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:
        paths = [path for path in ROOT.rglob("*") if ".venv" not in path.parts]
    return sorted(path for path in paths if path.is_file())


FILES = repository()
PACKAGE = [path for path in FILES if path.suffix == ".py" and ROOT / "streamqd" in path.parents]
PAGES = [path for path in FILES if path.suffix == ".md"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def run(*command: str | Path) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout


def test_file_search_finds_package_and_pages():
    assert len(PACKAGE) > 20
    assert {"README.md", "docs/index.md"} <= {name(path) for path in PAGES}


def test_imports_respect_the_layers():
    run(BIN / "lint-imports", "--no-cache")


def test_ruff_check_passes():
    run(BIN / "ruff", "check")


def test_ruff_format_passes():
    run(BIN / "ruff", "format", "--check")


def test_class_names_are_unique():
    defined: dict[str, list[str]] = {}
    for path in PACKAGE:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, []).append(f"{name(path)}:{node.lineno}")
    twice = {known: places for known, places in defined.items() if len(places) > 1}
    assert twice == {}, "one name, one meaning: name one of them after what only it is"


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the modules that an import statement names, with their packages."""
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}.{each.name}" for each in node.names)


def test_no_private_name_of_a_dependency_is_imported():
    """A release of the dependency may change or remove a private name without notice."""
    private = [
        f"{name(path)}:{node.lineno}: {imported}"
        for path in PACKAGE
        for node in nodes(path)
        for imported in _imported(node)
        if not imported.startswith(("streamqd.", "__future__.")) and re.search(r"(^|\.)_", imported)
    ]
    assert private == [], "use what the library documents"


def test_select_is_not_used():
    """`select` takes no descriptor of 1,024 or more; wait by `process.wait_readable`."""
    found = [
        f"{name(path)}:{node.lineno}"
        for path in PACKAGE
        for node in nodes(path)
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "select"
            and isinstance(node.value, ast.Name)
            and node.value.id == "select"
        )
        or "select.select" in {*_imported(node)}
    ]
    assert found == []


def test_generated_files_are_current():
    """Mend it with `make docs`."""
    run(sys.executable, "docs/generate.py", "--check")


def _below_header(path: Path) -> list[str]:
    """The lines of a script without its contract, which may be as long as it needs."""
    lines = path.read_text().splitlines()
    return list(itertools.dropwhile(lambda line: line.startswith("--"), lines))


def test_scripts_are_short():
    lengths = {path: len(_below_header(path)) for path in FILES if path.suffix == ".lua"}

    assert {name(p): n for p, n in lengths.items() if n > LUA_LINES_MAX} == {}


def test_functions_are_short():
    long = {
        f"{name(path)}:{node.name}": length
        for path in PACKAGE
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX
    }

    assert long == {}


def test_every_module_has_a_docstring():
    silent = [name(path) for path in PACKAGE if not ast.get_docstring(module(path))]

    assert silent == []


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "XX" + "X"])
def test_no_todo_is_left(word: str):
    places = [
        f"{name(path)}:{number}"
        for path in FILES
        if path.suffix in TEXT
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"\b{word}\b", line)
    ]

    assert places == []


# Makes objects or code of bytes. Handlers come from the configuration alone.
CODE_MODULES = frozenset(
    {"pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "yaml"}
)
CODE_CALLS = frozenset({"eval", "exec", "compile", "__import__", "import_module"})
CODE_ALLOWED = {
    ("streamqd/handlers/signatures.py", "eval"): "annotations of the user's own function",
    ("streamqd/handlers/loading.py", "import_module"): "the handler that the configuration names",
    ("streamqd/handlers/probing.py", "import_module"): "the modules that the configuration names",
    ("streamqd/handlers/payloads.py", "import_module"): "msgspec",
    ("streamqd/django/worker.py", "import_module"): "modules of the apps in INSTALLED_APPS",
    ("streamqd/startup.py", "import_module"): "daemon.preload",
    ("streamqd/cli/root.py", "import_module"): "commands",
    ("streamqd/__init__.py", "import_module"): "names of the public API",
    ("streamqd/spark/pipelines/run.py", "import_module"): "the job that the command line names",
}


def _ways_to_code(path: Path) -> Iterator[tuple[str, str]]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            named = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named = {(node.module or "").partition(".")[0]}
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            plain = called in ("re.compile", "regex.compile")
            named = set() if plain else {called.rpartition(".")[2]} & CODE_CALLS
        else:
            continue
        for found in named & (CODE_MODULES | CODE_CALLS):
            yield name(path), found


def test_received_data_cannot_become_code():
    found = {way for path in PACKAGE for way in _ways_to_code(path)}

    assert found - CODE_ALLOWED.keys() == set()
    assert {way for way in CODE_ALLOWED if way not in found} == set(), "no longer needed"


def test_no_file_contains_a_local_path():
    local = {str(place) for place in (ROOT, Path.home()) if len(place.parts) > 2}
    places = [
        f"{name(path)}: {found}"
        for path in FILES
        if path.suffix in TEXT
        for found in local
        if re.search(rf"{re.escape(found)}(?![\w-])", path.read_text())
    ]

    assert places == []


# --- the documentation ----------------------------------------------------------------------------


def is_made(target: str, part: str, makefile: str) -> bool:
    """Whether `make TARGET NAME=PART` is something."""
    if target == "soak":
        return part in SOAKS
    if target == "bench" and (ROOT / "tests" / "benchmarks" / part).with_suffix(".py").exists():
        return True
    return part == "peers" or bool(
        re.search(rf"^{target}-{part} :=|\(NAME\),{part}\)", makefile, re.MULTILINE)
    )


def test_every_make_command_in_the_pages_exists():
    made = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", made, re.MULTILINE))
    named = {
        (name(page), *words)
        for page in PAGES
        if page.name != "CHANGELOG.md"  # what was true then
        for words in re.findall(
            r"(?:^|`)make ([a-z][a-z0-9-]*)(?: NAME=([a-z-]+))?", page.read_text(), re.MULTILINE
        )
    }

    assert {target for _, target, _ in named} >= {"run", "serve", "test", "bench", "verify"}
    assert {each for each in named if each[1] not in targets} == set()
    assert {each for each in named if each[2] and not is_made(each[1], each[2], made)} == set()


def test_make_help_fits_one_screen():
    listed = subprocess.run(["make", "-s"], cwd=ROOT, text=True, capture_output=True, check=True)

    assert 10 < len(listed.stdout.splitlines()) <= 15


def links(page: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    yield from re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(page: Path) -> set[str]:
    """The anchors that the headings of a page get on the usual forges."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in words}


def test_every_link_between_the_pages_resolves():
    broken = []
    for page in PAGES:
        for link in links(page):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{name(page)}: {link}")

    assert broken == []


def test_every_page_can_be_reached_from_the_readme():
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or not page.is_file():
            continue
        reached.add(page)
        for link in links(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md":
                waiting.append(target)
    docs = {page for page in PAGES if ROOT / "docs" in page.parents}

    assert {name(page) for page in docs - reached} == set()


def test_python_in_the_pages_compiles():
    blocks = [
        (name(page), block)
        for page in PAGES
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    ]

    assert blocks
    for page, block in blocks:
        compile(block, page, "exec")


def test_tests_named_by_pages_exist():
    named = {
        (name(page), path, test)
        for page in PAGES
        for path, test in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)", page.read_text())
    }

    assert named
    missing = [each for each in named if f"def {each[2]}(" not in (ROOT / each[1]).read_text()]
    assert missing == []
