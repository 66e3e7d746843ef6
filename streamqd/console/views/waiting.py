"""A group's retries and a topic's delayed sends, by due time, and acts that send or cancel them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamqd.admin import delayed, due, retries
from streamqd.admin.messages import MessageFilter, MessageList
from streamqd.console.access import Role
from streamqd.console.view import (
    Act,
    ActResult,
    AuditNote,
    ConsoleView,
    Context,
    FormField,
    Preview,
    Visit,
    path_topic,
)
from streamqd.errors import InvalidRequestError
from streamqd.model import DLQ_SUFFIX
from streamqd.words import plural

BUDGET = 10_000
CHOSEN_MAX = 10_000  # messages that one act changes at most


def show_retries(visit: Visit) -> Context:
    """Return a page of a group's waiting retries, and their number by due time."""
    topic, group = visit.path["topic"], visit.path["group"]
    return _page_context(visit, retries.messages(visit.resources.store, topic, group), group)


def show_delayed(visit: Visit) -> Context:
    """Return a page of a topic's delayed sends, and their number by due time."""
    return _page_context(visit, delayed.messages(visit.resources.store, visit.path["topic"]), "")


def _page_context(visit: Visit, found: MessageList[Any, Any], group: str) -> Context:
    page = found.page(limit=visit.limit, cursor=visit.text("cursor"), budget=BUDGET)
    return {
        "group": group,
        "page": page,
        "due": due.histogram(
            visit.resources.store, found.topic, group, found.partitions, page.now_unix_ms
        ),
    }


def _id_field(visit: Visit) -> Sequence[FormField]:
    hint = f"IDs separated by spaces. Default: all waiting messages, up to {CHOSEN_MAX:,}."
    return (visit.field("id", "Messages", hint),)


def _choice(visit: Visit) -> MessageFilter:
    ids = tuple(visit.text("id").split())
    if len(ids) > CHOSEN_MAX:
        raise InvalidRequestError(
            f"too many messages selected ({len(ids):,}); select at most {CHOSEN_MAX:,}"
        )
    return MessageFilter(ids=ids)


def _retries(visit: Visit) -> list[retries.RetryRow]:
    topic, group = visit.path["topic"], visit.path["group"]
    choice = _choice(visit)
    if choice.ids:
        return retries.select_rows(visit.resources.store, topic, group, choice)
    found = retries.messages(visit.resources.store, topic, group)
    return found.rows(list(found.iterate(choice, CHOSEN_MAX)))


def _sends(visit: Visit) -> list[str]:
    choice = _choice(visit)
    if choice.ids:
        return list(choice.ids)
    found = delayed.messages(visit.resources.store, visit.path["topic"])
    return [each.position.name for each in found.iterate(choice, CHOSEN_MAX)]


def _preview(number: int, noun: str, text: str) -> Preview:
    repeat = "More messages may be waiting. Run the action again to include them."
    more = [repeat] if number == CHOSEN_MAX else []
    refusal = "" if number else f"No {noun} is waiting."
    return Preview([f"{plural(number, noun)} would {text}.", *more], refusal=refusal)


def _note(visit: Visit, command: str, counts: Mapping[str, int]) -> AuditNote:
    """Return the audit entry for a change of waiting messages."""
    ids = visit.text("id").split()
    what, group = ("retries", visit.path["group"]) if "group" in visit.path else ("sends", None)
    asked = {"group": group, what: ids or "--all"} if group else {what: ids or "--all"}
    return AuditNote([visit.path["topic"]], command, asked, counts)


def retry_now(visit: Visit) -> ActResult:
    """Make retries due immediately."""
    topic, group = visit.path["topic"], visit.path["group"]
    done = retries.make_due(visit.resources.store, topic, group, _retries(visit))
    return ActResult(
        f"{plural(done.due, 'retry')} due now.",
        _note(visit, "retry now", {"due": done.due, "missing": done.missing}),
    )


def preview_retry_cancel(visit: Visit) -> Preview:
    """Return how many retries would become dead letters."""
    effect = "be dead-lettered (reason: canceled)"
    if visit.path["group"].endswith(DLQ_SUFFIX):
        effect = "be dropped. Their dead letters are kept"
    return _preview(len(_retries(visit)), "retry", effect)


def retry_cancel(visit: Visit) -> ActResult:
    """Cancel retries."""
    topic, group = visit.path["topic"], visit.path["group"]
    done = retries.cancel(visit.resources.store, topic, group, _retries(visit))
    counts = {"dead_letters": done.dead_letters, "dropped": done.dropped, "missing": done.missing}
    text = f"{plural(done.dead_letters + done.dropped, 'retry')} canceled"
    if done.missing:
        text += f"; {done.missing:,} had already run"
    if done.unreadable:
        text += f"; {done.unreadable:,} kept, because they are unreadable"
    return ActResult(f"{text}.", _note(visit, "retry cancel", counts))


def send_now(visit: Visit) -> ActResult:
    """Make delayed sends due immediately."""
    topic = visit.path["topic"]
    done = delayed.make_due(visit.resources.store, topic, _sends(visit))
    return ActResult(
        f"{plural(done.changed, 'message')} sent now.",
        _note(visit, "delayed now", {"due": done.changed, "sent": len(done.sent)}),
    )


def send_cancel(visit: Visit) -> ActResult:
    """Cancel delayed sends permanently."""
    topic = visit.path["topic"]
    done = delayed.cancel(visit.resources.store, topic, _sends(visit))
    text = f"{plural(done.changed, 'delayed send')} canceled."
    counts = {"canceled": done.changed, "sent": len(done.sent)}
    return ActResult(text, _note(visit, "delayed cancel", counts))


VIEWS = (
    ConsoleView("retries", "/topics/{topic}/retries/{group}", "Retries", show_retries),
    ConsoleView("delayed", "/topics/{topic}/delayed", "Delayed sends", show_delayed),
)
ACTS = (
    Act(
        "retry_now",
        "/topics/{topic}/retries/{group}/now",
        "Run retries now",
        "Run now",
        Role.OPERATOR,
        lambda visit: _preview(len(_retries(visit)), "retry", "run now"),
        retry_now,
        _id_field,
        back="retries",
    ),
    Act(
        "retry_cancel",
        "/topics/{topic}/retries/{group}/cancel",
        "Cancel retries",
        "Move to dead letters",
        Role.OPERATOR,
        preview_retry_cancel,
        retry_cancel,
        _id_field,
        back="retries",
    ),
    Act(
        "send_now",
        "/topics/{topic}/delayed/now",
        "Make delayed sends due now",
        "Send now",
        Role.OPERATOR,
        lambda visit: _preview(len(_sends(visit)), "delayed send", "be sent now"),
        send_now,
        _id_field,
        back="delayed",
    ),
    Act(
        "send_cancel",
        "/topics/{topic}/delayed/cancel",
        "Cancel delayed sends",
        "Cancel permanently",
        Role.ADMIN,
        lambda visit: _preview(len(_sends(visit)), "delayed send", "never be sent"),
        send_cancel,
        _id_field,
        path_topic,
        back="delayed",
    ),
)
