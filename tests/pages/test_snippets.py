"""Everything that pages quote exists: commands, options, settings, API names, metrics, log events.

test_pages.py types the commands of the README and the tutorials. This module covers all other
pages, and needs no server.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.exceptions import NoArgsIsHelpError

from streamqd import config, logs, pytest_plugin
from streamqd.cli import cli as root
from streamqd.config.outboxes import TABLE
from streamqd.config.schema import SECTIONS
from streamqd.config.setting import section_settings
from streamqd.errors import ConfigError
from streamqd.metrics.table import METRICS
from tests.pages.reader import Fence, fences
from tests.support import optional

ROOT = Path(__file__).parents[2]
GENERATED = "<!-- Generated"  # these pages are generated from the sources that the tests compare
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    if not page.read_text().startswith(GENERATED)
]
SHELL = ("", "sh")
ENDS = re.compile(r"[|&;<>()]+")
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
ELLIPSIS = {"…", "..."}
# The name of another series: the argument of a function like `rate`, or a part of a histogram.
PARTS = re.compile(r"_(bucket|sum|count|created)$")
EVENT = re.compile(r"[a-z]+\.(?!(?:py|acl|parquet|md|toml|lua|json|ms|bytes)$)[a-z_]+")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(*languages: str) -> list[tuple[str, Fence]]:
    """Return all code blocks in these languages, each with its position."""
    return [
        (f"{name(page)}:{fence.line}", fence)
        for page in PAGES
        for fence in fences(page)
        if fence.language in languages
    ]


def current(page: Path) -> str:
    """Return the text of a page, but not its tables of renamed names, which contain old names."""
    renamed = r"^\|(?: \w+ \|)? Old \| New \|\n(\|.*\n)+"
    return re.sub(renamed, "", page.read_text(), flags=re.MULTILINE)


def spans() -> Iterator[tuple[str, str]]:
    """Return all inline code of sentences and tables, each with its page."""
    for page in PAGES:
        text = re.sub(r"```.*?```", "", current(page), flags=re.DOTALL)
        for span in INLINE.findall(text):
            yield name(page), span


def report(found: Iterable[str]) -> None:
    told = list(found)
    assert told == [], "\n" + "\n".join(told)


def test_pages_agree_about_a_drained_instance() -> None:
    """All pages say that a drained instance is ready, as a test of `test_steering.py` checks."""
    told = [
        f"{name(page)}: {' '.join(paragraph.split())}"
        for page in [*PAGES, ROOT / "docs/reference/metrics.md"]
        for paragraph in re.split(r"\n\n|\n(?=[|-] )", page.read_text())
        if "/readyz" in paragraph and "drain" in paragraph
    ]
    assert len(told) >= 4, told
    good = ("stays good", "stays ready", "`/readyz` good")
    report(each for each in told if not any(word in each for word in good))


# --- commands -------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """Return the arguments of each streamqd command in a block of shell code."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = [*lexer, ";"]
        except ValueError:  # the text is a picture, or a quoted string of several lines
            continue
        command: list[str] = []
        for word in words:
            if not ENDS.fullmatch(word):
                command.append(word)
                continue
            yield from streamqd_arguments(command)
            command = []


def streamqd_arguments(command: list[str]) -> Iterator[list[str]]:
    """Return the arguments of a simple command if it is a streamqd command."""
    for at, word in enumerate(command):
        if word.rpartition("/")[2] == "streamqd":
            before = command[at - 1] if at else "--"
            if before in ("--", "sudo") or ASSIGNMENT.fullmatch(before):
                yield command[at + 1 :]
            return


def complaint(words: list[str], *, whole: bool) -> str:
    """Return the error of the command line for these arguments, or '' if there is none.

    Nothing is run.
    """
    stop = next((at for at, word in enumerate(words) if word in ELLIPSIS), None)
    whole, words = whole and stop is None, words[:stop]
    try:
        context = root.make_context("streamqd", words)
        while isinstance(group := context.command, click.Group):
            left = [*context._protected_args, *context.args]
            if not left:
                break
            verb, command, rest = group.resolve_command(context, left)
            assert command is not None
            context = command.make_context(verb, rest, parent=context)
    except click.exceptions.Exit:  # --help and --version
        return ""
    except (click.MissingParameter, click.BadOptionUsage, NoArgsIsHelpError) as error:
        return error.format_message() if whole else ""
    except click.ClickException as error:
        return error.format_message()
    return ""


def test_every_command_of_the_pages_parses() -> None:
    said = [(at, words) for at, fence in blocks(*SHELL) for words in commands(fence.text)]
    assert len(said) > 120

    report(
        f"{at}: streamqd {shlex.join(words)}: {against}"
        for at, words in said
        if (against := complaint(words, whole=True))
    )


def test_every_command_within_a_sentence_exists() -> None:
    said = [(at, words) for at, span in spans() for words in commands(span)]
    assert len(said) > 80

    report(
        f"{at}: streamqd {shlex.join(words)}: {against}"
        for at, words in said
        if (against := complaint(words, whole=False))
    )


@pytest.mark.parametrize(
    "lie", ["statsu", "status --jsno", "dlq shwo access 1", "drain", "dlq stats access --since x"]
)
def test_invalid_command_is_detected(lie: str) -> None:
    found = [complaint(words, whole=True) for words in commands(f"sudo streamqd {lie}")]

    assert len(found) == 1
    assert found[0]


# --- settings, code, names ------------------------------------------------------------------------


def test_every_configuration_of_the_pages_loads(tmp_path: Path) -> None:
    file = tmp_path / "streamq.toml"
    problems = []
    for at, fence in blocks("toml"):
        if fence.file == "pyproject.toml":
            continue
        file.write_text(fence.text)
        for secret in re.findall(r'_file = "(?!/)(.+?)"', fence.text):
            (tmp_path / secret).write_text("secret-of-a-page")
            (tmp_path / secret).chmod(0o600)
        # A file that is shown only in part relies on the decorators of the handler module.
        declared = {} if "handlers" in fence.text else {"daemon.handlers": "weblog"}
        try:
            config.load(file, declared, environ={})
        except ConfigError as error:
            problems.append(f"{at}: {error}")

    report(problems)


def test_every_table_and_list_of_the_pages_parses() -> None:
    for _, fence in blocks("yaml"):
        yaml.safe_load(fence.text)
    for _, fence in blocks("json"):
        json.loads(fence.text)


def uses(tree: ast.AST) -> Iterator[str]:
    """Return the names that a piece of Python uses, but that streamqd does not have."""
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "streamqd":
                    module = importlib.import_module(alias.name)
                    known[alias.asname or alias.name] = module
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "streamqd":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                with contextlib.suppress(ImportError):  # the name may be that of a module below it
                    importlib.import_module(f"{node.module}.{alias.name}")
                if hasattr(module, alias.name):
                    known[alias.asname or alias.name] = getattr(module, alias.name)
                else:
                    yield f"{node.module} has no {alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = known.get(node.func.id)
            given = [word.arg for word in node.keywords if word.arg]
            yield from (f"{node.func.id} takes no {word}" for word in unknown(called, given))


def unknown(called: Callable[..., Any] | None, given: list[str]) -> list[str]:
    """Return the named arguments that a function or class does not accept."""
    if called is None or (inspect.isclass(called) and called.__init__ is Exception.__init__):
        return []
    parameters = inspect.signature(called).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return []
    return [word for word in given if word not in parameters]


def test_python_of_the_pages_uses_existing_names() -> None:
    found = blocks("python")
    assert len(found) > 30

    problems = []
    for at, fence in found:
        try:
            problems += [f"{at}: {each}" for each in uses(ast.parse(fence.text))]
        except ModuleNotFoundError as error:
            if not (reason := optional.missing(error)):
                raise
            print(f"{at} is left out: {reason}")
    report(problems)


def test_every_example_has_a_page_and_a_test() -> None:
    folder = ROOT / "streamqd" / "examples"
    pages = "\n".join(page.read_text() for page in PAGES)
    tests = "\n".join(file.read_text() for file in ROOT.glob("tests/**/test_*.py"))
    examples = [each for each in sorted(folder.iterdir()) if not each.name.startswith("_")]
    assert len(examples) > 10

    for place, text, form in (("page", pages, r"examples[./]{}\b"), ("test", tests, r"\b{}\b")):
        report(
            f"no {place} uses {name(each)}"
            for each in examples
            if not re.search(form.format(each.stem), text)
        )


def test_every_named_metric_exists() -> None:
    known = {metric.name for metric in METRICS} | {*dir(pytest_plugin)}
    known |= {TABLE, f"{TABLE}_dead"} | {label for metric in METRICS for label in metric.labels}
    files = [*PAGES, ROOT / "etc" / "alerts.yml", ROOT / "etc" / "grafana.json"]
    named = {
        (name(file), word)
        for file in files
        for word in re.findall(r"\bstreamqd_[a-z0-9_]+", current(file))
    }
    assert len(named) > 30

    report(
        f"{at}: {word}"
        for at, word in sorted(named)
        if not {word, PARTS.sub("", word), f"{word}_total"} & known
    )


def test_every_named_log_event_and_setting_exists() -> None:
    """Every word like `worker.crashed` whose first part is known names a log event or a setting."""
    settings = {
        f"{each}.{key}" for each, kind in SECTIONS.items() for key in section_settings(kind)
    }
    others = {"config.topology", "message.dead_letter"}  # the names of a module and of an attribute
    known = settings | {*logs.EVENTS} | others
    begins = {word.partition(".")[0] for word in known}
    named = {each for each in spans() if EVENT.fullmatch(each[1])}
    assert len(named) > 40

    report(
        f"{at}: {word}"
        for at, word in sorted(named)
        if word.partition(".")[0] in begins and word not in known
    )
