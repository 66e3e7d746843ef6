"""Decode payloads to the type of a handler's first parameter.

For `bytes`, a payload is passed on unchanged, and for `str`, it is decoded from UTF-8. Pydantic
decodes and validates its own models. msgspec decodes all other types: dataclasses, TypedDicts,
Structs, lists and unions.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from streamqd import extras
from streamqd.errors import HandlerLoadError
from streamqd.handlers.verdicts import Undecodable

Decode = Callable[[bytes], Any]

FAULTS_NAMED_MAX = 5


def decoder(annotation: Any, codec: str, reference: str) -> Decode:
    """Return a function that decodes a payload to the annotated type.

    `codec` is json or msgpack. The returned function raises Undecodable if a payload does not match
    the type. Raises HandlerLoadError if a library is missing, or if no library can decode the type.
    """
    if annotation is bytes:
        return bytes
    if annotation is str:
        return _text
    if _is_model(annotation):
        return _model_decoder(annotation, codec, reference)
    return _msgspec_decoder(annotation, codec, reference)


def _text(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise Undecodable(f"the payload is not UTF-8 text: {error.reason}") from None


def _is_model(annotation: Any) -> bool:
    # If a handler has a model as its annotation, its module has already imported pydantic. Looking
    # it up here avoids the cost of the import for all other handlers.
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not isinstance(annotation, type):
        return False
    return issubclass(annotation, pydantic.BaseModel) or (
        dataclasses.is_dataclass(annotation) and hasattr(annotation, "__pydantic_validator__")
    )


def _model_decoder(annotation: Any, codec: str, reference: str) -> Decode:
    pydantic = sys.modules["pydantic"]
    adapter = pydantic.TypeAdapter(annotation)
    unpack = _msgspec(reference, 'codec = "msgpack"').msgpack.decode if codec == "msgpack" else None
    name = annotation.__qualname__

    def decode(payload: bytes) -> Any:
        try:
            if unpack is None:
                return adapter.validate_json(payload)
            return adapter.validate_python(unpack(payload))
        except pydantic.ValidationError as error:
            raise Undecodable(f"payload is not a valid {name}: {_faults(error)}") from None
        except Exception as error:  # noqa: BLE001 - validators are user code
            raise _undecodable(name, error) from None

    return decode


def _faults(error: Any) -> str:
    """Return the first problems with their places, but without values, which may be private."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    named = [
        f"{'.'.join(str(part) for part in each['loc']) or 'payload'}: {each['msg']}"
        for each in found[:FAULTS_NAMED_MAX]
    ]
    left = len(found) - len(named)
    return "; ".join(named) + (f"; and {left} more" if left else "")


def _msgspec_decoder(annotation: Any, codec: str, reference: str) -> Decode:
    name = getattr(annotation, "__qualname__", None) or str(annotation)
    msgspec = _msgspec(reference, f"a payload of type {name}")
    try:
        form = msgspec.msgpack if codec == "msgpack" else msgspec.json
        parse = form.Decoder(annotation).decode
        unsupported = _unsupported_type(msgspec, msgspec.inspect.type_info(annotation), set())
        if unsupported is not None:
            raise TypeError(f"{unsupported.__qualname__} is not a data type")
    except (TypeError, NameError) as error:
        raise HandlerLoadError(
            f"{reference} declares a payload of type {name}, which cannot be decoded ({error});"
            " annotate the first parameter with Message, or with a type made of data: a"
            " dataclass, a TypedDict, a Struct, lists and unions of them, or one pydantic model"
        ) from None

    def decode(payload: bytes) -> Any:
        try:
            return parse(payload)
        except Exception as error:  # noqa: BLE001 - a __post_init__ is user code
            raise _undecodable(name, error) from None

    return decode


def _unsupported_type(msgspec: Any, info: Any, seen: set[int]) -> type | None:
    """Return a class within a type that msgspec accepts but can never decode, or None.

    `info` is msgspec's description of the type.
    """
    if isinstance(info, tuple):
        found = (_unsupported_type(msgspec, each, seen) for each in info)
        return next((each for each in found if each is not None), None)
    if isinstance(info, msgspec.inspect.Field):
        # If the field is optional, a payload without it can still be decoded.
        return _unsupported_type(msgspec, info.type, seen) if info.required else None
    if not isinstance(info, msgspec.inspect.Type) or id(info) in seen:
        return None
    seen.add(id(info))  # types may be recursive
    if isinstance(info, msgspec.inspect.CustomType):
        return None if _is_base_of_data(info.cls) else info.cls
    inner = tuple(getattr(info, each) for each in info.__struct_fields__)
    return _unsupported_type(msgspec, inner, seen)


def _is_base_of_data(custom: type) -> bool:
    """Return True if some decoded data always matches the class, as for object or Hashable."""
    try:
        return any(issubclass(each, custom) for each in (dict, list, str, int, float))
    except TypeError:
        return False  # a protocol without @runtime_checkable


def _undecodable(name: str, error: Exception) -> Undecodable:
    return Undecodable(f"payload is not a valid {name}: {error}")


def _msgspec(reference: str, what: str) -> Any:
    try:
        msgspec: ModuleType = importlib.import_module("msgspec")
        importlib.import_module("msgspec.inspect")
        importlib.import_module("msgspec.json")
        importlib.import_module("msgspec.msgpack")
    except ImportError:
        raise HandlerLoadError(
            f"{reference} needs msgspec for {what}: {extras.hint('msgspec')}"
        ) from None
    return msgspec
