"""Script calls that write messages, and the connection of a producer that sends them.

When a topic grows, some keys move to another partition. A message must then not be written to the
former partition of its key, because this would break the order of messages with that key. Each
script that writes therefore receives the topic's meta key and the partition count by which the
message was routed, and checks in the same step that the topic still has this count. If it has not,
the script writes nothing and returns MOVED with the current count, and the caller routes the
message again. Because the check is part of the write, a write takes only one round trip, no matter
how many topics a producer writes to.

In all functions, `fields` is a flat list of alternating names and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from streamqd.errors import (
    ContractError,
    InvalidValueError,
    RedisResponseError,
    RedisUnavailableError,
    RefusalKind,
)
from streamqd.store import scripts, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.replies import merge_missing
from streamqd.store.scripts import Call
from streamqd.store.store import Store
from streamqd.store.transport import Transport, pack

FIELDS_MAX = 128  # maximum number of names and values in one message

_GIVEN_UP = RedisUnavailableError("the connection was given up", sent=True)
_MULTI = pack(("MULTI",))
_EXEC = pack(("EXEC",))


@dataclass(slots=True, eq=False)
class Transaction:
    """Calls on one topic that are sent together, and the replies to them.

    `replies` is None if the partition count has changed, in which case nothing was written. If the
    reply was lost, `lost` is the error, and it is unknown whether the messages were written. `lost`
    is also set until the reply has been read, so that an abandoned transaction counts as lost.
    """

    topic: str
    calls: int
    transport: Transport | None = None  # the connection on which the calls were sent
    replies: list[Any] | None = field(default_factory=list)
    lost: RedisUnavailableError | None = _GIVEN_UP

    def answer(self, replies: list[Any] | None, lost: RedisUnavailableError | None = None) -> None:
        self.replies, self.lost = replies, lost


class MessageWriter:
    """Writes messages to topics over one connection, and caches their partition counts.

    On a single server, the calls of a transaction run in one step, so either all are executed or
    none is. Only one transaction at a time can wait for its reply, so the outstanding reply is read
    before the connection is used for another call. The reply is given up if the connection is lost
    or closed, and in a forked child that calls `detach`.

    On a cluster, a script cannot check the count, because the meta key and the partitions are in
    different slots. Instead, the writer reads the count together with each write, so the write that
    discovers a change still used the old count. Topics cannot grow on a cluster, so this happens
    only after a topic was deleted and created again.
    """

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self.connection = connection
        # True if the keys can be on different nodes, as on a cluster.
        self.spread = len(connection.group_by_node(("{a}", "{b}"))) > 1
        self._keys = keys
        self._counts: dict[str, int | None] = {}
        self._sent: Transaction | None = None  # the transaction that awaits its reply

    def meta(self, topic: str) -> str | None:
        """Return the meta key, in which scripts check a topic's count, or None on a cluster."""
        return None if self.spread else self._keys.meta(topic)

    def cached_count(self, topic: str) -> int | None:
        """Return the cached partition count of a topic, or None if it must be read from Redis."""
        return self._counts.get(topic)

    def count(self, topic: str) -> int | None:
        """Return the partition count of a topic, or None if the topic does not exist.

        The count is read from Redis if it is not cached. Raises RedisResponseError,
        RedisUnavailableError, InvalidValueError.
        """
        found = self._counts.get(topic)
        if found is None:
            self.settle()
            store = Store(self.connection, self._keys)
            found = self._counts[topic] = topics.partition_count(store, topic)
        return found

    def pack_calls(self, calls: Sequence[Call], *, by_source: bool = False) -> list[Any]:
        """Return calls in the format that `post` expects.

        For a single server, this returns packed commands. Pass `by_source=True` if the server has
        not loaded the script, so that the commands contain its source. For a cluster, the calls are
        returned unchanged, because `post` packs them itself.
        """
        if self.spread:
            return [*calls]
        return [pack(scripts.command(call, by_source=by_source)) for call in calls]

    def post(self, topic: str, expected: int, commands: Sequence[Any]) -> Transaction:
        """Send calls that write to a topic. `collect` reads the replies later.

        `expected` is the partition count by which the messages were routed. If the cached count
        differs from it, nothing is sent. Raises RedisUnavailableError if sending failed and nothing
        was written.
        """
        if self._sent is not None:
            self.settle()
        transaction = Transaction(topic, len(commands))
        if self._counts.get(topic) != expected:
            transaction.answer(None)
        elif self.spread:
            self._post_each(transaction, commands)
        else:
            self._post(transaction, commands)
        return transaction

    def write(self, topic: str, command: bytes) -> bytes | Transaction | None:
        """Send one packed call that writes one message, and return the ID of the new entry.

        This is faster than `post` and `collect`, but works only on a single server. If the reply
        contains no ID or is lost, the result is a transaction for which `collect` was already
        called. It is None if nothing was sent.
        """
        if self._sent is not None:
            self.settle()
        node, replies = self.connection.node, list[Any]()
        lost: RedisUnavailableError | None = None
        try:
            node.send((command,))
            node.receive(1, replies)
        except RedisUnavailableError as error:
            if not error.sent:
                return None
            lost = error
        else:
            [reply] = replies
            if type(reply) is bytes and reply.startswith(b"OK "):
                return reply[3:]
            match reply:
                case [b"OK", [bytes(entry_id)], b""]:
                    return entry_id
        transaction = Transaction(topic, 1)
        self._record_reply(transaction, replies, lost)
        return transaction

    def _post(self, transaction: Transaction, commands: Sequence[bytes]) -> None:
        node = self.connection.node
        transaction.transport = node.open_transport()
        if len(commands) > 1:
            commands = [_MULTI, *commands, _EXEC]
        try:
            node.send(commands, needed=len(commands), on=transaction.transport)
        except RedisUnavailableError as error:
            if not error.sent:
                raise
            transaction.answer([], error)
            return
        self._sent = transaction

    def _post_each(self, transaction: Transaction, calls: Sequence[Call]) -> None:
        """Send each call to the node that serves its key, and read the replies immediately."""
        topic = transaction.topic
        look = ("HGET", self._keys.meta(topic), "partitionCount")
        try:
            *replies, count = self.connection.pipeline_each([*map(scripts.command, calls), look])
        except RedisUnavailableError as error:
            if not error.sent:
                raise
            transaction.answer([], error)
            return
        if count is None or isinstance(count, bytes):
            self._cache_count(topic, count)
        self._repeat_by_source(calls, replies)
        if any(isinstance(reply, RedisUnavailableError) for reply in replies):
            lost = merge_missing(replies)
            if not lost.sent:
                raise lost
            transaction.answer([], lost)
        else:
            transaction.answer(replies)

    def _repeat_by_source(self, calls: Sequence[Call], replies: list[Any]) -> None:
        """Repeat the calls for which a node replied NOSCRIPT, and replace their `replies`.

        The other calls are not repeated, because they may already have run: a node can load or drop
        the script between two calls. If this user may not run EVAL, the reply remains NOSCRIPT.
        """
        missing = [at for at, reply in enumerate(replies) if is_unknown_script(reply)]
        if not missing:
            return
        commands = [scripts.command(calls[at], by_source=True) for at in missing]
        try:
            again = self.connection.pipeline_each(commands)
        except RedisUnavailableError as error:
            again = [error] * len(missing)
        for at, reply in zip(missing, again, strict=True):
            if not is_eval_forbidden(reply):
                replies[at] = reply

    def collect(self, transaction: Transaction) -> None:
        """Read the outstanding replies to a transaction, if any, and update the cached count."""
        if transaction is not self._sent:
            return
        self._sent, lost = None, None
        calls, node = transaction.calls, self.connection.node
        wanted = calls + 2 if calls > 1 else 1  # a transaction also has replies to MULTI and EXEC
        replies: list[Any] = []
        assert transaction.transport is not None
        transaction.transport.begin(node.seconds_left())
        try:
            node.receive(wanted, replies, on=transaction.transport)
        except RedisUnavailableError as error:
            lost = error
        self._record_reply(transaction, replies, lost)

    def _record_reply(
        self, transaction: Transaction, replies: list[Any], lost: RedisUnavailableError | None
    ) -> None:
        """Store the replies to a transaction, and update the cached count."""
        if lost is not None:
            transaction.answer([], lost)
            return
        found = replies if transaction.calls == 1 else _read_transaction(replies)
        transaction.answer(found)
        for reply in found:
            if isinstance(reply, RedisResponseError):
                self.connection.node.close_if_unusable((*replies, reply))
                break
            if isinstance(reply, list) and reply[0] == b"MOVED":
                self._cache_count(transaction.topic, reply[1] or None)
                transaction.answer(None)
                break

    def settle(self) -> None:
        """Read the outstanding reply, if there is one, so that the connection is free again."""
        if self._sent is not None:
            self.collect(self._sent)

    def abandon(self, transaction: Transaction) -> None:
        """Give up a transaction. If its reply is still outstanding, the connection is closed."""
        if self._sent is transaction:
            self._sent = None
            self.connection.close()

    def detach(self) -> None:
        """Abandon the connection and any outstanding reply, which belong to the parent process.

        Call this in a forked child.
        """
        self.connection.detach()
        self._sent = None

    def _cache_count(self, topic: str, raw: bytes | None) -> None:
        """Cache the partition count of a topic.

        An invalid count is not cached, so the next call of `count` reads it again and raises the
        error.
        """
        try:
            self._counts[topic] = None if raw is None else topics.parse_partition_count(topic, raw)
        except InvalidValueError:
            self._counts[topic] = None


def is_unknown_script(reply: Any) -> bool:
    """Return True if a reply means that the server has not loaded the script."""
    return isinstance(reply, RedisResponseError) and reply.kind is RefusalKind.NO_SCRIPT


def is_eval_forbidden(reply: Any) -> bool:
    """Return True if a reply means that this user has no permission for EVAL itself.

    If the user only has no permission for a command inside the script, the error has a different
    text, and the result is False.
    """
    return isinstance(reply, RedisResponseError) and str(reply).startswith("NOPERM ")


def _read_transaction(replies: list[Any]) -> list[Any]:
    """Return the replies to the calls, given the replies to MULTI, the queued calls and EXEC."""
    *queued, executed = replies
    if isinstance(executed, list):
        return executed
    # Nothing was executed, because the server refused to queue one of the commands. Its reply to
    # that command contains the reason, so use it as the result of every call.
    refused = next((each for each in queued if isinstance(each, RedisResponseError)), executed)
    return [refused] * (len(queued) - 1)


def append(
    keys: Keys,
    topic: str,
    partition: int,
    partitions: int,
    meta: str | None,
    max_backlog: int | None = None,
    *,
    alone: bool,
) -> Call:
    """Build a call that writes messages, to whose arguments the caller then adds the messages.

    If `alone` is True, the messages consist only of payloads, and each payload is one argument.
    Otherwise, use `flatten_messages` to convert the messages to arguments. The call writes nothing
    if the topic does not have `partitions` partitions. `meta` is the topic's meta key, or None on a
    cluster, where the count is not checked. If `max_backlog` is given, messages are written only
    while the partition's backlog is smaller than this.
    """
    named = {"stream": keys.stream(topic, partition)}
    if meta is not None:
        named["meta"] = meta
    messages: dict[str, Any] = {"partitions": partitions, "alone": alone, "messages": []}
    if max_backlog is None:
        return scripts.get("message_append").call(named, **messages)
    return scripts.get("message_publish").call(
        named, window_ms=0, max_backlog=max_backlog, **messages
    )


def flatten_messages(messages: Sequence[Sequence[bytes | str]]) -> list[bytes | str]:
    """Return messages as arguments of a script.

    Each message becomes the length of its field list, followed by the elements of the list.
    """
    found: list[bytes | str] = []
    for fields in messages:
        found.append(str(len(_check_fields(fields))))
        found += fields
    return found


def publish(
    keys: Keys,
    topic: str,
    partition: int,
    fields: Sequence[bytes | str],
    dedup_id: str = "",
    window: float = 0.0,
    max_backlog: int | None = None,
    *,
    partitions: int = 0,
    meta: str | None = None,
) -> Call:
    """Build a call that writes one message. Use `append` to write several messages.

    The message is not written if its deduplication ID was used within the last `window` seconds. If
    `max_backlog` is given, the message is written only if the partition's backlog is smaller. If
    the topic's meta key is passed as `meta`, the topic must have `partitions` partitions.
    """
    if max_backlog is not None and max_backlog < 1:
        raise ContractError(f"message_publish: a limit of {max_backlog}")
    named = {"stream": keys.stream(topic, partition)}
    if meta is not None:
        named["meta"] = meta
    if dedup_id:
        named["dedup"] = keys.dedup(topic, partition, dedup_id)
    return scripts.get("message_publish").call(
        named,
        partitions=partitions,
        window_ms=_window_ms(dedup_id, window),
        max_backlog=-1 if max_backlog is None else max_backlog,
        alone=False,
        messages=flatten_messages([fields]),
    )


def schedule(
    keys: Keys,
    topic: str,
    partition: int,
    delay: float | None,
    send_id: str,
    fields: Sequence[bytes | str],
    dedup_id: str = "",
    window: float = 0.0,
    *,
    at_unix_ms: int | None = None,
    partitions: int = 0,
    meta: str | None = None,
) -> Call:
    """Build a call that stores a delayed send.

    The message is due after `delay` seconds, or at `at_unix_ms`. Exactly one of the two must be
    given. `send_id` must be new, unless the same call is repeated. If the topic's meta key is
    passed as `meta`, the send is stored only if the topic has `partitions` partitions.
    """
    one_time = (delay is None) != (at_unix_ms is None)
    if not send_id or not one_time or min(delay or 0, at_unix_ms or 0) < 0:
        raise ContractError(
            f"message_schedule: send id {send_id!r}, delay {delay} s, at {at_unix_ms} ms"
        )
    named = {
        "scheduled": keys.delayed_sends(topic, partition),
        "items": keys.delayed_send_items(topic, partition),
    }
    if meta is not None:
        named["meta"] = meta
    if dedup_id:
        named["dedup"] = keys.dedup(topic, partition, dedup_id)
    return scripts.get("message_schedule").call(
        named,
        partitions=partitions,
        delay_ms=0 if delay is None else round(delay * 1000),
        at_ms=-1 if at_unix_ms is None else at_unix_ms,
        send_id=send_id,
        window_ms=_window_ms(dedup_id, window),
        # Add the send ID, so that the delivered entry contains it.
        fields=[*_check_fields(fields), "sendId", send_id],
    )


def _check_fields(fields: Sequence[bytes | str]) -> Sequence[bytes | str]:
    if not fields or len(fields) % 2 or len(fields) > FIELDS_MAX:
        raise ContractError(f"a message of {len(fields)} names and values")
    return fields


def _window_ms(dedup_id: str, window: float) -> int:
    window_ms = round(window * 1000)
    if dedup_id and window_ms < 1:
        raise ContractError(f"a dedup window of {window} s")
    return window_ms
