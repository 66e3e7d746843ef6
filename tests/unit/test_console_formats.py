"""The console prints numbers, ages and sentences in the right format."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from tests.support import optional

pytestmark = optional.need("starlette", "jinja2")

import jinja2.meta  # noqa: E402
import jinja2.nodes  # noqa: E402

import streamqd  # noqa: E402
from streamqd import config  # noqa: E402
from streamqd.console import app, formats, pages, views  # noqa: E402
from streamqd.console.access import Person, Role  # noqa: E402
from streamqd.console.pages import Pages  # noqa: E402
from streamqd.console.view import Visit  # noqa: E402
from streamqd.console.views import ACTS, DOWNLOADS, VIEWS  # noqa: E402
from streamqd.console.views.dead import read_choice  # noqa: E402
from streamqd.dead_letter import REASONS  # noqa: E402
from streamqd.errors import InvalidRequestError  # noqa: E402
from tests.support.sources import nodes  # noqa: E402

NOON = 1_795_867_200_000  # 2026-11-28 12:00:00 UTC
HOUR = 3_600_000
LOOP = ("first", "last", "index", "index0")  # attributes of `loop` that templates read
# The modules that define the rows on pages.
SHOWN = ("admin/**/*.py", "console/**/*.py", "model.py", "store/directives.py", "store/stacks.py")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "\u2013"), (0, "0"), (1234567, "1,234,567"), (2**63 + 1, "9,223,372,036,854,775,809")],
)
def test_numbers_are_exact_at_any_size(value, text):
    assert formats.number(value) == text


@pytest.fixture(scope="module")
def console_pages():
    """The pages of a console with the default settings."""
    return Pages(config.Settings(), VIEWS, ACTS, DOWNLOADS)


@pytest.fixture(scope="module")
def environment(console_pages):
    """The environment that renders the console's templates."""
    return console_pages._environment


@pytest.fixture(scope="module")
def trees(environment):
    """The syntax tree of each template, by file name."""
    return {
        name: environment.parse(environment.loader.get_source(environment, name)[0])
        for name in environment.list_templates(["html"])
    }


def test_templates_use_only_filters_that_exist(environment, trees):
    """Templates use only filters that exist.

    Jinja finds an unknown one only when it renders its branch.
    """
    unknown = {
        (name, used.name)
        for name, tree in trees.items()
        for used in tree.find_all(jinja2.nodes.Filter)
        if used.name not in environment.filters
    }

    assert unknown == set()


def test_links_of_templates_pass_every_parameter_of_the_path(console_pages, trees):
    """Every link passes all parameters of its path.

    Otherwise, it would become plain text without an error.
    """
    incomplete = set()
    for template, tree in trees.items():
        for call in tree.find_all(jinja2.nodes.Call):
            called = getattr(call.node, "attr", None) or getattr(call.node, "name", None)
            position = {"to": 0, "button": 0, "link": 1}.get(called)
            if position is None or call.dyn_kwargs or len(call.args) <= position:
                continue
            name = call.args[position]
            if not isinstance(name, jinja2.nodes.Const):
                continue
            path = console_pages._paths.get(name.value)
            given = {each.key for each in call.kwargs}
            if path is None or not set(re.findall(r"{(\w+)}", path)) <= given:
                incomplete.add((template, called, name.value, *sorted(given)))

    assert incomplete == set()


def names_set_in(tree):
    """Return the names that a template gives to its macros, imports and variables."""
    targets = [
        name
        for each in tree.find_all(jinja2.nodes.Assign)
        for name in (each.target, *each.target.find_all(jinja2.nodes.Name))
        if isinstance(name, jinja2.nodes.Name)
    ]
    imports = {each.target for each in tree.find_all(jinja2.nodes.Import)}
    return imports | {each.name for each in (*tree.find_all(jinja2.nodes.Macro), *targets)}


def names_defined_in(path):
    """Return the names of the functions and annotated fields of a module."""
    functions = {each.name for each in nodes(path) if isinstance(each, ast.FunctionDef)}
    fields = (each.target for each in nodes(path) if isinstance(each, ast.AnnAssign))
    return functions | {each.id for each in fields if isinstance(each, ast.Name)}


def names_passed_in(module):
    """Return the keys of a module's dicts, and the names of the arguments in its calls."""
    found = set()
    for each in nodes(Path(module.__file__)):
        if isinstance(each, ast.Dict):
            found |= {key.value for key in each.keys if isinstance(key, ast.Constant)}
        elif isinstance(each, ast.keyword):
            found.add(each.arg)
    return found


def test_templates_read_only_attributes_that_the_code_defines(trees):
    """Jinja finds a missing attribute only when it renders the branch that reads it."""
    package = Path(streamqd.__file__).parent
    paths = [path for name in SHOWN for path in package.glob(name)]
    defined = set().union(*map(names_defined_in, paths), *map(names_set_in, trees.values()))
    unknown = {
        (name, each.attr)
        for name, tree in trees.items()
        for each in tree.find_all(jinja2.nodes.Getattr)
        if each.attr not in {*defined, *dir(dict), *dir(str), *LOOP}
    }

    assert unknown == set()


def test_templates_read_only_variables_that_the_code_passes(environment, trees):
    """Jinja finds a missing variable only when it renders the branch that reads it."""
    views = {f"{each.name}.html": each for each in VIEWS}
    common = {*environment.globals, *names_passed_in(pages), "self", "visit"}
    unknown = set()
    for name, tree in trees.items():
        view = views.get(name)
        known = common | names_set_in(tree)
        known |= names_passed_in(app if view is None else inspect.getmodule(view.context))
        known |= set() if view is None else {*re.findall(r"{(\w+)}", view.path)}
        read = jinja2.meta.find_undeclared_variables(tree)
        unknown |= {(name, each) for each in read - known}

    assert unknown == set()


def test_sentences_of_views_contain_no_identifiers():
    """Renaming a variable must not also rename a word in a sentence that a person reads."""
    found = []
    for path in sorted(Path(views.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        docs = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
        texts = [each for each in ast.walk(tree) if isinstance(each, ast.Constant)]
        found += [
            f"{path.name}:{each.lineno} {word}"
            for each in texts
            if id(each) not in docs and isinstance(each.value, str) and " " in each.value
            for word in re.findall(r"\b[a-z]+_[a-z_]+\b", each.value)
        ]

    assert found == []


@pytest.mark.parametrize(
    ("clause", "text"),
    [
        ("nothing was changed", "Nothing was changed."),
        ("scope: not a scope", "Scope: not a scope."),
        ("orders/*/* is still paused", "orders/*/* is still paused."),
        ("web-2 already owns it", "web-2 already owns it."),
        ("3 groups, no messages waiting", "3 groups, no messages waiting."),
        ("", "."),
    ],
)
def test_sentence_keeps_a_scope_and_the_name_of_an_instance(clause, text):
    assert formats.sentence(clause) == text


@pytest.mark.parametrize(
    ("passed", "text"), [(400, "now"), (65_000, "1m5s ago"), (-65_000, "in 1m5s"), (-100, "now")]
)
def test_ago_formats_past_and_future_times(passed, text):
    assert formats.ago(10**12 - passed, 10**12) == text


@pytest.mark.parametrize("unix_ms", [10**30, -(10**30)])
def test_instant_out_of_range_is_printed_as_a_number(unix_ms):
    assert formats.instant(unix_ms) == str(unix_ms)


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("no instance; run `x <b>`", "No instance; run <code>x &lt;b&gt;</code>"),
        ("orders has 3 dead letters", "orders has 3 dead letters"),
        ("<img src=x onerror=alert(1)>", "&lt;img src=x onerror=alert(1)&gt;"),
    ],
)
def test_prose_escapes_but_never_changes_names(text, html):
    assert str(formats.prose(text)) == html


@pytest.mark.parametrize(("share", "text"), [(0.0, "0"), (0.00001, "<0.1%"), (1.0, "100%")])
def test_percent_never_rounds_a_share_to_zero(share, text):
    assert formats.percent(share) == text


@pytest.mark.parametrize(
    ("unix_ms", "text"),
    [
        (NOON - 59_000, ""),
        (NOON - 60_000, "11:59 UTC"),
        (NOON + HOUR, "13:00 UTC"),
        (NOON - 13 * HOUR, "Nov 27, 23:00 UTC"),
        (NOON - 400 * 24 * HOUR, "2025-10-24, 12:00 UTC"),
        (None, ""),
    ],
)
def test_clock_of_an_older_instant_shows_its_zone(unix_ms, text):
    assert formats.clock(unix_ms, NOON) == text


def test_every_dead_letter_reason_has_a_description():
    found = [formats.reason(each) for each in REASONS]

    assert len({*found}) == len(REASONS)
    assert [each for each in found if " " not in each] == []
    assert formats.reason("later\x00") == "later\\x00"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (False, "false"),
        (True, "true"),
        (None, "\u2013"),
        ("", "\u2013"),
        (3, "3"),
        (["a", False], "a, false"),
        ({"x": True}, "x=true"),
    ],
)
def test_values_are_printed_in_words(value, text):
    assert formats.setting(value) == text


@pytest.mark.parametrize(
    ("command", "url"),
    [
        ("streamqd rebalance", "/fleet"),
        ("streamqd drain one --undo", "/fleet"),
        ("streamqd rebalanced", ""),
        ("streamqd retry list orders bill", "/topics/orders/retries/bill"),
        ("streamqd pause orders/bill", "/topics/orders?group=bill"),
    ],
)
def test_advice_links_to_the_console_page_of_a_command(command, url):
    assert Pages(config.Settings(), VIEWS, ACTS, DOWNLOADS).url_for_command(command) == url


@pytest.mark.parametrize(
    ("text", "unix_ms"),
    [
        ("1h30m", NOON - HOUR - HOUR // 2),
        ("7d", NOON - 7 * 24 * HOUR),
        (f"{NOON}", NOON),
        ("2026-11-28T12:00", NOON),
        ("999999999999999w", 0),
    ],
)
def test_since_filter_accepts_an_age_or_a_time(text, unix_ms):
    anna = Person("anna", Role.ADMIN, "show")
    assert read_choice(Visit(None, anna, {}, {"since": text}), NOON).since_unix_ms == unix_ms


@pytest.mark.parametrize("text", ["yesterday", "1m1h", "-1h"])
def test_since_filter_refuses_other_text(text):
    anna = Person("anna", Role.ADMIN, "show")
    with pytest.raises(InvalidRequestError, match="write an age"):
        read_choice(Visit(None, anna, {}, {"since": text}), NOON)
