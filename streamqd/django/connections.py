"""Refreshes database connections between the runs of a handler, as Django does between requests."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from asgiref.sync import sync_to_async
from django.db import close_old_connections, reset_queries

Function = TypeVar("Function", bound=Callable[..., Any])


def fresh_connections(function: Function) -> Function:
    """Run a handler as Django runs a view, so that it never gets a stale database connection.

    Before and after each run, a connection is closed if it is unusable, older than CONN_MAX_AGE, or
    still in an open transaction. Put this decorator below `@handler`. It also works for coroutine
    functions.
    """

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        _refresh()
        try:
            return function(*args, **options)
        finally:
            close_old_connections()

    @functools.wraps(function)
    async def run_async(*args: Any, **options: Any) -> Any:
        # The connections of asynchronous code belong to the single thread of `sync_to_async`.
        await sync_to_async(_refresh)()
        try:
            return await function(*args, **options)
        finally:
            await sync_to_async(close_old_connections)()

    return cast(Function, run_async if inspect.iscoroutinefunction(function) else run)


def _refresh() -> None:
    reset_queries()  # if DEBUG is set, Django collects the statements of each connection
    close_old_connections()
