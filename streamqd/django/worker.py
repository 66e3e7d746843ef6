"""The handler for `[[consumers]]` that runs the tasks of `django.tasks` from a topic.

It needs Django 6.0. Importing this module sets up Django, so only workers import it, each after its
fork.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import traceback
from datetime import UTC, datetime
from typing import Any, NamedTuple

import django
from django.tasks import Task, TaskContext, TaskResult, TaskResultStatus
from django.tasks.base import TaskError
from django.tasks.signals import task_finished, task_started
from django.utils import timezone

from streamqd.django.connections import fresh_connections
from streamqd.django.tasks import in_app
from streamqd.handlers import Dead
from streamqd.message import Message

django.setup()

_SEND_ID = b"sendId"  # the field in which the outbox's relay stores the row's uid


class TaskNotFoundError(LookupError):
    """Raised if this worker's code does not contain the task. The message is retried."""


class _Call(NamedTuple):
    """The body of a task's message. `id` is '' if the outbox sent the message."""

    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    id: str


@fresh_connections
def run_task(msg: Message) -> None:
    """Run the task of a message. Its return value is ignored.

    If the task raises an exception, the message is retried or dead-lettered, according to the
    consumer's policy. A task may raise `Retry`, `Dead` and `Release`.

    Raises TaskNotFoundError if the task is unknown, so that a worker with an older release does not
    lose the message. Raises Dead if the message is not a task.
    """
    call = _read_call(msg)
    task = _load_task(call.task)
    result = _mark_running(msg, task, call)
    context: list[TaskContext[..., Any]] = []
    if task.takes_context:
        context.append(TaskContext(task_result=result))
    backend = type(task.get_backend())
    task_started.send(backend, task_result=result)
    try:
        task.call(*context, *call.args, **call.kwargs)
    except BaseException as error:
        task_finished.send(backend, task_result=_mark_failed(result, error))
        raise
    task_finished.send(backend, task_result=_mark_finished(result, TaskResultStatus.SUCCESSFUL))


def _read_call(msg: Message) -> _Call:
    try:
        body = msg.json()
    except ValueError as error:
        raise Dead(f"the message is not a Django task: {error}") from None
    found = body if isinstance(body, dict) else {}
    call = _Call(found.get("task"), found.get("args"), found.get("kwargs"), found.get("id", ""))  # type: ignore[arg-type]
    kinds = (str, list, dict, str)
    if not all(isinstance(value, kind) for value, kind in zip(call, kinds, strict=True)):
        raise Dead("the message is not a Django task: it needs task, args and kwargs")
    return call


def _load_task(path: str) -> Task[..., Any]:
    """Return a task by its path. Only modules of installed apps are imported."""
    module_name, _, name = path.rpartition(".")
    if not in_app(module_name):
        raise TaskNotFoundError(f"task {path} is not in an installed app")
    try:
        task = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the task's module imports a module that is missing
        task = None
    if not isinstance(task, Task):
        raise TaskNotFoundError(f"task {path} is not in this release; deploy the workers first")
    return task


def _mark_running(msg: Message, task: Task[..., Any], call: _Call) -> TaskResult[..., Any]:
    now = timezone.now()
    sent = msg.fields.get(_SEND_ID, b"").decode(errors="replace")
    worker = f"{msg.topic}/{msg.partition}/{os.getpid()}"
    return TaskResult(
        task=task,
        id=call.id or (f"{msg.topic}/outbox/{sent}" if sent else msg.uid),
        status=TaskResultStatus.RUNNING,
        enqueued_at=datetime.fromtimestamp(msg.timestamp, UTC),
        started_at=now,
        last_attempted_at=now,
        finished_at=None,
        args=call.args,
        kwargs=call.kwargs,
        backend=task.backend,
        errors=[],
        worker_ids=[worker] * msg.attempt,  # Django counts these to get the number of attempts
    )


def _mark_finished(result: TaskResult[..., Any], status: TaskResultStatus) -> TaskResult[..., Any]:
    return dataclasses.replace(result, status=status, finished_at=timezone.now())


def _mark_failed(result: TaskResult[..., Any], error: BaseException) -> TaskResult[..., Any]:
    kind = type(error)
    text = "".join(traceback.format_exception(error))
    path = f"{kind.__module__}.{kind.__qualname__}"
    failed = _mark_finished(result, TaskResultStatus.FAILED)
    return dataclasses.replace(
        failed, errors=[TaskError(exception_class_path=path, traceback=text)]
    )
