"""Fixtures of the console: a fleet of two groups, consoles, and pages of a real browser.

The event loop of playwright runs in the tests' thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import optional, servers
from tests.support.console import CHROMIUM, CHROMIUM_OPTIONS, ConsoleProcess, Seen
from tests.support.daemon import TOPIC, Daemon, daemons

PASSWORD = "correct horse"
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"

Browse = Callable[..., Any]


def pytest_runtest_setup() -> None:
    """Skip the tests of this folder by name if the packages that they need are not installed."""
    for package in ("uvicorn", "starlette", "jinja2", "playwright"):
        optional.skip_without(package)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium, with its driver.

    A thread waits for the driver. This thread must exit with this module, because a process with
    threads cannot fork the workers of other tests.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_OPTIONS)
        yield opened
        opened.close()


@contextlib.contextmanager
def running_fleet(
    request: pytest.FixtureRequest, folder: Path, **consumer: object
) -> Iterator[Daemon]:
    """Run a daemon on a private server: topic orders, groups bill and ship, two partitions."""
    word = request.config.getoption("--server")
    if "://" in word or word == "testcontainers":
        pytest.skip("needs a server process of its own")
    server = servers.require(servers.start, word)
    try:
        with daemons(folder, server.url) as make:
            daemon = make(partitions=2, groups=("bill", "ship"), consumer=consumer)
            tick = {"name": "tick", "topic": TOPIC, "cron": "0 3 1 1 *"}
            daemon.write_config(schedules=[tick])
            with daemon:
                daemon.send(["ok"] * 20 + ["dead"] * 2)
                daemon.wait_settled()
                yield daemon
    finally:
        server.close()


@pytest.fixture(scope="module")
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    """A running daemon for this module: topic orders, groups bill and ship, and two partitions.

    Its server is private. Tests that stop or empty a server start their own.
    """
    with running_fleet(request, tmp_path_factory.mktemp("fleet")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def users_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A users file with a viewer (vera), an operator (otto) and an admin (anna)."""
    from streamqd.console.access import new_user, parse_role, write_user

    path = tmp_path_factory.mktemp("users") / "users.txt"
    for name, role in (("vera", "viewer"), ("otto", "operator"), ("anna", "admin")):
        write_user(path, new_user(name, parse_role(role), PASSWORD))
    return path


@pytest.fixture(scope="module")
def console(fleet: Daemon, users_file: Path) -> Iterator[ConsoleProcess]:
    """A console for this module, to which the people of `users_file` can log in."""
    with ConsoleProcess(fleet.config_path, "--users", str(users_file)) as started:
        yield started


@pytest.fixture
def new_console() -> Iterator[Callable[..., ConsoleProcess]]:
    """Start consoles with the configuration of a daemon: `new_console(daemon, "--read-only")`."""
    with contextlib.ExitStack() as made:
        yield lambda daemon, *arguments: made.enter_context(
            ConsoleProcess(daemon.config_path, *arguments)
        )


def log_in(context: Any, console: ConsoleProcess, name: str) -> None:
    """Log in a person of `users_file` in a browser context."""
    answer = context.request.post(
        f"{console.url}login",
        form={"name": name, "password": PASSWORD},
        headers={"Sec-Fetch-Site": "same-origin"},
        max_redirects=0,
    )
    assert answer.status == 303, answer.text()


def open_page(
    opened: contextlib.ExitStack,
    browser: Any,
    console: ConsoleProcess,
    name: str,
    *,
    javascript: bool = True,
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
) -> Any:
    """Return a page in its own context with the person logged in. `opened` closes the context."""
    context = browser.new_context(
        java_script_enabled=javascript,
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
    )
    opened.callback(context.close)
    if name:
        log_in(context, console, name)
    page = context.new_page()
    page.set_default_timeout(15_000)
    return page


@pytest.fixture
def browse(browser: Any) -> Iterator[Browse]:
    """Open pages: `browse(console, "anna", javascript=False, width=360, dark=True)`.

    The person is logged in. Pass '' for an anonymous visitor. `page.seen` records what happens on
    the page.
    """
    with contextlib.ExitStack() as opened:

        def make(console: ConsoleProcess, name: str = "anna", **kind: Any) -> Any:
            page = open_page(opened, browser, console, name, **kind)
            page.seen = Seen(page)
            return page

        yield make


@pytest.fixture(scope="module")
def pages(browser: Any) -> Iterator[Browse]:
    """Return a page of this module for each console, person and kind. '' means anonymous."""
    known: dict[tuple[object, ...], Any] = {}
    with contextlib.ExitStack() as opened:

        def make(console: ConsoleProcess, name: str = "anna", **kind: Any) -> Any:
            key = console.url, name, *sorted(kind.items())
            if key not in known:
                known[key] = open_page(opened, browser, console, name, **kind)
            return known[key]

        yield make


@pytest.fixture
def tab(pages: Browse) -> Iterator[Browse]:
    """Return a page as `browse` does. Earlier tests of the module may have used the same page.

    Opening another page costs four times as much CPU as opening a view in an existing page.
    `page.seen` contains only events of this test. Pass only consoles that run until the module
    ends, because their ports are reused.
    """
    with contextlib.ExitStack() as visits:

        def make(console: ConsoleProcess, name: str = "anna", **kind: Any) -> Any:
            page = pages(console, name, **kind)
            page.seen = visits.enter_context(contextlib.closing(Seen(page)))
            return page

        yield make
