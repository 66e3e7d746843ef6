"""The user's code in a worker: the handler and the hooks of its module."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from streamqd import handlers, logs, telemetry
from streamqd.config import Consumer, Settings
from streamqd.errors import HandlerLoadError
from streamqd.model import Assignment
from streamqd.scoreboard import WorkerSlot
from streamqd.telemetry import RunTelemetry
from streamqd.worker.eventloop import EventLoop


def boot(settings: Settings, consumer: Consumer, assignment: Assignment) -> Hooks:
    """Import the handler, run `on_start`, and set up logging. Raises HandlerLoadError."""
    output = logs.output_of_handlers()
    if output is not None:
        output.stand_by()
    try:
        observer = telemetry.run_telemetry(settings, consumer, assignment)
    except telemetry.TelemetryUnavailableError as error:
        raise HandlerLoadError(str(error)) from error
    loaded = handlers.load(consumer.handler, settings.base_dir, consumer.codec)
    hooks = Hooks(consumer, loaded, assignment, settings.daemon.event_loop, observer)
    logs.mark_records(consumer.handler, assignment, observer.ids if observer is not None else None)
    if output is not None:
        output.follow(settings.log.level)
    daemon = settings.daemon
    try:
        hooks.start(handlers.Context(assignment, daemon.instance, daemon.state_dir))
    finally:
        # Call this again, because the import or `on_start` may have configured logging, which can
        # disable this logger.
        logs.output_of_handlers()
    if output is not None:
        output.take_over()
    return hooks


class Hooks:
    """The loaded handler and its hooks, with an event loop if any of them is async."""

    def __init__(
        self,
        consumer: Consumer,
        loaded: handlers.Loaded,
        assignment: Assignment,
        event_loop: str = "asyncio",
        observer: RunTelemetry | None = None,
    ) -> None:
        """Start the event loop if the handler or a hook is async.

        `observer` traces the runs. Raises HandlerLoadError if the event loop cannot be created.
        """
        self._reference = consumer.handler
        self._assignment = assignment
        self.observer = observer
        self.loaded = loaded if observer is None else observer.wrap_handler(loaded)
        started, stopped = self.loaded.on_start, self.loaded.on_stop
        asynchronous = self.loaded.signature.asynchronous
        asynchronous = asynchronous or handlers.is_async(started) or handlers.is_async(stopped)
        self.loop = EventLoop(event_loop) if asynchronous else None

    @property
    def function(self) -> Callable[..., object]:
        """The handler as a function that blocks until its run has finished."""
        function, loop = self.loaded.function, self.loop
        if loop is None or not self.loaded.signature.asynchronous:
            return function
        return lambda taken: loop.wait(lambda: function(taken))

    @property
    def interrupt(self) -> Callable[[BaseException], None] | None:
        """The function that interrupts a run of an async handler, or None.

        If it is None, the handler runs in the main thread, where the signal handler can interrupt
        the run by raising an exception itself.
        """
        if self.loop is None or not self.loaded.signature.asynchronous:
            return None
        return self.loop.interrupt_wait

    def show_loop(self, slot: WorkerSlot | None) -> None:
        """If there is an event loop, publish its heartbeat in `slot`, or stop if `slot` is None."""
        if self.loop is not None:
            self.loop.publish_heartbeat(slot)

    def start(self, context: handlers.Context) -> None:
        """Run `on_start`. Raises HandlerLoadError if it fails."""
        error = self._run(self.loaded.on_start, context)
        if error is None:
            return
        raise HandlerLoadError(
            f"on_start of {self._reference} failed: {self._error_text(error)}"
            f"{handlers.error_location(error)}"
        ) from error

    def stop(self) -> None:
        """Run `on_stop`, and then stop the event loop. An error of the hook is only logged."""
        error = self._run(self.loaded.on_stop)
        if error is not None and self.loaded.redact is None:
            logs.event("worker.hook_failed", logging.ERROR, assignment=self._assignment, exc=error)
        elif error is not None:
            # Do not log the traceback, because it also contains the texts of chained errors, which
            # `redact_error` has not filtered.
            described = self._error_text(error)
            logs.event(
                "worker.hook_failed", logging.ERROR, assignment=self._assignment, error=described
            )
        if self.loop is not None:
            self.loop.close()
        if self.observer is not None:
            self.observer.stop()

    def _error_text(self, error: BaseException) -> str:
        text = handlers.redact_text(handlers.error_text(error), self.loaded.redact)
        return f"{type(error).__name__}: {text}"

    def _run(self, hook: Callable[..., object] | None, *given: Any) -> BaseException | None:
        if hook is None:
            return None
        try:
            if self.loop is not None and handlers.is_async(hook):
                end = self.loop.wait(lambda: hook(*given))
                return end if isinstance(end, BaseException) else None
            hook(*given)
        except BaseException as error:  # noqa: BLE001 - user code
            return error
        return None
