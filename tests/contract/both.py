"""Run each call on the server and in the model. Both must give the same answer."""

from __future__ import annotations

from streamqd.model import Lease
from streamqd.store import dead, leases, messages
from streamqd.store.messages import Recovered, SettledReply
from streamqd.store.scripts import Reply
from tests.contract.harness import TTL, Harness
from tests.contract.model import Model
from tests.contract.picture import Fields, pair_fields


class Both:
    """A server and its model. Each method runs a script on both of them and returns its word."""

    def __init__(self, harnesses: dict[str, Harness], model: Model) -> None:
        self.harnesses = harnesses
        self.model = model
        self.link = next(iter(harnesses.values())).link
        self.keys = next(iter(harnesses.values())).keys

    def acquire(self, name: str, token: str, seen: int, gone: str) -> str:
        assignment = self.harnesses[name].assignment
        reply = self.link.run(
            leases.acquire(self.keys, Lease(assignment, token, seen), TTL, "x", gone)
        )
        epoch = int(reply.values[0]) if reply.word == "OK" else 0
        return _agree(reply, self.model.acquire(name, token, seen, gone, epoch))

    def renew(self, name: str, token: str) -> str:
        reply = self.link.run(
            leases.renew(self.keys, Lease(self.harnesses[name].assignment, token), TTL)
        )
        return _agree(reply, self.model.renew(name, token))

    def refence(self, name: str, old: str, new: str, charged: str, done: tuple[str, ...]) -> str:
        assignment, places = self.harnesses[name].assignment, [place.encode() for place in done]
        blamed = charged.encode() or None
        call = leases.refence(
            self.keys, Lease(assignment, old), new, TTL, blamed, b"signal 9", places
        )
        reply = self.link.run(call)
        epoch = int(reply.values[0])
        _agree(reply, self.model.refence(name, old, new, charged, done, epoch))
        if reply.word == "OK" and charged:
            known = self.model.now.groups[name].attempts.get(f"{charged}:c", b"0")
            assert reply.values[1] == int(known)
        return reply.word

    def release(self, name: str, token: str) -> str:
        reply = self.link.run(
            leases.release(self.keys, Lease(self.harnesses[name].assignment, token))
        )
        return _agree(reply, self.model.release(name, token))

    def recover(self, name: str, token: str, session: str) -> str:
        assignment = self.harnesses[name].assignment
        reply = self.link.run(
            messages.recover(self.keys, Lease(assignment, token), session, True, "", "", 256)
        )
        _agree(reply, self.model.recover(name, token, session))
        if reply.word == "OK":
            group, page = self.model.now.groups[name], Recovered.parse(reply)
            listed = {f"m:{e.id.decode()}": e for e in page.main}
            listed |= {f"r:{e.id.decode()}": e for e in page.retry}
            assert set(listed) == {p for p, consumer in group.pending.items() if consumer == "w"}
            for place, entry in listed.items():
                assert entry.fields is not None
                assert pair_fields(entry.fields) == self.model.body(name, place)
                assert entry.crashes == int(group.attempts.get(f"{place}:c", 0))
            assert page.quarantine == group.quarantine
            assert page.accused == {place.encode() for place in group.accused}
            assert page.last_main.decode() == group.last_main
            assert page.last_retry.decode() == group.last_retry
        return reply.word

    def reclaim(self, name: str, token: str, session: str, letter: str) -> str:
        assignment = self.harnesses[name].assignment
        reply = self.link.run(
            messages.reclaim(self.keys, Lease(assignment, token), session, letter, 0.0, 256)
        )
        return _agree(reply, self.model.reclaim(name, token, session, letter))

    def ack(self, name: str, token: str, charged: tuple[str, ...], others: tuple[str, ...]) -> str:
        assignment = self.harnesses[name].assignment
        before = len(self.model.now.groups[name].pending)
        reply = self.link.run(
            messages.ack(
                self.keys, Lease(assignment, token), _bytes(others), charged=_bytes(charged)
            )
        )
        word = _agree(reply, self.model.ack(name, token, charged, others))
        if word == "OK":
            assert reply.values == [before - len(self.model.now.groups[name].pending)]
        return word

    def retry(self, name: str, token: str, items: tuple[tuple[str, bool, Fields], ...]) -> str:
        sent = [(p.encode(), 0.0 if now else 3600.0, _raw(f)) for p, now, f in items]
        # The hints about adjacent entries are often wrong here, and must not change the result.
        call = messages.retry(
            self.keys, Lease(self.harnesses[name].assignment, token), sent, adjacent=len(sent) > 1
        )
        reply = self.link.run(call)
        word, words = self.model.retry(name, token, items)
        if reply.word == "OK":
            assert SettledReply.parse(reply).words == words
        return _agree(reply, word)

    def dead(self, name: str, token: str, items: tuple[tuple[str, Fields], ...]) -> str:
        sent = [(place.encode(), _raw(fields)) for place, fields in items]
        call = messages.dead(
            self.keys, Lease(self.harnesses[name].assignment, token), sent, adjacent=len(sent) > 1
        )
        reply = self.link.run(call)
        settled = SettledReply.parse(reply) if reply.word == "OK" else SettledReply([], None, [])
        letters = [letter.decode() for letter in settled.dead_letters]
        word, words = self.model.dead(name, token, items, letters)
        assert settled.words == words
        return _agree(reply, word)

    def quarantine_mark(
        self, name: str, token: str, session: str, places: str, acked: tuple[str, ...]
    ) -> str:
        assignment = self.harnesses[name].assignment
        reply = self.link.run(
            messages.quarantine_mark(
                self.keys, Lease(assignment, token), session, places.encode(), _bytes(acked)
            )
        )
        return _agree(reply, self.model.quarantine_mark(name, token, session, places, acked))

    def replay(self, name: str, letter: str) -> str:
        call = dead.replay(self.keys, "access", 0, letter, name, {b"crashCount": b"0"})
        reply = self.link.run(call)
        new_id = reply.values[0].decode() if reply.word == "OK" else ""
        return _agree(reply, self.model.replay(name, letter, new_id))


def _agree(reply: Reply, word: str) -> str:
    assert reply.word == word
    return word


def _raw(fields: Fields) -> dict[bytes, bytes]:
    return {name.encode(): value for name, value in fields.items()}


def _bytes(places: tuple[str, ...]) -> list[bytes]:
    return [place.encode() for place in places]
