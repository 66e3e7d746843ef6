"""The first page: what it reports, and where its lines lead."""

from __future__ import annotations

import re

import pytest

from tests.support import optional

pytestmark = optional.need("starlette")

from tests.console.test_access import logged_in  # noqa: E402


@pytest.fixture
def shop(fleet):
    """An outbox whose relay published 5 rows and has stopped."""
    keys, link = fleet.keys, fleet.link
    link.execute("SADD", keys.outboxes(), "shop")
    link.execute("HSET", keys.outbox("shop"), "epoch", 3, "rows", 5, "oldest_ms", 91_000)
    yield
    link.execute("SREM", keys.outboxes(), "shop")
    link.execute("DEL", keys.outbox("shop"))


def test_an_outbox_without_a_relay_leads_to_its_findings(fleet, users_file, new_console, shop):
    console = new_console(fleet, "--users", str(users_file))

    client = logged_in(console, "vera")
    [(target, text)] = re.findall(r'<a href="([^"]*)">(No relay [^<]*)</a>', client.get("/").text)

    assert "holds the outbox shop: 5 rows wait" in text
    assert target == "/doctor?area=outboxes"
    assert "outboxes.no-relay" in client.get(target).text
