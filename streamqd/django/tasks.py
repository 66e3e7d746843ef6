"""The backend for `django.tasks`, in which each task is a message and each queue is a topic.

It needs Django 6.0. `worker` runs the tasks. Results are not stored.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import secrets
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn, ParamSpec, TypeVar

from django.apps import apps
from django.core import checks
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.tasks import Task, TaskResult, TaskResultStatus
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.exceptions import InvalidTask, InvalidTaskBackend
from django.tasks.signals import task_enqueued
from django.utils import timezone

from streamqd.config.setting import NAME, NAME_HINT
from streamqd.django.sending import producer, send

Params = ParamSpec("Params")
Returned = TypeVar("Returned")

APP = "streamqd.django"
TOPIC_CHARS_MAX = 23  # Django requires IDs below 64 characters: TOPIC/outbox/ and 32 digits


class StreamqdBackend(BaseTaskBackend):
    """The backend of one alias in `TASKS`. Django creates one for each thread.

    OPTIONS has three keys. If `outbox` is True (the default), tasks are sent in the transaction of
    the database. Otherwise, they are sent directly to Redis after its commit. `database` (default:
    "default") is the alias of that database. `topics` maps queues to topics that have a different
    name (default: none).

    Raises InvalidTaskBackend for an invalid option.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = False
    supports_priority = False

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        options = {"outbox": True, "database": DEFAULT_DB_ALIAS, "topics": {}, **self.options}
        self._outbox: bool = options.pop("outbox")
        self._database: str = options.pop("database")
        self._topics: Mapping[str, str] = options.pop("topics")
        if options:
            self._refuse(f"{min(options)} is unknown; set outbox, database or topics")
        if not isinstance(self._outbox, bool):
            self._refuse("outbox must be True or False")
        if self._database not in connections:
            self._refuse(f"database {self._database!r} is not in DATABASES")
        if not isinstance(self._topics, Mapping):
            self._refuse("topics must be a dictionary of queues and their topics")
        for queue in {*self.queues, *self._topics}:
            fault = _fault(self._topic(queue))
            if fault:
                self._refuse(f"the topic of queue {queue!r} {fault}")

    def validate_task(self, task: Task[..., Any]) -> None:
        """Raise InvalidTask unless this backend can run the task."""
        if task.priority != 0:
            raise InvalidTask(
                f"{task.name} has a priority, which streamqd does not support; give urgent tasks"
                " their own queue with queue_name"
            )
        super().validate_task(task)
        fault = _fault(self._topic(task.queue_name))
        if fault:
            raise InvalidTask(f"the topic of queue {task.queue_name!r} {fault}")

    def enqueue(
        self, task: Task[Params, Returned], args: Iterable[Any], kwargs: dict[str, Any]
    ) -> TaskResult[Params, Returned]:
        """Send a task in the transaction of the database, and return its result.

        The result is always READY. Outside `transaction.atomic`, the task gets its own transaction.
        If the option `outbox` is True, you can pass the ID of the result to `streamqd trace`.

        Raises InvalidTask, TypeError if JSON does not support the arguments, and the errors of
        `Outbox.send`. If `outbox` is False, errors of Redis are raised at the commit.
        """
        self.validate_task(task)
        _check_found(task)
        result: TaskResult[Params, Returned] = TaskResult(
            task=task,
            id="",
            status=TaskResultStatus.READY,
            enqueued_at=timezone.now(),
            started_at=None,
            last_attempted_at=None,
            finished_at=None,
            args=list(args),
            kwargs=kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        result = dataclasses.replace(result, id=self._send(result))
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> NoReturn:
        """Raise NotImplementedError, as Django requires from a backend that stores no results."""
        raise NotImplementedError(
            "streamqd does not store results; run `streamqd trace ID` to see the runs of a task"
        )

    def check(self, **_: Any) -> list[checks.CheckMessage]:
        """Return an error if the outbox has no table because its app is not installed."""
        if not self._outbox or apps.is_installed(APP):
            return []
        hint = f"Add {APP!r} to INSTALLED_APPS and run migrate, or set OPTIONS outbox to False."
        text = f"TASKS[{self.alias!r}] sends to the outbox, and {APP!r} is not installed."
        return [checks.Error(text, hint=hint, id="streamqd.E001")]

    def _send(self, result: TaskResult[..., Any]) -> str:
        """Send the message of a task, and return its ID."""
        task = result.task
        topic, at = self._topic(task.queue_name), _instant(task.run_after)
        body = {"task": task.module_path, "args": result.args, "kwargs": result.kwargs}
        if self._outbox:
            with transaction.atomic(using=self._database, savepoint=False):
                return send(topic, json.dumps(body), using=self._database, at=at)
        number = secrets.token_hex(16)
        payload = json.dumps({"id": number, **body})
        write = functools.partial(producer().send, topic, payload, at=at, dedup_id=number)
        transaction.on_commit(write, using=self._database)
        return number

    def _topic(self, queue: str) -> str:
        return self._topics.get(queue, queue)

    def _refuse(self, clause: str) -> NoReturn:
        raise InvalidTaskBackend(f"TASKS[{self.alias!r}]: {clause}")


def in_app(module: str) -> bool:
    """Return True if a module belongs to an installed app.

    Workers import only such modules to run a task.
    """
    names = {each.name for each in apps.get_app_configs()}
    return any(module == name or module.startswith(f"{name}.") for name in names)


def _check_found(task: Task[..., Any]) -> None:
    """Raise InvalidTask if a worker would not find the task by its path."""
    module, name = task.func.__module__, task.func.__qualname__
    if not in_app(module):
        raise InvalidTask(
            f"{task.module_path} is not in an installed app, and workers run only tasks of"
            " installed apps; add its package to INSTALLED_APPS"
        )
    found = getattr(sys.modules.get(module), name, None)
    if not isinstance(found, Task) or found.func is not task.func:
        raise InvalidTask(
            f"{task.module_path} is not the path of this task, so workers cannot find it; write"
            " @task above a function of the module"
        )


def _fault(topic: object) -> str:
    """Return a clause about the problem with a topic's name, or '' if it is valid."""
    if not isinstance(topic, str) or not NAME.fullmatch(topic):
        return f"is {topic!r}, which is not a valid topic name ({NAME_HINT})"
    if len(topic) > TOPIC_CHARS_MAX:
        return f"is {topic!r}, which has more than {TOPIC_CHARS_MAX} characters"
    return ""


def _instant(run_after: datetime | None) -> datetime | None:
    """Return a time with a time zone. Without USE_TZ, Django's times are local to TIME_ZONE."""
    if run_after is not None and timezone.is_naive(run_after):
        return timezone.make_aware(run_after, timezone.get_default_timezone())
    return run_after
