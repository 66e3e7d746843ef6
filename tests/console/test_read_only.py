"""A console that cannot change anything, because of `--read-only` or the user in viewer.acl."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import optional, users
from tests.support.console import ConsoleProcess
from tests.support.daemon import TOPIC, Daemon, toml

pytestmark = optional.need("starlette")

from streamqd.admin import dead_letters, tail  # noqa: E402
from streamqd.console.access import Role  # noqa: E402
from streamqd.console.views import ACTS, DOWNLOADS, VIEWS  # noqa: E402
from streamqd.errors import RedisResponseError  # noqa: E402
from streamqd.store.client import Connection  # noqa: E402
from tests.console.test_access import OWN, Client  # noqa: E402

# Jobs exist only after a replay, which a viewer cannot start.
PATHS = [each.example or each.path for each in VIEWS if "JOB" not in each.example]
DOCTOR_WITHOUT = {b"config", b"slowlog"}
SEEN_FILES = ("/topics/orders/dead/DEAD_LETTER/payload", "/topics/orders/payload?uid=UID")


@pytest.fixture(scope="module")
def viewer(fleet: Daemon) -> Iterator[str]:
    """The Redis user of etc/acl/viewer.acl, created on the server of the fleet."""
    try:
        users.grant(fleet.link)
    except RedisResponseError as error:
        pytest.skip(f"the users of etc/acl cannot be created: {error}")
    yield users.read("viewer").user
    users.revoke(fleet.link)


def start_console(fleet: Daemon, viewer: str, *arguments: str) -> ConsoleProcess:
    """Return a console that has the fleet's configuration and uses the viewer's Redis user."""
    path = fleet.folder / "viewer.toml"
    redis = fleet.tables["redis"] | {"username": viewer}
    path.write_text(toml(fleet.tables | {"redis": redis}))
    return ConsoleProcess(path, *arguments)


def enter_console(console: ConsoleProcess) -> Client:
    """Return a client for the person who has the link."""
    client = Client(console.port)
    assert client.get(f"/?{console.link.partition('?')[2]}").status == 303
    return client


@pytest.fixture(scope="module")
def client(fleet: Daemon, viewer: str) -> Iterator[Client]:
    """A client of a console that runs with `--read-only`."""
    with start_console(fleet, viewer, "--read-only") as console:
        yield enter_console(console)


@pytest.fixture
def fill_path(fleet: Daemon):
    """Return a path that names a letter and a message of the fleet."""
    letter = dead_letters.messages(fleet.store, TOPIC).page(limit=1).rows[0].id
    message = tail.messages(fleet.store, TOPIC).page(limit=1).rows[0]
    uid = f"{TOPIC}/{message.partition}/{message.id}"
    return lambda path: path.replace("DEAD_LETTER", letter).replace("UID", uid)


def refused_commands(link: Connection, viewer: str) -> set[bytes]:
    """Return the commands that Redis has refused the viewer, without their subcommands."""
    rows = [dict(zip(row[::2], row[1::2], strict=True)) for row in link.execute("ACL", "LOG")]
    own = [row for row in rows if row[b"username"] == viewer.encode()]
    return {row[b"object"].partition(b"|")[0] for row in own}


@pytest.mark.parametrize("path", [*PATHS, *SEEN_FILES])
def test_read_only_every_view_opens_for_the_viewer_acl(fleet, viewer, client, fill_path, path):
    fleet.link.execute("ACL", "LOG", "RESET")

    answer = client.get(fill_path(path))

    assert answer.status == 200, answer.text
    assert "NOPERM" not in answer.text
    # Only the doctor tries a command that it may not run, and it continues without the result.
    without = DOCTOR_WITHOUT if path == "/doctor" else set()
    assert refused_commands(fleet.link, viewer) == without


def test_read_only_filters_and_pages_open_for_the_viewer_acl(fleet, viewer, client, fill_path):
    fleet.link.execute("ACL", "LOG", "RESET")
    since = "since=1h&group=bill"
    for path in (
        f"/topics/orders/dead?{since}",
        "/topics/orders/dead?id=DEAD_LETTER",
        "/topics/orders/dead?limit=1",
        "/topics/orders/messages?where=payload+~+ok",
        "/topics/orders/messages?since=1h",
        "/topics/orders?range=24h",
    ):
        assert client.get(fill_path(path)).status == 200, path
    assert refused_commands(fleet.link, viewer) == set()


def test_read_only_every_post_is_403(fleet, client, fill_path):
    for act in ACTS:
        path = fill_path(act.example or act.path)
        for answer in (client.get(path), client.post(path, {"request-id": "once"}, OWN)):
            assert answer.status == 403, path
            assert "This console is read-only" in answer.text


def test_read_only_download_for_operators_is_403(client, fill_path):
    paths = [each.path for each in DOWNLOADS if each.role > Role.VIEWER]
    assert paths == ["/topics/{topic}/dead-export"]
    assert client.get(fill_path(paths[0].replace("{topic}", TOPIC))).status == 403


def test_viewer_acl_refuses_a_change_without_read_only(fleet, viewer):
    """Without `--read-only`, the console shows buttons, and Redis refuses the act of each."""
    with start_console(fleet, viewer) as console:
        client = enter_console(console)
        fleet.link.execute("ACL", "LOG", "RESET")
        answer = client.post("/groups/orders/bill/pause", {"request-id": "once"}, OWN)
        paused = fleet.link.execute("HGETALL", fleet.keys.directives("default"))

    assert answer.status == 409
    assert "Redis rejected the change" in answer.text
    assert refused_commands(fleet.link, viewer) != set()
    assert paused == []
