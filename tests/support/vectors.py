"""The test vectors of docs/reference/wire-format-vectors.json, as bytes."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from streamqd.producer import Outgoing

FILE = Path(__file__).parents[2] / "docs" / "reference" / "wire-format-vectors.json"
VECTORS: dict[str, list[dict[str, Any]]] = {
    name: each for name, each in json.loads(FILE.read_text()).items() if name != "about"
}


def raw(value: Any) -> bytes:
    """Return the byte string that a vector gives as text or as base64."""
    return value.encode() if isinstance(value, str) else base64.b64decode(value["base64"])


def flat(fields: list[list[Any]]) -> list[bytes]:
    """Return names and values alternately, as Redis returns them."""
    return [raw(part) for pair in fields for part in pair]


def outgoing(send: dict[str, Any]) -> Outgoing:
    """Return the message that a producer must send for a vector."""
    value = send["json"] if "json" in send else raw(send["value"])
    expires: Any = send.get("expires_seconds")
    if "expires_unix_seconds" in send:
        expires = datetime.fromtimestamp(send["expires_unix_seconds"], UTC)
    return Outgoing(
        value,
        raw(send["key"]) if "key" in send else None,
        send.get("headers"),
        delay=send.get("delay_seconds"),
        expires=expires,
        dedup_id=send.get("dedup_id"),
    )
