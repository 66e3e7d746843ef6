"""The commands of the README and the tutorials work, and print what the pages show."""

from __future__ import annotations

import gzip
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.pages.reader import FIRST, Fence, Reader, fences
from tests.support import django_environment
from tests.support.servers import free_port

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
README = ROOT / "README.md"
LOG = ROOT / "streamqd" / "examples" / "data" / "apache_access.log.gz"
ARCHIVE = "first-archive"  # tests/spark/test_tutorial.py
FRAMEWORKS = ("django", "fastapi", "flask")
GUIDES = {each: ROOT / "docs" / "how-to" / f"use-with-{each}.md" for each in FRAMEWORKS}
TUTORIALS = {page.stem: page for page in sorted((ROOT / "docs" / "tutorial").glob("*.md"))}
QUESTION = re.compile(r"^\|.*\| `(streamqd [^`]+)` \|$", re.MULTILINE)


def make_reader(
    home: Path,
    patience: float = 30.0,
    replaced: Mapping[str, str] = MappingProxyType({}),
    python: str = sys.executable,
) -> Reader:
    """Return a reader who has installed streamqd and has cloned it to ~/streamqd."""
    foreign = ("STREAMQ", "PYTHON", "COLUMNS", "LINES")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
    port = str(free_port())  # because a daemon of another test may be using the default port
    kept["STREAMQ_HTTP__BIND"] = f"127.0.0.1:{port}"
    console = str(free_port())
    kept["STREAMQ_CONSOLE__BIND"] = f"127.0.0.1:{console}"
    kept["PATH"] = f"{Path(python).parent}:{kept['PATH']}"
    (home / "streamqd").symlink_to(ROOT)
    ports = {"9464": port, "9466": console, "8000": str(free_port())}
    return Reader(home, kept, {**ports, **replaced}, patience)


@pytest.fixture
def reader(state_dir: Path) -> Iterator[Reader]:
    with make_reader(state_dir) as made:
        yield made


@pytest.mark.parametrize("page", sorted(TUTORIALS.keys() - {ARCHIVE}))
def test_tutorial_works_as_shown(reader: Reader, page: str) -> None:
    reader.work_through(TUTORIALS[page])

    assert reader.done > (7 if page == "quickstart" else 10)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", GUIDES)
def test_project_of_a_framework_sends_and_handles(state_dir: Path, framework: str) -> None:
    """The pages for web frameworks work from an empty directory. Django's is for Django 6."""
    python = django_environment.interpreter() if framework == "django" else sys.executable
    with make_reader(state_dir, python=str(python)) as reader:
        reader.work_through(GUIDES[framework])

    assert reader.done > 7


def test_readme_works_as_shown(reader: Reader) -> None:
    reader.env |= {"STREAMQ_DAEMON__INSTANCE": "web-1"}  # the message that it asks about

    reader.work_through(README)

    assert reader.done >= 4  # the handler, its configuration, and the two terminals
    questions = QUESTION.findall(README.read_text())
    assert len(questions) > 5
    for question in questions:
        asked = f"{question} --once" if question.endswith(" top") else question
        reader.obey(Fence("sh", ["second"], {"code": "01"}, asked + "\n", 0))


def test_handler_of_the_readme_works(state_dir: Path, reader: Reader) -> None:
    """The handler of the README gets the lines of a real log from a file."""
    reader.obey(Fence("sh", [FIRST], {}, "streamqd init project && cd project\n", 0))
    for fence in fences(README):
        if fence.file:
            reader.obey(fence)
    reader.obey(Fence("sh", [FIRST], {"until": "partitions=4"}, "streamqd\n", 0))
    line = gzip.decompress(LOG.read_bytes()).splitlines()[0].decode()
    (state_dir / "project" / "access.log").write_text(f"{line}\nhalf\n")

    reader.obey(Fence("sh", ["second"], {}, "streamqd produce access < access.log\n", 0))

    client, _, request = line.partition(" ")
    shown = (
        f"access/… {client!r} requested {request!r}\n"
        'message.dead_lettered … reason=dead error="streamqd.handlers.Dead: no request" at=…\n'
    )
    reader.obey(Fence("text", [FIRST], {}, shown, 0))
