"""The parts of a message that traces and reports need: its place, and its headers as strings."""

from __future__ import annotations

from streamqd.message import Message
from streamqd.store import messages


def message_place(message: Message) -> bytes:
    """Return the place of a message's entry, in the form that `FailedRun` uses."""
    return messages.entry_place(message.id_bytes, retried=message._retried)  # noqa: SLF001 - ours


def string_headers(message: Message) -> dict[str, str]:
    """Return the headers whose values are strings, or {} if the headers are not a JSON object."""
    try:
        headers = message.headers
    except ValueError:  # not an error, as the handler may not need the headers
        return {}
    return {name: text for name, text in headers.items() if isinstance(text, str)}
