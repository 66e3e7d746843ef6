"""Find a handler by its name, and make every form of handler callable with a message."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from streamqd.errors import HandlerLoadError
from streamqd.handlers.declaration import Context
from streamqd.handlers.outcomes import error_text
from streamqd.handlers.payloads import Decode, decoder
from streamqd.handlers.redaction import Redact, find_hook
from streamqd.handlers.signatures import Signature, read_signature
from streamqd.message import Message

_PACKAGES = tuple(str(Path(__file__).parents[1] / name) for name in ("handlers", "worker"))


class Loaded(NamedTuple):
    """A handler that is ready to run, and the hooks of its module.

    `function` takes one message, or a list of messages if the handler takes batches. It returns a
    coroutine if the handler is asynchronous.
    """

    function: Callable[..., object]
    on_start: Callable[[Context], object] | None
    on_stop: Callable[[], object] | None
    signature: Signature = Signature()
    redact: Redact | None = None


def import_paths(base_dir: Path) -> None:
    """Add the configuration file's directory and the working directory to the import path."""
    for path in (os.getcwd(), str(base_dir)):  # noqa: PTH109 - `pathlib` costs each worker memory
        if path not in sys.path:
            sys.path.insert(0, path)


def load(reference: str, base_dir: Path, codec: str = "json") -> Loaded:
    """Import `module:function`.

    `codec` is the encoding of typed payloads, either json or msgpack. Raises HandlerLoadError,
    whose text is one sentence that includes the place of the error.
    """
    module_name, _, function_name = reference.partition(":")
    import_paths(base_dir)
    module = import_module(module_name)
    function: Any = module
    for part in function_name.split("."):
        function = getattr(function, part, None)
        if function is None:
            raise HandlerLoadError(f"module {module_name} has no function {function_name}")
    if not callable(function):
        raise HandlerLoadError(f"{reference} is not a function")
    return prepare(function, reference, module, codec)


def prepare(function: Callable[..., object], reference: str, module: Any, codec: str) -> Loaded:
    """Make a handler callable with a message, and find the hooks in its module.

    Raises HandlerLoadError in the same cases as `load`.
    """
    signature = read_signature(function, reference)
    if signature.payload is not None:
        function = _wrap_typed(function, decoder(signature.payload, codec, reference), signature)
    hooks = getattr(module, "on_start", None), getattr(module, "on_stop", None)
    return Loaded(function, *hooks, signature, find_hook(module))


def _wrap_typed(
    function: Callable[..., object], decode: Decode, signature: Signature
) -> Callable[[Message], object]:
    """Wrap a handler that takes a payload. If the handler is asynchronous, so is the wrapper."""
    if signature.with_message:
        return lambda message: function(decode(message.payload), message)
    return lambda message: function(decode(message.payload))


def import_module(name: str) -> Any:
    """Import one of the user's modules. Raises HandlerLoadError, whose text is one sentence."""
    try:
        return importlib.import_module(name)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise HandlerLoadError(
                f"no module named {name} next to the configuration file, in the working directory"
                " or on PYTHONPATH"
            ) from None
        place = error_location(error)
        raise HandlerLoadError(
            f"cannot import {name}: {type(error).__name__}: {error_text(error)}{place}"
        ) from error


def own_sources(known: frozenset[str], wanted: Iterable[str]) -> list[str]:
    """Return the files of the user's modules: all imported since `known`, and all in `wanted`.

    Files of Python and of installed packages are left out, because users do not edit them.
    """
    names = {name for name in sys.modules if name not in known}
    files = {getattr(sys.modules.get(name), "__file__", None) for name in names}
    for name in wanted:
        # The user must fix a module that cannot be imported, so its file is included as well.
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            spec = importlib.util.find_spec(name)
            files.add(spec.origin if spec is not None else None)
    libraries = {sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")}
    return sorted(file for file in files if file and not file.startswith(("<", *libraries)))


def error_location(error: BaseException) -> str:
    """Return ` (FILE:LINE)` for the innermost line of the user's own code, or '' if there is none.

    For a SyntaxError, return '', because its text already contains the file and the line.
    """
    if isinstance(error, SyntaxError):
        return ""
    libraries = ("<", sysconfig.get_path("stdlib"), *_PACKAGES)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(libraries):
            return f" ({frame.filename}:{frame.lineno})"
    return ""
