"""Django projects work with the real daemon: the tasks of Django 6, and the outbox tables."""

from __future__ import annotations

import json
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

from streamqd.config import load
from streamqd.errors import DatabaseResponseError
from streamqd.outbox.database import connect
from streamqd.producer import Producer
from tests.support import django_environment
from tests.support.daemon import Daemon
from tests.support.databases import DatabaseServer
from tests.support.django_project import Project
from tests.support.optional import need
from tests.support.servers import ProcessServer, Server

pytestmark = [need("django"), pytest.mark.timeout(300)]

DIRECT = 'TASKS["default"]["OPTIONS"] = {"outbox": False}\n'
ORDER = """
from django.db import transaction
from orders.models import Order
from orders.tasks import *
"""
Make = Callable[..., Project]


@pytest.fixture
def python() -> Path:
    return django_environment.interpreter()


@pytest.fixture
def new_project(tmp_path: Path, server: Server, python: Path) -> Make:
    """Create a Django 6 project with additional settings: `new_project(DIRECT)`."""
    return lambda settings="": Project(tmp_path, python, server.url, settings)


@pytest.fixture
def worker(new_daemon: Callable[..., Daemon], python: Path) -> Daemon:
    """A daemon that runs the tasks of the project. The test starts it."""
    consumer = {"topic": "default", "handler": "streamqd.django.worker:run_task"}
    daemon = new_daemon(consumer=consumer | {"max_attempts": 4, "backoff": {"base": "10ms"}})
    daemon.write_config(topics={"default": {"partitions": 2}})
    daemon.python = str(python)
    daemon.environment["DJANGO_SETTINGS_MODULE"] = "shop.settings"
    return daemon


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgresql", marks=pytest.mark.slow),
        pytest.param("mysql", marks=pytest.mark.slow),
    ]
)
def shop_url(
    request: pytest.FixtureRequest, new_database_server: Callable[[str], DatabaseServer]
) -> str:
    """The URL of an empty database. Each test runs once per dialect."""
    return new_database_server(request.param).new()


def count_rows(url: str) -> int:
    """Return the number of rows that are waiting in the outbox."""
    with connect(url) as database:
        return database.measure_backlog(100)[0]


def rows(project: Project) -> list[tuple[str, bytes, int | None]]:
    with sqlite3.connect(project.folder / "shop.db") as database:
        found = database.execute("SELECT topic, payload, due_unix_ms FROM streamqd_outbox")
        return found.fetchall()


def offer_outbox(worker: Daemon, url: str) -> None:
    """Configure the daemon to move the rows of a database to Redis."""
    worker.write_config(outboxes=[{"name": "shop", "database": url}])


def databases_setting(url: str) -> str:
    """Return the DATABASES setting for the URL of a test's database."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    engine = {"mysql": "mysql", "postgresql": "postgresql"}.get(parts.scheme, "sqlite3")
    name = parts.path.removeprefix("/")
    stated: dict[str, object] = {"ENGINE": f"django.db.backends.{engine}", "NAME": name}
    if engine == "sqlite3":
        stated["NAME"] = f"/{name.lstrip('/')}"
        stated["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 20}
    else:
        host = options.get("host") or options["unix_socket"]
        stated |= {"USER": unquote(parts.username or ""), "HOST": host}
    return f"""
DATABASES = {{"default": {stated!r}}}
if {engine == "mysql"}:
    import pymysql
    pymysql.version_info = (2, 2, 7, "final", 0)  # Django supports mysqlclient
    pymysql.install_as_MySQLdb()
"""


def dead_letter_errors(daemon: Daemon) -> dict[bytes, bytes]:
    """Return the error of each dead letter by its payload."""
    found = {}
    for partition in range(2):
        letters = daemon.link.execute("XRANGE", daemon.keys.dlq("default", partition), "-", "+")
        for _, fields in letters:
            named = dict(zip(fields[::2], fields[1::2], strict=True))
            found[named[b"payload"]] = named[b"errorMessage"]
    return found


# --- the outbox -----------------------------------------------------------------------------------


def test_enqueued_task_is_a_row_of_the_transaction(new_project: Make) -> None:
    project = new_project()

    said = project.run(
        ORDER
        + """
from datetime import datetime, timezone
try:
    with transaction.atomic():
        invoice.enqueue(1)
        raise KeyError("rolled back")
except KeyError:
    pass
with transaction.atomic():
    first = invoice.enqueue(2)
print(first.id, first.status)
print(invoice.using(run_after=datetime(2030, 1, 1, tzinfo=timezone.utc)).enqueue(number=3).id)
import asyncio
asyncio.run(invoice.aenqueue(4))
"""
    )

    committed, alone, asynchronous = rows(project)
    assert committed[0] == "default"
    assert json.loads(committed[1]) == {"task": "orders.tasks.invoice", "args": [2], "kwargs": {}}
    assert committed[2] is None
    assert json.loads(alone[1])["kwargs"] == {"number": 3}
    assert alone[2] == 1_893_456_000_000
    assert json.loads(asynchronous[1])["args"] == [4]
    first, second = said.splitlines()
    assert first.startswith("default/outbox/")
    assert first.endswith(" READY")
    assert len(first.split()[0]) < 64  # the limit that Django promises
    assert second.startswith("default/outbox/")


@pytest.mark.parametrize("django", ["this", "six"])
def test_send_works_on_every_supported_django(tmp_path: Path, server: Server, django: str) -> None:
    """The app, `send` and `fresh_connections` also work with Django 5.2, which has no tasks."""
    python = Path(sys.executable) if django == "this" else django_environment.interpreter()
    project = Project(tmp_path, python, server.url, "del TASKS\n")

    said = project.run(
        """
from django.db import transaction
from streamqd.django import fresh_connections, send
try:
    send("orders", 1)
except Exception as error:
    print(type(error).__name__, error)
with transaction.atomic():
    print(send("orders", {"order": 7}, key="Ann"))
"""
    )

    assert [(topic, payload) for topic, payload, _ in rows(project)] == [("orders", b'{"order":7}')]
    refused, uid = said.splitlines()
    assert refused.startswith("RequestRefusedError ")
    assert "transaction.atomic()" in refused
    assert uid.startswith("orders/outbox/")


def test_migration_creates_the_tables_of_the_relay(
    tmp_path: Path, server: Server, python: Path, database_url: str
) -> None:
    """On each database, the migration creates both tables and can be rolled back.

    A row can be inserted, and a dead-lettered row can be stored.
    """
    project = Project(tmp_path, python, server.url, databases_setting(database_url))
    assert "No changes detected" in project.manage("makemigrations", "--check")
    assert "CREATE TABLE" in project.manage("sqlmigrate", "streamqd", "0001")

    project.run(ORDER + "invoice.enqueue(1); invoice.enqueue(2)")
    with connect(database_url) as database:
        first, second = database.read_oldest(10)
        assert json.loads(first.payload)["args"] == [1]
        database.move_to_dead_table(second, "of the test")
        database.delete([first])
        assert database.count_dead(10) == 1

    project.manage("migrate", "streamqd", "zero")
    with connect(database_url) as database, pytest.raises(DatabaseResponseError):
        database.read_oldest(1)
    project.manage("migrate", "streamqd")
    with connect(database_url) as database:
        assert database.read_oldest(1) == []


def test_unsendable_task_error_is_one_sentence(new_project: Make) -> None:
    project = new_project('TASKS["default"]["QUEUES"] = ["default", "mails"]\n')

    said = project.run(
        ORDER
        + """
from django.tasks import task
import shop.settings

def outside(): ...
outside.__module__ = "shop.settings"
shop.settings.outside = outside
for attempt in (
    lambda: invoice.using(priority=5),
    lambda: invoice.using(queue_name="other"),
    lambda: invoice.enqueue(object()),
    lambda: task(outside).enqueue(),
    lambda: renamed.enqueue(),
    lambda: invoice.get_result("default/outbox/1"),
):
    try:
        print(attempt())
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""
    )

    refused = said.splitlines()
    assert refused[0] == (
        "InvalidTask: invoice has a priority, which streamqd does not support; give urgent tasks"
        " their own queue with queue_name"
    )
    assert refused[1:3] == [
        "InvalidTask: Queue 'other' is not valid for backend.",
        "TypeError: Unsupported type: <class 'object'>",
    ]
    assert refused[3] == (
        "InvalidTask: shop.settings.outside is not in an installed app, and workers run only tasks"
        " of installed apps; add its package to INSTALLED_APPS"
    )
    assert refused[4] == (
        "InvalidTask: orders.tasks.plain is not the path of this task, so workers cannot find it;"
        " write @task above a function of the module"
    )
    assert refused[5] == (
        "NotImplementedError: streamqd does not store results; run `streamqd trace ID` to see the"
        " runs of a task"
    )
    assert rows(project) == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ('TASKS["default"]["OPTIONS"] = {"outbocks": 1}', "outbocks is unknown; set outbox, da"),
        ('TASKS["default"]["OPTIONS"] = {"outbox": 1}', "outbox must be True or False"),
        ('TASKS["default"]["OPTIONS"] = {"database": "x"}', "database 'x' is not in DATABASES"),
        ('TASKS["default"]["QUEUES"] = ["a b"]', "the topic of queue 'a b' is 'a b', which is not"),
        (f'TASKS["default"]["QUEUES"] = ["{"q" * 24}"]', "which has more than 23 characters"),
        ('INSTALLED_APPS.remove("streamqd.django"); import django.tasks.checks', "E001"),
    ],
)
def test_check_reports_wrong_backend_settings(new_project: Make, settings: str, told: str) -> None:
    project = new_project()
    with (project.folder / "shop" / "settings.py").open("a") as file:
        file.write(settings + "\n")

    assert told in project.manage("check", code=1)


def test_wrong_streamqd_setting_error_is_one_sentence(new_project: Make) -> None:
    project = new_project("STREAMQD = {'redis': {'urll': 'x'}}\n")

    assert "redis.urll" in project.run(ORDER + "invoice.enqueue(1)", returns=1).splitlines()[-1]


# --- the daemon with its relay ---


def test_committed_task_runs_once_and_rolled_back_one_never(
    new_project: Make, worker: Daemon, shop_url: str
) -> None:
    """A committed task runs once, and a rolled-back one never.

    A task travels from `manage.py` through the table, the relay and Redis to a worker.
    """
    project = new_project(databases_setting(shop_url))
    offer_outbox(worker, shop_url)
    with worker:
        said = project.run(
            ORDER
            + """
ids = []
for number in range(20):
    try:
        with transaction.atomic():
            order = Order.objects.create(customer=f"c{number}")
            ids.append(invoice.enqueue(order.pk).id)
            if number % 4 == 0:
                raise KeyError
    except KeyError:
        ids.pop()
with transaction.atomic():
    print(attempts.enqueue(2).id)
"""
        )
        committed = sorted(f"invoice c{number}" for number in range(20) if number % 4)
        worker.wait_for(lambda: len(project.runs()) >= len(committed) + 2, what="the tasks run")
        worker.wait_for(lambda: not count_rows(shop_url), what="the relay deletes the rows")
        assert worker.stop() == 0

    uid = said.strip()
    assert sorted(project.runs()) == [f"attempt {n} {uid}" for n in (1, 2)] + committed


def test_task_committed_during_an_outage_is_sent_later(
    new_project: Make, worker: Daemon, fresh_server: ProcessServer, shop_url: str
) -> None:
    """A task that is committed during an outage is sent later.

    The daemon runs throughout the outage and logs no error.
    """
    redis = f"STREAMQD['redis']['url'] = {fresh_server.url!r}\n"
    project = new_project(redis + databases_setting(shop_url))
    worker.write_config(redis={"url": fresh_server.url})
    offer_outbox(worker, shop_url)
    with worker:
        fresh_server.kill()
        project.run(ORDER + 'invoice.enqueue(Order.objects.create(customer="Ann").pk)')
        assert count_rows(shop_url) == 1
        fresh_server.restart()
        worker.wait_for(project.runs, timeout=60, what="the task runs")
        worker.wait_for(lambda: not count_rows(shop_url), what="the relay deletes the row")
        assert worker.stop() == 0

    assert project.runs() == ["invoice Ann"]


def test_process_killed_after_its_commit_loses_no_task(
    new_project: Make, worker: Daemon, shop_url: str
) -> None:
    project = new_project(databases_setting(shop_url))
    offer_outbox(worker, shop_url)
    project.run(
        ORDER
        + """
import os, signal
with transaction.atomic():
    order = Order.objects.create(customer="Ann")
    transaction.on_commit(lambda: os.kill(os.getpid(), signal.SIGKILL))
    invoice.enqueue(order.pk)
""",
        returns=-signal.SIGKILL,
    )
    with worker:
        worker.wait_for(project.runs, what="the task runs")
        assert worker.stop() == 0

    assert project.runs() == ["invoice Ann"]


# --- the worker -----------------------------------------------------------------------------------


def test_direct_task_is_sent_on_commit_and_runs_once(new_project: Make, worker: Daemon) -> None:
    project = new_project(DIRECT)
    with worker:
        said = project.run(
            ORDER
            + """
try:
    with transaction.atomic():
        asynchronous.enqueue("rolled back")
        raise KeyError
except KeyError:
    pass
with transaction.atomic():
    order = Order.objects.create(customer="Ann")
    print(invoice.enqueue(order.pk).id)
print(attempts.enqueue(3).id)
asynchronous.enqueue("a", ("b", 1), last=True)
"""
        )
        worker.wait_for(lambda: len(project.runs()) >= 5, what="the tasks run")
        assert worker.stop() == 0

    _, second = said.split()
    assert sorted(project.runs()) == [
        "async ('a', ['b', 1]) {'last': True} 1",
        f"attempt 1 {second}",
        f"attempt 2 {second}",
        f"attempt 3 {second}",
        "invoice Ann",
    ]
    backend = "StreamqdBackend"
    signals = project.runs("signals")
    assert signals.count(f"{backend} attempts RUNNING") == 3
    assert signals.count(f"{backend} attempts FAILED ValueError") == 2
    assert signals.count(f"{backend} attempts SUCCESSFUL") == 1


def test_failed_tasks_and_hostile_messages_become_dead_letters(
    new_project: Make, worker: Daemon
) -> None:
    new_project(DIRECT)
    hostile = {
        b"\xff": b"the message is not a Django task: ",
        b"[]": b"the message is not a Django task: it needs task, args and kwargs",
        b'{"task": 1, "args": [], "kwargs": {}}': b"the message is not a Django task: it needs",
        b'{"task": "os.system", "args": ["id > owned"], "kwargs": {}}': b"task os.system is not",
        b'{"task": "orders.tasks.gone", "args": [], "kwargs": {}}': b"task orders.tasks.gone is no",
        b'{"task": "orders.tasks.note", "args": [], "kwargs": {}}': b"task orders.tasks.note is no",
        b'{"task": "orders.none.x", "args": [], "kwargs": {}}': b"task orders.none.x is not in",
        b'{"task": "orders.tasks.attempts", "args": [9], "kwargs": {}}': b"again",
        b'{"task": "orders.tasks.invoice", "args": [], "kwargs": {"x": 1}}': b"invoice() got an u",
    }
    with worker, Producer(settings=load(worker.config_path)) as producer:
        for payload in hostile:
            producer.send("default", payload)
        worker.wait_for(
            lambda: dead_letter_errors(worker).keys() == hostile.keys(), what="the dead letters"
        )
        assert worker.stop() == 0

    found = dead_letter_errors(worker)
    assert {payload: found[payload].startswith(text) for payload, text in hostile.items()} == (
        dict.fromkeys(hostile, True)
    ), found
    assert not (worker.folder / "owned").exists()


def test_open_transaction_does_not_leak_into_the_next_task(
    new_project: Make, worker: Daemon
) -> None:
    project = new_project(DIRECT + 'DATABASES["default"]["CONN_MAX_AGE"] = None\n')
    worker.write_config(topics={"default": {"partitions": 1}})
    with worker:
        project.run(
            ORDER
            + 'leaves_a_transaction_open.enqueue("lost"); asynchronous.enqueue("next")\n'
            + 'leaves_a_transaction_open.enqueue("lost")\n'
        )
        worker.wait_for(lambda: len(project.runs()) >= 3, what="the tasks run")
        assert worker.stop() == 0

    assert project.runs() == ["count 0", "async ('next',) {} 0", "count 0"]


def test_worker_without_settings_names_the_variable(new_project: Make, worker: Daemon) -> None:
    new_project(DIRECT)
    del worker.environment["DJANGO_SETTINGS_MODULE"]

    worker.start()

    assert worker.wait() != 0
    assert "DJANGO_SETTINGS_MODULE" in worker.tail()
