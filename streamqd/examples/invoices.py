"""A typed handler: the payload arrives as what the annotation says, or not at all.

A payload that is no `Order` is a dead letter at once, with the reason `undecodable` and a text that
says what does not fit and where. Dataclasses are decoded by msgspec, which
the extra `msgspec` brings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from streamqd import Context, Message, handler


@dataclass(frozen=True)
class Line:
    """So many of an article, at so many cents each."""

    article: str
    cents: int
    count: int = 1


@dataclass(frozen=True)
class Order:
    """What a customer has ordered."""

    customer: str
    lines: list[Line] = field(default_factory=list)


_folder = Path()


def on_start(context: Context) -> None:
    """Make the folder that the invoices go to."""
    global _folder
    _folder = context.state_dir / "invoices"
    _folder.mkdir(parents=True, exist_ok=True)


@handler(topic="orders", group="invoices", codec="json")
def write_invoice(order: Order, msg: Message) -> None:
    """Write the invoice. Its name is the message's: a repeated run writes the same file again."""
    total = sum(line.cents * line.count for line in order.lines)
    file = _folder / f"{msg.uid.replace('/', '-')}.txt"
    file.write_text(f"{order.customer}: {total / 100:.2f}\n")
