"""Import user code in a child process, to find its declarations before any worker starts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from streamqd import extras
from streamqd.config import Consumer, find_world_writable
from streamqd.errors import HandlerLoadError
from streamqd.handlers.declaration import declared, scheduled, with_schedules
from streamqd.handlers.loading import import_module, import_paths, load, own_sources
from streamqd.handlers.signatures import ASYNC, BATCH, TYPED
from streamqd.model import REQUEUE, THREADS_MAX
from streamqd.subprocess_task import SubprocessTask


class Probe(NamedTuple):
    """The result of a probe: the declarations in the modules, and all problems.

    `traits` maps the reference of each handler that could be loaded to its `Signature.traits`.
    """

    declared: list[dict[str, Any]]
    problems: list[str]
    traits: dict[str, list[str]] = {}  # noqa: RUF012 - never mutated
    sources: list[str] = []  # noqa: RUF012 - files of the user's modules, for `--reload`
    complete: bool = True  # False if a module that may declare handlers could not be imported


def probe(
    modules: Iterable[str],
    references: Iterable[str],
    base_dir: Path,
    timeout: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> Probe:
    """Import modules and resolve references in a forked child, and wait for the result.

    `timeout` is in seconds. A child that crashes or hangs is reported as a problem. If
    `interrupted` returns True, the probe is canceled.
    """
    names, wanted = list(modules), list(references)
    task = SubprocessTask(
        lambda: examine(names, wanted, base_dir), title="streamqd: probe", timeout=timeout
    )
    while (found := task.poll(0.5)) is None:
        if interrupted():
            task.cancel()
    if found.error:
        error = f"importing the handler modules failed: {found.error}"
        return Probe([], [error], complete=False)
    return Probe(*found.result)


def examine(modules: list[str], references: list[str], base_dir: Path) -> Probe:
    """Import modules and resolve references in this process, which should exit afterwards."""
    problems = []
    whole = True
    traits: dict[str, list[str]] = {}
    known = frozenset(sys.modules)
    declared.clear()
    scheduled.clear()
    import_paths(base_dir)
    for name in modules:
        try:
            import_module(name)
        except HandlerLoadError as error:
            problems.append(str(error))
            whole = False
    for reference in [*(found["handler"] for found in declared), *references]:
        try:
            traits[reference] = load(reference, base_dir).signature.traits
        except HandlerLoadError as error:
            problems.append(str(error))
    found_all, misplaced = with_schedules()
    problems += misplaced
    wanted = {name.partition(":")[0] for name in [*modules, *references]}
    problems += _open_code(wanted)
    sources = own_sources(known, wanted)
    return Probe(found_all, list(dict.fromkeys(problems)), traits, sources, whole)


def _open_code(names: Iterable[str]) -> list[str]:
    """Return a problem for each handler module that any user of the host may write to.

    Such a file is a risk, because handlers run with all permissions of the daemon.
    """
    problems = []
    for name in sorted(names):
        file = getattr(sys.modules.get(name), "__file__", None)
        found = find_world_writable(Path(file)) if file else None
        if found is not None:
            problems.append(f"any user may write {found}, and it is code to run: chmod o-w {found}")
    return problems


def find_mismatches(consumers: Iterable[Consumer], traits: Mapping[str, list[str]]) -> list[str]:
    """Return a problem for each setting that does not fit its handler.

    Handlers without an entry in `traits` are skipped.
    """
    problems = []
    for index, consumer in enumerate(consumers):
        found = traits.get(consumer.handler)
        if found is None:
            continue
        problems += [_locate(index, consumer, *each) for each in _find_mismatches(consumer, found)]
    return problems


def _locate(index: int, consumer: Consumer, name: str, clause: str) -> str:
    """Return a problem with the place of its setting: a line of the file, or `@handler`."""
    if not consumer.place:
        return f"@handler({consumer.name}).{name}: {clause}"
    return f"consumers[{index}].{name}: {clause} ({consumer.place_named})"


def too_many_threads(lanes: int, *, asynchronous: bool) -> str:
    """Return a clause if a handler cannot run `lanes` messages at a time, or '' if it can."""
    if asynchronous or lanes <= THREADS_MAX:
        return ""
    return (
        f"is not a coroutine, and a worker runs {THREADS_MAX} threads at most; set concurrency to"
        f" {THREADS_MAX} or less, or write the handler with async def"
    )


def _find_mismatches(consumer: Consumer, traits: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each setting that does not fit the handler's traits, and the reason."""
    handler, batch = consumer.handler, BATCH in traits
    if consumer.batch is not None and not batch:
        clause = "takes one message; annotate its parameter with list[Message], or remove batch"
        yield "batch", f"{handler} {clause}"
    if batch and consumer.lanes > 1:
        clause = "is a batch handler, and batches run one at a time; remove concurrency, or change"
        yield "concurrency", f"{handler} {clause} the handler to take one message"
    elif clause := too_many_threads(consumer.lanes, asynchronous=ASYNC in traits):
        yield "concurrency", f"{handler} {clause}"
    if batch and consumer.on_error != REQUEUE:
        clause = f'whose messages fail separately; remove "{consumer.on_error}", or write it'
        yield "on_error", f"{handler} takes batches, {clause} for one message"
    packed = TYPED in traits and consumer.codec == "msgpack"
    if packed and importlib.util.find_spec("msgspec") is None:
        yield "codec", f'"msgpack" needs msgspec: {extras.hint("msgspec")}'
