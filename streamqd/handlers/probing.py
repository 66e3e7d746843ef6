"""Importing user code in a child to learn what it declares, before any worker needs it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from streamqd import extras
from streamqd.config import Consumer, open_to_all
from streamqd.errors import HandlerLoadError
from streamqd.handlers.declaration import declared
from streamqd.handlers.loading import import_module, import_paths, load, own_sources
from streamqd.handlers.signatures import BATCH, TYPED
from streamqd.model import REQUEUE
from streamqd.subprocess_task import SubprocessTask


class Probe(NamedTuple):
    """What a probe child found: what the modules declare, and every problem.

    `kinds` names the handlers that could be loaded: reference -> batch, typed, or nothing special.
    """

    declared: list[dict[str, Any]]
    problems: list[str]
    kinds: dict[str, str] = {}  # noqa: RUF012 - it is only read
    sources: list[str] = []  # noqa: RUF012 - files of the user's modules, for `--reload`
    whole: bool = True  # False: a module that may declare handlers could not be imported


def probe(
    modules: Iterable[str],
    references: Iterable[str],
    base_dir: Path,
    timeout: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> Probe:
    """Import modules and resolve references in a forked child, and wait for what it finds.

    A child that dies or hangs is a problem too. When `interrupted` says so it is given up.
    """
    names, wanted = list(modules), list(references)
    task = SubprocessTask(
        lambda: examine(names, wanted, base_dir), title="streamqd: probe", timeout=timeout
    )
    while (found := task.poll(0.5)) is None:
        if interrupted():
            task.cancel()
    if found.trouble:
        trouble = f"importing the handler modules failed: {found.trouble}"
        return Probe([], [trouble], whole=False)
    return Probe(*found.result)


def examine(modules: list[str], references: list[str], base_dir: Path) -> Probe:
    """Import modules and resolve references in this process, which must be one to throw away."""
    problems = []
    whole = True
    kinds: dict[str, str] = {}
    known = frozenset(sys.modules)
    declared.clear()
    import_paths(base_dir)
    for name in modules:
        try:
            import_module(name)
        except HandlerLoadError as error:
            problems.append(str(error))
            whole = False
    for reference in [*(found["handler"] for found in declared), *references]:
        try:
            kinds[reference] = load(reference, base_dir).form.kind
        except HandlerLoadError as error:
            problems.append(str(error))
    wanted = {name.partition(":")[0] for name in [*modules, *references]}
    problems += _open_code(wanted)
    sources = own_sources(known, wanted)
    return Probe(list(declared), list(dict.fromkeys(problems)), kinds, sources, whole)


def _open_code(names: Iterable[str]) -> list[str]:
    """Say which handler modules everybody could change: they run with all that we may do."""
    problems = []
    for name in sorted(names):
        file = getattr(sys.modules.get(name), "__file__", None)
        found = open_to_all(Path(file)) if file else None
        if found is not None:
            problems.append(
                f"everybody may write {found}, and it is code to run: chmod o-w {found}"
            )
    return problems


def misfits(consumers: Iterable[Consumer], kinds: Mapping[str, str]) -> list[str]:
    """Return the settings that do not go with the handlers that they are given to.

    Of a handler that is not in `kinds` nothing is known.
    """
    problems = []
    for index, consumer in enumerate(consumers):
        kind, path = kinds.get(consumer.handler), f"consumers[{index}]"
        if kind is None:
            continue
        if consumer.batch is not None and kind != BATCH:
            problems.append(
                f"{path}.batch: {consumer.handler} takes one message; annotate its parameter with "
                "list[Message], or remove batch"
            )
        if kind == BATCH and consumer.lanes > 1:
            problems.append(
                f"{path}.concurrency: {consumer.handler} takes batches, which are handled one at a "
                "time; remove concurrency, or write it for one message"
            )
        if kind == BATCH and consumer.on_error != REQUEUE:
            problems.append(
                f"{path}.on_error: {consumer.handler} takes batches, whose messages fail each by "
                f'itself; remove "{consumer.on_error}", or write it for one message'
            )
        packed = kind == TYPED and consumer.codec == "msgpack"
        if packed and importlib.util.find_spec("msgspec") is None:
            problems.append(f'{path}.codec: "msgpack" needs msgspec: {extras.hint("msgspec")}')
    return problems
