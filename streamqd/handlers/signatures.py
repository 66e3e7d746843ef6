"""Read a handler's signature: does it take a message, a batch, or a typed payload?"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streamqd.errors import HandlerLoadError
from streamqd.message import Message

BATCH, TYPED, ASYNC = "batch", "typed", "async"


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a handler.

    `payload` is the type of the payload, or None if the handler takes the whole message.
    """

    batch: bool = False
    asynchronous: bool = False
    payload: Any = None
    with_message: bool = False  # True if the message is the second argument

    @property
    def traits(self) -> list[str]:
        """The form of the handler as words: batch, typed, async.

        The list is empty for a plain function that takes one message.
        """
        marks = {BATCH: self.batch, TYPED: self.payload is not None, ASYNC: self.asynchronous}
        return [word for word, true in marks.items() if true]


def read_signature(function: Callable[..., object], reference: str) -> Signature:
    """Return the form of a handler. Raises HandlerLoadError, whose text is one sentence."""
    if any(map(_yields, _call_targets(function))):
        raise HandlerLoadError(
            f"{reference} contains yield, so calling it does not run it; remove the yield"
        )
    asynchronous = is_async(function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return Signature(asynchronous=asynchronous)  # C functions may have no signature
    taken = [each for each in signature.parameters.values() if each.kind in _POSITIONAL]
    first, second = [*taken, None, None][:2]
    if first is None or first.annotation is inspect.Parameter.empty:
        _bind(signature, 1, reference)
        return Signature(asynchronous=asynchronous)
    annotation = _annotation(function, first, reference)
    if _means_batch(annotation):
        _bind(signature, 1, reference)
        return Signature(batch=True, asynchronous=asynchronous)
    if _means_message(annotation):
        _bind(signature, 1, reference)
        return Signature(asynchronous=asynchronous)
    if _contains_message(annotation):
        raise HandlerLoadError(
            f"{reference}: {first.name} is annotated with {_format_annotation(annotation)},"
            " which is not a payload type; write Message for one message at a time, or"
            " list[Message] for batches"
        )
    wants_message = second is not None and second.default is inspect.Parameter.empty
    _bind(signature, 2 if wants_message else 1, reference)
    if second is not None and wants_message and second.annotation is not inspect.Parameter.empty:
        given = _annotation(function, second, reference)
        if not _means_message(given):
            raise HandlerLoadError(
                f"{reference} takes a payload and {second.name}: the second parameter must be the"
                " message, annotated with Message"
            )
    return Signature(asynchronous=asynchronous, payload=annotation, with_message=wants_message)


_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def is_async(function: object) -> bool:
    """Return True if a call of the function or callable object returns a coroutine."""
    return any(map(inspect.iscoroutinefunction, _call_targets(function)))


def _call_targets(function: object) -> tuple[object, object]:
    """Return the function inside any partials, and its `__call__` in case it is an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function, getattr(function, "__call__", None)  # noqa: B004 - `callable` is not enough


def _yields(function: object) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _bind(signature: inspect.Signature, count: int, reference: str) -> None:
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        raise HandlerLoadError(
            f"{reference} must take exactly one argument, the message, or a payload and the "
            f"message ({error})"
        ) from None


def _means_message(annotation: Any) -> bool:
    """Return True if the annotation accepts a message: Message, a base class, Any or a protocol."""
    if annotation is Any or getattr(annotation, "_is_protocol", False):
        return True
    return isinstance(annotation, type) and issubclass(Message, annotation)


def _means_batch(annotation: Any) -> bool:
    arguments = typing.get_args(annotation)
    return (
        typing.get_origin(annotation) is list and len(arguments) == 1 and _is_message(arguments[0])
    )


def _contains_message(annotation: Any) -> bool:
    """Return True if the type contains Message, as in Message | None or Sequence[Message]."""
    inner = annotation if isinstance(annotation, list) else typing.get_args(annotation)
    return _is_message(annotation) or any(map(_contains_message, inner))


def _is_message(annotation: Any) -> bool:
    # A string inside a type is the name of a class, as in list["Message"].
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        return annotation == Message.__name__
    return isinstance(annotation, type) and issubclass(annotation, Message)


def _format_annotation(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _annotation(
    function: Callable[..., object], parameter: inspect.Parameter, reference: str
) -> Any:
    """Resolve one annotation, which may be a string. The other annotations may be unresolvable.

    Raises HandlerLoadError if this one cannot be resolved.
    """
    written = parameter.annotation
    if not isinstance(written, str):
        return written
    # Many modules import Message only under TYPE_CHECKING, so its name can always be resolved.
    known = {"Message": Message, **getattr(inspect.unwrap(function), "__globals__", {})}
    try:
        return eval(written, known)  # noqa: S307 - it is the user's own code
    except Exception as error:  # noqa: BLE001 - an annotation may be any expression
        raise HandlerLoadError(
            f"{reference}: the annotation {written} of {parameter.name} cannot be resolved"
            f" ({error}); import it at run time, not only under TYPE_CHECKING"
        ) from None
