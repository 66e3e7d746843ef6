"""Show keys, headers and payloads to a person: unchanged, partly masked, or not at all.

For each role, the settings determine which of these applies. Numbers in JSON are shown exactly as
they were written. All input is untrusted, so it is only ever converted to text.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MASK = "***"
SHOWN_BYTES = 64 << 10  # bytes of a payload that a page shows at most; a download has all of them
CUT_CHARS = 160  # characters of a payload that a row of a list shows at most
_HEADER = "header:"


class _Digits(str):
    """A JSON number exactly as it was written, even if no float can represent it."""

    __slots__ = ()


class _Pairs(list[tuple[str, Any]]):
    """A JSON object whose members keep their order, and may have the same name."""


@dataclass(frozen=True, slots=True)
class ShownBody:
    """A payload as text. `kind` is json, msgpack, text, binary or hidden.

    `cut` is the number of bytes that are left out. `whole` is True if the person may download the
    whole payload.
    """

    kind: str
    text: str
    size: int
    cut: int
    whole: bool


@dataclass(frozen=True, slots=True)
class BodyReader:
    """Returns the parts of messages in the form that one person may see.

    Each item of `masks` is a JSON pointer to a value in payloads, or `header:NAME` for a header.
    """

    bodies: str
    masks: Sequence[str] = ()

    def key(self, key: bytes | None) -> str | None:
        """Return a key as text, or None if the message has no key."""
        if key is None:
            return None
        return MASK if self.bodies != "show" else key.decode("utf-8", "backslashreplace")

    def headers(self, headers: Mapping[str, str] | None) -> dict[str, str]:
        """Return the headers. A masked header keeps its name."""
        if self.bodies == "hidden":
            return {}
        hidden = {
            each.removeprefix(_HEADER).lower() for each in self.masks if each.startswith(_HEADER)
        }
        masked = hidden if self.bodies == "masked" else set()
        return {
            name: MASK if name.lower() in masked else value
            for name, value in (headers or {}).items()
        }

    def text(self, text: str) -> str:
        """Return text that comes from user code, such as an error.

        If the person may not see it, return a mask instead.
        """
        return text if self.bodies == "show" or not text else MASK

    def body(self, payload: bytes) -> ShownBody:
        """Return a payload in the form that the page of its message shows."""
        size = len(payload)
        if self.bodies == "hidden":
            return ShownBody("hidden", "", size, size, whole=False)
        shown = payload[:SHOWN_BYTES]
        kind, text = self._read(payload)
        if not kind:
            kind, text = "binary", "\n".join(_hex(shown[: SHOWN_BYTES // 16]))
            shown = shown[: SHOWN_BYTES // 16]
        masked = self.bodies == "masked"
        if masked and kind not in ("json", "msgpack"):
            return ShownBody("hidden", "", size, size, whole=False)
        cut = len(text) > SHOWN_BYTES
        return ShownBody(
            kind,
            text[:SHOWN_BYTES],
            size,
            max(1, size - SHOWN_BYTES) if cut else size - len(shown) if kind == "binary" else 0,
            whole=not masked,
        )

    def row(self, payload: bytes) -> str:
        """Return the start of a payload on one line, or a mask if the person may not see it."""
        if self.bodies != "show":
            return MASK if payload else ""
        text = payload[: CUT_CHARS * 4].decode("utf-8", "replace")
        return " ".join(text.split())[:CUT_CHARS]

    def _read(self, payload: bytes) -> tuple[str, str]:
        """Return the kind and the text of a payload. Both are '' if the payload is not text."""
        try:
            text = payload.decode()
        except UnicodeDecodeError:
            return self._read_msgpack(payload)
        try:
            value = json.loads(
                text,
                parse_int=_Digits,
                parse_float=_Digits,
                parse_constant=_Digits,
                object_pairs_hook=_Pairs,
            )
            return "json", self._format(value)
        except (ValueError, RecursionError):
            return "text", text

    def _read_msgpack(self, payload: bytes) -> tuple[str, str]:
        if importlib.util.find_spec("msgspec") is None:
            return "", ""
        import msgspec

        try:
            value = msgspec.msgpack.decode(payload)
            return ("msgpack", self._format(value)) if isinstance(value, dict | list) else ("", "")
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError):
            return "", ""

    def _format(self, value: Any) -> str:
        pointers = {mask for mask in self.masks if mask.startswith("/")}
        return _format_json(value, "", pointers if self.bodies == "masked" else set(), "")


def _format_json(value: Any, pointer: str, masks: set[str], indent: str) -> str:
    """Return JSON, indented by two spaces.

    Values to which a pointer in `masks` leads are hidden.
    """
    if pointer in masks:
        return f'"{MASK}"'
    if isinstance(value, _Digits):
        return str(value)
    inner = f"{indent}  "
    if isinstance(value, dict | _Pairs):
        members = list(value.items()) if isinstance(value, dict) else value
        lines = [
            f"{inner}{_text(name)}: "
            + _format_json(member, f"{pointer}/{_escape(name)}", masks, inner)
            for name, member in members
        ]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}" if lines else "{}"
    if isinstance(value, list | tuple):
        lines = [
            inner + _format_json(member, f"{pointer}/{at}", masks, inner)
            for at, member in enumerate(value)
        ]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]" if lines else "[]"
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return f'"{value.hex()}"'
    return json.dumps(value, ensure_ascii=False, default=str)


def _escape(name: object) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")


def _hex(payload: bytes) -> Iterator[str]:
    """Yield one line for every 16 bytes: the offset, hex digits, and the printable characters."""
    for at in range(0, len(payload), 16):
        some = payload[at : at + 16]
        text = "".join(chr(each) if 32 <= each < 127 else "." for each in some)
        yield f"{at:08x}  {some.hex(' '):<47}  {text}"
