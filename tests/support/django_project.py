"""A Django project in a folder: `manage.py`, an app `orders` with a model and tasks, a database."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

SECONDS = 60.0

SETTINGS = """
from pathlib import Path
BASE_DIR = Path(__file__).parents[1]
SECRET_KEY = "of a test"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["orders", "streamqd.django"]
USE_TZ = True
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": BASE_DIR / "shop.db",
    "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20}}}
TASKS = {"default": {"BACKEND": "streamqd.django.tasks.StreamqdBackend"}}
"""

MANAGE = """
import os, sys
from django.core.management import execute_from_command_line
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
execute_from_command_line(sys.argv)
"""

MODELS = """
from django.db import models
class Order(models.Model):
    customer = models.CharField(max_length=100)
"""

MIGRATION = """
from django.db import migrations, models
class Migration(migrations.Migration):
    initial = True
    operations = [migrations.CreateModel("Order", [
        ("id", models.BigAutoField(verbose_name="ID", primary_key=True, auto_created=True,
            serialize=False)),
        ("customer", models.CharField(max_length=100)),
    ])]
"""

# Each run appends a line to the file `runs`.
TASKS = """
from django.dispatch import receiver
from django.tasks import task
from django.tasks.signals import task_finished, task_started
from orders.models import Order

def note(*words, file="runs"):
    with open(file, "a") as runs:
        runs.write(" ".join(map(str, words)) + "\\n")

@receiver([task_started, task_finished])
def heard(sender, task_result, **_):
    errors = [each.exception_class.__name__ for each in task_result.errors]
    note(sender.__name__, task_result.task.name, task_result.status, *errors, file="signals")

@task
def invoice(number):
    note("invoice", Order.objects.get(pk=number).customer)

@task(takes_context=True)
def attempts(context, least):
    note("attempt", context.attempt, context.task_result.id)
    if context.attempt < least:
        raise ValueError("again")

@task
async def asynchronous(*words, **named):
    note("async", words, named, await Order.objects.acount())

def plain():
    note("plain")

renamed = task(plain)

@task
def leaves_a_transaction_open(customer):
    from django.db import connection
    note("count", Order.objects.count())
    connection.set_autocommit(False)
    Order.objects.create(customer=customer)
"""

# The migrated database of a new project, for each Python, because a migration takes 0.5 s of CPU.
MIGRATED: dict[Path, bytes] = {}


class Project:
    """A Django project. `settings` contains lines of Python that follow those above."""

    def __init__(self, folder: Path, python: Path, redis_url: str, settings: str = "") -> None:
        self.folder = folder
        self._python = python
        stated = f"STREAMQD = {{'redis': {{'url': {redis_url!r}}}}}\n"
        files = {
            "manage.py": MANAGE,
            "shop/__init__.py": "",
            "shop/settings.py": SETTINGS + stated + settings,
            "orders/__init__.py": "",
            "orders/models.py": MODELS,
            "orders/tasks.py": TASKS,
            "orders/migrations/__init__.py": "",
            "orders/migrations/0001_initial.py": MIGRATION,
        }
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if "DATABASES = " in settings:
            self.manage("migrate")
            return
        database = folder / "shop.db"
        if python not in MIGRATED:
            self.manage("migrate")
            MIGRATED[python] = database.read_bytes()
        database.write_bytes(MIGRATED[python])

    def manage(self, *arguments: str, code: int = 0, stdin: str = "") -> str:
        """Run a command with `manage.py`, and return its output."""
        done = subprocess.run(
            [str(self._python), "manage.py", *arguments],
            cwd=self.folder,
            env=self._environment(),
            input=stdin,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def run(self, code: str, returns: int = 0) -> str:
        """Run Python code in the project, and return its output."""
        done = subprocess.run(
            [str(self._python), "-c", f"import django\ndjango.setup()\n{code}"],
            cwd=self.folder,
            env=self._environment() | {"DJANGO_SETTINGS_MODULE": "shop.settings"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == returns, done.stdout
        return done.stdout

    def runs(self, file: str = "runs") -> list[str]:
        """Return the lines that tasks have written to a file, or a signal receiver to `signals`."""
        path = self.folder / file
        return path.read_text().splitlines() if path.exists() else []

    def _environment(self) -> Mapping[str, str]:
        clean = {name: text for name, text in os.environ.items() if not name.startswith("STREAMQ")}
        return {**clean, "PYTHONWARNINGS": "error::DeprecationWarning:streamqd"}
