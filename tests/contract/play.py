"""A play: random scripts, run against a server and against the model.

Two owners and two groups share one partition. Every step compares the whole keyspace with the
model. From the server's picture alone, it also checks that a group has each message in exactly one
place, and that charges are exact. Earlier calls are executed again later with their old arguments,
like late packets of a closed connection.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from streamqd.model import Assignment
from streamqd.store import messages, retention
from tests.contract.both import Both
from tests.contract.harness import Harness
from tests.contract.model import Model
from tests.contract.picture import Fields, Picture, find_payloads, observe, order
from tests.contract.scenarios import trim_all

GROUPS = ("hits", "audit")
OWNERS = ("A", "B")


@dataclass
class Actor:
    """One owner's knowledge about one group, which may be outdated."""

    token: str = ""
    session: str = ""
    seen_epoch: int = 0
    seen_token: str = ""
    hand: dict[str, tuple[Fields, int]] = field(default_factory=dict)  # place -> body, crashes


@dataclass(frozen=True)
class Op:
    """One script with its arguments, to be run now and perhaps once more later."""

    kind: str
    group: str
    args: tuple[Any, ...]


class Play:
    """Draws random calls, and runs each on the server and in the model."""

    def __init__(self, harness: Harness, seed: int) -> None:
        self.draw = random.Random(seed)
        self.harnesses = {
            name: Harness(harness.link, harness.keys, Assignment("access", 0, name))
            for name in GROUPS
        }
        self.link, self.keys = harness.link, harness.keys
        self.link.execute("FLUSHALL")
        self.model = Model(GROUPS)
        self.both = Both(self.harnesses, self.model)
        self.actors = {(owner, name): Actor() for owner in OWNERS for name in GROUPS}
        self.history: list[Op] = []
        self.made = 0
        self.met: Counter[str] = Counter()
        for assignment in self.harnesses.values():
            assignment.groups()

    def run(self, steps: int) -> None:
        """Run a number of steps, and compare server and model after each."""
        for _ in range(steps):
            self.draw.choices(list(ACTIONS), list(ACTIONS.values()))[0](self)
            self.compare()

    def actor(self, *, with_hand: bool = False) -> tuple[str, Actor] | None:
        """Draw a group and an actor for it, usually its owner and sometimes a former one."""
        name = self.draw.choice(GROUPS)
        known = [self.actors[owner, name] for owner in OWNERS]
        able = [a for a in known if a.token and (a.hand or not with_hand)]
        owning = [a for a in able if a.token == self.model.now.groups[name].token]
        if owning and self.draw.random() < 0.8:
            return name, owning[0]
        if able:
            return name, self.draw.choice(able)
        if not owning and not with_hand:
            self.acquire()
        return None

    # --- the lease ---

    def acquire(self) -> None:
        name = self.draw.choice(GROUPS)
        actor, group = self.actors[self.draw.choice(OWNERS), name], self.model.now.groups[name]
        if self.draw.random() < 0.7:
            actor.seen_epoch, actor.seen_token = group.epoch, group.token
        token = self.fresh("t")
        gone = actor.seen_token if self.draw.random() < 0.2 else ""
        word = self.make(Op("acquire", name, (token, actor.seen_epoch, gone)))
        if word == "OK":
            actor.token, actor.session, actor.hand = token, "", {}

    def renew(self) -> None:
        if chosen := self.actor():
            self.make(Op("renew", chosen[0], (chosen[1].token,)))

    def refence(self) -> None:
        if not (chosen := self.actor()):
            return
        name, actor = chosen
        held = sorted(actor.hand)
        charged = self.draw.choice(held) if held and self.draw.random() < 0.7 else ""
        finished = tuple(p for p in held if self.draw.random() < 0.3 and p != charged)
        token = self.fresh("t")
        word = self.make(Op("refence", name, (actor.token, token, charged, finished)))
        actor.token = token if word == "OK" else ""
        actor.session, actor.hand = "", {}

    def release(self) -> None:
        if chosen := self.actor():
            name, actor = chosen
            self.make(Op("release", name, (actor.token,)))
            actor.token, actor.session, actor.hand = "", "", {}

    def lease_expires(self) -> None:
        name = self.draw.choice(GROUPS)
        self.link.execute("DEL", self.harnesses[name].lease)
        self.model.now.groups[name].lease = ""

    # --- reading ---

    def recover(self) -> None:
        if not (chosen := self.actor()):
            return
        name, actor = chosen
        session = self.fresh("s")
        if self.make(Op("recover", name, (actor.token, session))) == "OK":
            group = self.model.now.groups[name]
            own = [place for place, consumer in group.pending.items() if consumer == "w"]
            crashes = {p: int(group.attempts.get(f"{p}:c", 0)) for p in own}
            actor.session = session
            actor.hand = {p: (self.model.body(name, p), crashes[p]) for p in own}

    def fetch(self) -> None:
        """Read both streams if the fence has the token, like the transaction under WATCH."""
        if not (chosen := self.actor()):
            return
        name, actor = chosen
        if self.link.execute("HGET", self.harnesses[name].fence, "token") == actor.token.encode():
            for place in self.read(name, "w", self.draw.randint(1, 4)):
                actor.hand[place] = (self.model.body(name, place), 0)

    def foreign_client_reads(self) -> None:
        name = self.draw.choice(GROUPS)
        places = self.read(name, "foreign", 1)
        for place in places if self.draw.random() < 0.3 else []:
            harness = self.harnesses[name]
            key = harness.stream if place[0] == "m" else harness.retry
            assert self.link.execute("XACK", key, name, place[2:]) == 1
            self.model._ack(name, place)

    def reclaim(self) -> None:
        if not (chosen := self.actor()):
            return
        name, actor = chosen
        if not actor.session:
            self.recover()
        else:
            self.make(Op("reclaim", name, (actor.token, actor.session, self.draw.choice("mr"))))

    # --- settling ---

    def ack(self) -> None:
        if not (chosen := self.actor(with_hand=True)):
            return
        name, actor = chosen
        taken = self.take(actor)
        charged = tuple(place for place, (_, crashes) in taken.items() if crashes)
        others = tuple(place for place, (_, crashes) in taken.items() if not crashes)
        self.make(Op("ack", name, (actor.token, charged, others)))

    def retry(self) -> None:
        if not (chosen := self.actor(with_hand=True)):
            return
        name, actor = chosen
        items = []
        for place, (body, crashes) in self.take(actor).items():
            failed = int(body.get("retryCount", 0)) + 1
            changed = {**self.counted(place, body, crashes), "retryCount": b"%d" % failed}
            items.append((place, self.draw.random() < 0.5, changed))
        self.make(Op("retry", name, (actor.token, tuple(items))))

    def dead(self) -> None:
        if not (chosen := self.actor(with_hand=True)):
            return
        name, actor = chosen
        why = {"group": name.encode(), "reason": b"attempts"}
        items = tuple(
            (place, {**self.counted(place, body, crashes), **why})
            for place, (body, crashes) in self.take(actor).items()
        )
        self.make(Op("dead", name, (actor.token, items)))

    def quarantine_mark(self) -> None:
        if not (chosen := self.actor()) or not chosen[1].session:
            return
        name, actor = chosen
        held = sorted(actor.hand)
        marked: list[str] = []
        accused = [p for p in self.model.now.groups[name].accused if p in held]
        if accused and self.draw.random() < 0.5:
            marked = [self.draw.choice(accused)]
        elif held and self.draw.random() < 0.9:
            count = self.draw.randint(2, 3) if self.draw.random() < 0.3 else 1
            marked = self.draw.sample(held, min(len(held), count))
        others = [p for p in held if p not in marked and not actor.hand[p][1]]
        acked = others[: self.draw.randint(0, 1)]
        for done in acked:
            del actor.hand[done]
        arguments = (actor.token, actor.session, " ".join(marked), tuple(acked))
        self.make(Op("quarantine_mark", name, arguments))

    # --- without an owner ---

    def publish(self) -> None:
        """Write a message, often with the ID of an entry in a retry stream."""
        name = self.draw.choice(GROUPS)
        last = max(self.model.bodies, key=order, default="0-0")
        ids = [i for i in self.model.now.groups[name].retry if order(i) > order(last)]
        ms, seq = order(last)
        entry_id = ids[0] if ids else f"{ms}-{seq + 1}"
        body = {"payload": self.fresh("p").encode() + b"\xff"}
        self.link.execute("XADD", self.harnesses[name].stream, entry_id, *_flat(body))
        self.model.now.stream[entry_id] = self.model.bodies[entry_id] = body

    def promote(self) -> None:
        name, count = self.draw.choice(GROUPS), self.draw.randint(1, 3)
        before = set(observe(self.harnesses).groups[name].retry)
        call = messages.promote_retries(self.keys, self.harnesses[name].assignment, count)
        reply = self.link.run(call)
        after = observe(self.harnesses).groups[name].retry
        written = {i: fields for i, fields in after.items() if i not in before}
        assert reply.values[:2] == [len(written), 0]
        self.model.promote(name, count, written)

    def time_passes(self) -> None:
        name = self.draw.choice(GROUPS)
        for place in self.model.now.groups[name].delayed:
            self.link.execute("ZADD", self.harnesses[name].delayed, "XX", 1, place)
            self.model.due[name].add(place)

    def trim(self) -> None:
        name = self.draw.choice(GROUPS)
        harness = self.harnesses[name]
        assert self.link.run(trim_all(harness, expected=list(GROUPS))).word == "OK"
        self.model.trim()
        assert self.link.run(retention.trim_retry(self.keys, harness.assignment, 1000)).word == "OK"
        self.model.trim_retry(name)

    def replay(self) -> None:
        if letters := sorted(self.model.now.dlq):
            self.make(Op("replay", self.draw.choice(GROUPS), (self.draw.choice(letters),)))

    def a_call_is_executed_again(self) -> None:
        if self.history:
            latest = self.history[-30:] if self.draw.random() < 0.7 else self.history
            self.make(self.draw.choice(latest), again=True)

    # --- calls ---

    def make(self, op: Op, *, again: bool = False) -> str:
        if not again:
            self.history.append(op)
        word = str(getattr(self.both, op.kind)(op.group, *op.args))
        self.met[f"{op.kind} {word}"] += 1
        return word

    # --- helpers ---

    def fresh(self, letter: str) -> str:
        self.made += 1
        return f"{letter}{self.made}"

    def take(self, actor: Actor) -> dict[str, tuple[Fields, int]]:
        """Choose some fetched entries that the owner considers to be done."""
        held = sorted(actor.hand)
        chosen = self.draw.sample(held, self.draw.randint(1, min(3, len(held))))
        return {place: actor.hand.pop(place) for place in chosen}

    def counted(self, place: str, body: Fields, crashes: int) -> Fields:
        total = int(body.get("crashCount", 0)) + crashes
        return {
            "originalId": body.get("originalId", place[2:].encode()),
            "crashCount": b"%d" % total,
        }

    def read(self, name: str, consumer: str, count: int) -> list[str]:
        expected = [p for p in self.model.unread(name) if p[0] == "m"][:count]
        expected += [p for p in self.model.unread(name) if p[0] == "r"][:count]
        harness = self.harnesses[name]
        got = [f"m:{i.decode()}" for i in harness.fetch(count, consumer)]
        got += [f"r:{i.decode()}" for i in harness.fetch(count, consumer, harness.retry)]
        assert got == expected
        self.model.fetch(name, consumer, got)
        return got

    # --- checks after each step ---

    def compare(self) -> None:
        picture = observe(self.harnesses)
        assert picture == self.model.now
        for name in GROUPS:
            places = find_payloads(picture, self.model.bodies, name)
            assert {p for p, found in places.items() if len(found) > 1} == set()
            every = {body["payload"] for body in self.model.bodies.values()}
            assert every - set(places) == self.model.acked[name]
            self._charges_are_exact(picture, name)

    def _charges_are_exact(self, picture: Picture, name: str) -> None:
        group = picture.groups[name]
        bodies: dict[str, Fields] = {f"m:{i}": f for i, f in self.model.bodies.items()}
        bodies |= {f"r:{i}": f for i, f in group.retry.items()}
        there = [(bodies[place], place) for place in group.pending]
        there += [(fields, "") for fields in group.delayed.values()]
        for fields, place in there:
            told = int(fields.get("crashCount", 0)) + int(group.attempts.get(f"{place}:c", 0))
            assert told == self.model.charges.get((name, fields["payload"]), 0)


def _flat(fields: Fields) -> list[Any]:
    return [part for pair in fields.items() for part in pair]


# The operations, and their weights.
ACTIONS: dict[Callable[[Play], None], int] = {
    Play.acquire: 7,
    Play.renew: 4,
    Play.refence: 5,
    Play.release: 1,
    Play.lease_expires: 5,
    Play.recover: 12,
    Play.fetch: 18,
    Play.foreign_client_reads: 2,
    Play.reclaim: 3,
    Play.ack: 8,
    Play.retry: 8,
    Play.dead: 4,
    Play.quarantine_mark: 10,
    Play.publish: 14,
    Play.promote: 6,
    Play.time_passes: 2,
    Play.trim: 3,
    Play.replay: 4,
    Play.a_call_is_executed_again: 26,
}
