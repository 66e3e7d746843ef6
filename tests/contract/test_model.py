"""Random sequences of scripts have the same effects as the model. The seed reproduces a run."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace

import pytest

from streamqd.store import scripts
from tests.contract.harness import Harness
from tests.contract.play import Play

SEEDS = range(12)
STEPS = 600
# The sequences must reach each of these outcomes many times. Otherwise, they prove little.
ANSWERS = {
    *("acquire OK", "acquire MINE", "acquire HELD", "acquire MOVED"),
    *("renew OK", "renew LATE", "renew FENCED"),
    *("refence OK", "refence FENCED", "release OK", "release FENCED"),
    *("recover OK", "recover FENCED", "reclaim OK", "reclaim FENCED"),
    "reclaim SESSION",
    *("ack OK", "ack FENCED", "retry OK", "retry FENCED", "dead OK", "dead FENCED"),
    *("quarantine_mark OK", "quarantine_mark SESSION", "quarantine_mark FENCED"),
    *("replay OK", "replay GONE", "replay MISMATCH"),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_scripts_agree_with_the_model(harness: Harness, seed: int) -> None:
    Play(harness, seed).run(STEPS)


@pytest.mark.slow
def test_model_sequences_reach_every_reply(harness: Harness) -> None:
    met: Counter[str] = Counter()
    for seed in SEEDS:
        play = Play(harness, seed)
        play.run(STEPS)
        met += play.met
    assert {answer for answer, times in met.items() if times >= 5} >= ANSWERS


# In each case, one line of one script is changed, and the model must detect that.
MUTATIONS = {
    "acquire without comparing epochs": (
        "lease_acquire",
        "not mine and epoch ~= tonumber(seen_epoch)",
        "false",
    ),
    "acquire charges what is settled": (
        "lease_acquire",
        "source and is_entry_pending(source, group, id)",
        "source",
    ),
    "a lost round that accuses none of its members": (
        "lease_acquire",
        "string.find(mark, ' ', 1, true)",
        "false",
    ),
    "a first charge that forgets the losses before it": (
        "lease_acquire",
        "charged and 1 or 3",
        "1",
    ),
    "a charge of an entry that never ran alone": (
        "lease_acquire",
        "if charged or string.find",
        "if true or string.find",
    ),
    "settling without the fence": ("settle_ack", "if refusal then", "if false then"),
    "retrying without the fence": ("settle_retry", "if refusal then", "if false then"),
    "marking without the session": ("quarantine_mark", "~= session", "== false"),
    "reclaiming without the session": ("message_reclaim", "~= session", "== false"),
    "a mark that survives the refence": ("lease_refence", "'mark', 'session'", "'session'"),
    "settling what is not pending": (
        "settle_retry",
        "or not (found.pending[id] or is_entry_pending(source, group, id))",
        "or false",
    ),
    "attempts that survive the entry": (
        "settle_retry",
        "forget_attempts(attempts, dues[at])",
        "",
    ),
    "delayed entries named by id alone": (
        "settle_retry",
        "packed[#packed + 1] = entry.place",
        "packed[#packed + 1] = entry.id",
    ),
    "a letter whose source stays": (
        "settle_dead",
        "redis.call('XACK', entry.source, group, entry.id)",
        "",
    ),
    "a release that frees another's unit": (
        "lease_release",
        "= superseded(fence, token)",
        "= superseded(fence, redis.call('HGET', fence, 'token'))",
    ),
    "a floor without the pending entries": (
        "stream_trim",
        "if group['pending'] > 0 then",
        "if false then",
    ),
    "a replay that keeps the letter": (
        "dead_replay",
        "redis.call('XDEL', dlq, dead_letter_id)",
        "",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda text: text.replace(" ", "-"))
def test_model_detects_each_mutation(
    harness: Harness, mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, old, new = MUTATIONS[mutation]
    script = scripts.get(name)
    assert script.source.decode().count(old) == 1
    source = script.source.decode().replace(old, new).encode()
    sha = hashlib.sha1(source).hexdigest()
    changed = {**scripts.load(), name: replace(script, source=source, sha=sha)}
    monkeypatch.setattr(scripts, "load", lambda: changed)

    def hunt() -> None:
        for seed in SEEDS:
            Play(harness, seed).run(STEPS)

    with pytest.raises((AssertionError, KeyError, StopIteration)):
        hunt()
