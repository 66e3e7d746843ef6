"""Searches stop at their budgets and print how many messages they examined.

The tests use no browser, and reduce the budgets.
"""

from __future__ import annotations

import pytest

from tests.support import optional
from tests.support.daemon import TOPIC

pytestmark = [optional.need("starlette"), pytest.mark.slow]

from streamqd import config  # noqa: E402
from streamqd.cli.trace import find_in_archive  # noqa: E402
from streamqd.console.access import Person, Role  # noqa: E402
from streamqd.console.backend import Backend  # noqa: E402
from streamqd.console.pages import Pages  # noqa: E402
from streamqd.console.view import Visit  # noqa: E402
from streamqd.console.views import ACTS, DOWNLOADS, VIEWS, dead, messages  # noqa: E402
from streamqd.producer import Outgoing  # noqa: E402
from streamqd.producer.producer import Producer  # noqa: E402
from streamqd.store import topics  # noqa: E402

MANY, COUNT = "plenty", 5_000
ANNA = Person("anna", Role.ADMIN, "show")


@pytest.fixture(scope="module")
def settings(fleet):
    """The settings of a console for a topic `plenty` that has 5,000 messages."""
    found = config.load(fleet.config_path)
    topics.create(fleet.store, MANY, config.Topic(partitions=2))
    with Producer(settings=found) as producer:
        producer.send_many(MANY, [Outgoing("{}", partition=n % 2) for n in range(COUNT)])
    return found


@pytest.fixture
def resources(settings):
    """Yield the resources through which a view reads Redis."""
    backend = Backend(settings, find_in_archive)
    with backend.open_resources() as opened:
        yield opened
    backend.close()


def render_view(settings, view: str, visit: Visit, context) -> str:
    """Return the page that a view renders for a visit."""
    [found] = [each for each in VIEWS if each.name == view]
    common = {"view": found, "title": found.title, **visit.path, "visit": visit, **context}
    return Pages(settings, VIEWS, ACTS, DOWNLOADS).page(f"{view}.html", ANNA, "/", **common)


@pytest.mark.parametrize(
    ("budget", "seconds", "looked"),
    [
        (700, 60.0, 700),  # only part of the second piece is read
        (1_000_000, 60.0, COUNT),
        (1_000_000, 0.0, messages.PIECE),  # the time is up after the first piece
    ],
    ids=["messages", "end", "seconds"],
)
def test_search_without_a_match_ends_within_its_budget(
    settings, resources, monkeypatch, budget, seconds, looked
):
    monkeypatch.setattr(messages, "BUDGET", budget)
    monkeypatch.setattr(messages, "SECONDS", seconds)
    visit = Visit(resources, ANNA, {"topic": MANY}, {"where": "/a = 1"})

    found = messages.show(visit)

    assert (found["rows"], found["looked"], found["total"]) == ([], looked, COUNT)
    assert bool(found["cursor"]) == (looked < COUNT)
    text = render_view(settings, "messages", visit, found)
    assert "No match in the messages searched." in text
    assert f"Searched {looked:,} of 5,000 messages" in text
    assert ('rel="next"' in text) == (looked < COUNT)


def test_dead_letters_without_a_match_state_the_budget(settings, resources, monkeypatch, fleet):
    monkeypatch.setattr(dead, "BUDGET", 1)
    visit = Visit(resources, ANNA, {"topic": TOPIC}, {"error": "Never"})

    found = dead.show(visit)

    assert (found["page"].rows, found["causes"].examined, found["causes"].total) == ([], 1, 4)
    text = render_view(settings, "dead", visit, found)
    assert "No match among the 1 dead letter searched." in text
    assert "Searched 1 of 4" in text
    assert 'rel="next"' in text
