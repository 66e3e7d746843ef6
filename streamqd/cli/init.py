"""`streamqd init`: create the first files of a project."""

from __future__ import annotations

import getpass
import shlex
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import click

from streamqd.cli.arguments import json_option
from streamqd.cli.output import emit
from streamqd.cli.session import Session, pass_session
from streamqd.errors import RequestRefusedError

CONFIG = """\
# To check this file, run `streamqd check`. To see all settings, run `streamqd config schema`.

[redis]
# With "embedded:", the daemon starts its own Redis or Valkey server, with its data in state_dir.
# To use another server, set its address, such as "rediss://host:6379/0".
url = "embedded:"

[daemon]
state_dir = "./var"
handlers = ["weblog"]          # Python modules in the directory of this file

[topics.access]
partitions = 4                 # each has one worker process per group; can grow, but not shrink
retention = { max_age = "24h" } # trim older messages that all groups have handled

[[consumers]]                  # these settings override the arguments of @handler
topic = "access"
group = "hits"
max_attempts = 5
backoff = { kind = "exponential", base = "1s", max = "5m", jitter = "full" }
timeout = "10s"                # raise an exception in the handler if a run takes longer
hard_timeout = "20s"           # kill the worker process if a run takes longer
"""

EXAMPLE_CONFIG = """\

[topics.reports]
partitions = 1

[[schedules]]                  # `streamqd schedule next minutely` prints its next ticks
name = "minutely"              # sent as the x-schedule header
topic = "reports"
every = "1m"
payload = { kind = "short" }
"""

EXAMPLE = '''\
"""Handler for scheduled messages."""

from __future__ import annotations

from streamqd import Message, handler, schedule


@schedule(cron="0 3 * * *", timezone="Europe/Berlin", payload={"kind": "full"})
@handler(topic="reports", group="build")
def nightly(msg: Message) -> None:
    """Build one report for each tick (due time) of the schedules `nightly` and `minutely`.

    `minutely` is in streamq.toml. The two headers together are different for each tick. A message
    that is delivered again after a crash has the same headers, so use them as an idempotency key.
    """
    name, tick = msg.headers["x-schedule"], msg.headers["x-scheduled-for"]
    print(f"report of {name} for {tick}: {msg.json()!r}")
'''

HANDLER = '''\
"""Handlers of this project. Each partition has its own worker process."""

from __future__ import annotations

from streamqd import Dead, Message, handler


@handler(topic="access", group="hits")
def count_hit(msg: Message) -> None:
    """Handle one line of an access log.

    If the function returns, the message is acknowledged. If it raises an exception, the message is
    retried. If it raises `Dead`, the message becomes a dead letter without a retry.

    After a crash, a message can be delivered again, with the same `msg.uid`.
    """
    line = msg.text()
    if not line.strip():
        raise Dead("an empty line")
    # !r escapes line breaks, so a message cannot print lines that look like log lines.
    print(f"{msg.topic}/{msg.partition} attempt {msg.attempt}: {line!r}")
'''

OUTBOX_CONFIG = """\
# To check this file, run `streamqd check`. To see all settings, run `streamqd config schema`.

[redis]
# With "embedded:", the daemon starts its own Redis or Valkey server, with its data in state_dir.
# To use another server, set its address, such as "rediss://host:6379/0".
url = "embedded:"

[daemon]
state_dir = "./var"
handlers = ["billing"]         # Python modules in the directory of this file

[topics.orders]
partitions = 2

[[outboxes]]                   # the daemon moves committed messages of this database to Redis
name = "shop"
database = "sqlite:///shop.db" # or "postgresql://…", "mysql://…", "${DATABASE_URL}"
"""

SHOP = '''\
"""A shop that commits each order together with its message, or neither of them.

Usage: python shop.py PRICE...
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from streamqd import Outbox

DATABASE = Path(__file__).with_name("shop.db")

outbox = Outbox()


def place_order(connection: sqlite3.Connection, price: float) -> int:
    """Insert an order and its message in one transaction, and return the order number."""
    with connection:  # commits, or rolls back after an exception
        number = connection.execute("INSERT INTO orders (price) VALUES (?)", (price,)).lastrowid
        outbox.send(connection, "orders", {"number": number, "price": price}, key=str(number))
        if price < 0:
            raise ValueError("a price must not be negative")
    return number or 0


if __name__ == "__main__":
    with closing(sqlite3.connect(DATABASE)) as database:
        database.execute(
            "CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY, price REAL NOT NULL)"
        )
        for text in sys.argv[1:]:
            try:
                print("placed order", place_order(database, float(text)))
            except ValueError as error:
                print(f"not placed: {error}")
'''

BILLING = '''\
"""Handler for the orders that shop.py places."""

from __future__ import annotations

from streamqd import Message, handler


@handler(topic="orders", group="billing")
def bill(msg: Message) -> None:
    """Bill one order. After a crash, an order can be delivered again, with the same number."""
    order = msg.json()
    print(f"billed order {order['number']}: {order['price']:.2f}")
'''

# `init` replaces only the part of systemd/streamqd.service between these two rules.
RULE, END = "# ---- adapt from here ", "# ---- to here "

HEAD = """\
# A systemd service that runs the daemon of this project. Copy this file to /etc/systemd/system/,
# then run:
#   systemctl daemon-reload && systemctl enable --now streamqd

"""

ADAPTED = """\
ExecStart={command} --config {config}
# The user that runs streamqd, and the only directory it can write to.
User={user}
WorkingDirectory={directory}
BindPaths={writable}
ProtectHome=read-only
# If Redis has a password, write it to /etc/credstore/streamqd-redis-password, which only root can
# read. The password does not appear in the environment or on the command line.
{credential}
"""


@dataclass(frozen=True, slots=True)
class InitResult:
    """The files that `init` has written."""

    directory: str
    files: list[str]


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--example",
    is_flag=False,
    flag_value="schedules",
    type=click.Choice(["schedules", "outbox"]),
    help="Add an example, by default schedules. schedules: two schedules and a handler. outbox: a"
    " shop that commits an order and its message in one SQLite transaction.",
)
@json_option
@pass_session
def init(session: Session, directory: Path, example: str | None, as_json: bool) -> None:
    """Create a project in DIR.

    The command writes a configuration, a handler and a systemd unit. It never overwrites existing
    files.
    """
    files = _files(example) | {"streamqd.service": _unit(directory.absolute())}
    existing = [name for name in files if (directory / name).exists()]
    if existing:
        raise RequestRefusedError(
            f"{directory} already contains {', '.join(existing)}, so nothing was written; choose"
            " another directory"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (directory / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise RequestRefusedError(f"{error.filename} cannot be written: {error.strerror}") from None
    if as_json:
        emit(InitResult(str(directory), list(files)))
        return
    for name in files:
        click.echo(f"wrote {directory / name}")
    target = shlex.quote(str(directory / "streamq.toml"))
    if example == "outbox":
        session.note(f"first:  streamqd --config {target} outbox create")
    session.note(f"run it: streamqd --config {target}")
    if example == "outbox":
        session.note(f"send:   cd {shlex.quote(str(directory))}; python shop.py 9.50")
    else:
        session.note(f"send:   streamqd --config {target} produce access hello")


def _files(example: str | None) -> dict[str, str]:
    """Return the configuration and the code of a project, as a dict from file name to text."""
    if example == "outbox":
        return {"streamq.toml": OUTBOX_CONFIG, "shop.py": SHOP, "billing.py": BILLING}
    files = {"streamq.toml": CONFIG, "weblog.py": HANDLER}
    if example == "schedules":
        more = CONFIG.replace('["weblog"]', '["weblog", "reports"]') + EXAMPLE_CONFIG
        files |= {"streamq.toml": more, "reports.py": EXAMPLE}
    return files


def shipped_unit() -> str:
    """Return the text of systemd/streamqd.service, which is part of the package."""
    return (resources.files("streamqd.cli") / "units" / "streamqd.service").read_text("utf-8")


def _unit(directory: Path) -> str:
    """Return the shipped unit, adapted to a project and to the account that runs `init`."""
    installed = Path(sys.executable).with_name("streamqd")
    command = (
        _quote(installed) if installed.exists() else f"{_quote(Path(sys.executable))} -m streamqd"
    )
    _, head, text = shipped_unit().partition("[Unit]\n")
    before, rule, text = text.partition(RULE)
    shipped_rule, end, after = text.partition(END)
    [credential] = (
        line for line in shipped_rule.splitlines() if line.startswith("LoadCredential=")
    )
    adapted = ADAPTED.format(
        command=command,
        # In an argument, unlike in a path, systemd expands variables after a dollar sign.
        config=_quote(directory / "streamq.toml").replace("$", "$$"),
        user=_user(),
        directory=str(directory).replace("%", "%%"),
        writable=_quote(directory),
        credential=credential,
    )
    rest_of_rule = shipped_rule.partition("\n")[0]
    return "".join((HEAD, head, before, rule, rest_of_rule, "\n", adapted, end, after))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user has no name, as in some containers
        return "streamqd"


def _quote(path: Path) -> str:
    """Return a path in the syntax of a unit file.

    Each % is doubled, and a path that contains spaces, quotes, backslashes or colons is quoted.
    """
    text = str(path).replace("%", "%%")
    if any(each in text for each in " \t\"'\\:"):
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return text
