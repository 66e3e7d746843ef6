"""A typed handler: the payload is decoded to the type of the annotation.

A payload that is not an `Order` is dead-lettered immediately, with the reason `undecodable` and the
path of the field that does not match. Dataclasses need msgspec: install the extra `msgspec`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from streamqd import Context, Message, handler


@dataclass(frozen=True)
class Line:
    """A line of an order: a quantity of one article. `cents` is the price of one piece."""

    article: str
    cents: int
    count: int = 1


@dataclass(frozen=True)
class Order:
    """One order of a customer."""

    customer: str
    lines: list[Line] = field(default_factory=list)


_folder = Path()


def on_start(context: Context) -> None:
    """Create the directory of the invoices."""
    global _folder
    _folder = context.state_dir / "invoices"
    _folder.mkdir(parents=True, exist_ok=True)


@handler(topic="orders", group="invoices", codec="json")
def write_invoice(order: Order, msg: Message) -> None:
    """Write the invoice. The file is named after the message, so a second run overwrites it."""
    total = sum(line.cents * line.count for line in order.lines)
    file = _folder / f"{msg.uid.replace('/', '-')}.txt"
    file.write_text(f"{order.customer}: {total / 100:.2f}\n")
