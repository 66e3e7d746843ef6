"""A counterexample in sentences, from the output of the model in a replay by Spin."""

from __future__ import annotations

CALLS = (
    *("", "acquire", "renew", "refence", "release", "recover", "fetch"),
    *("ack", "settle", "mark", "reclaim", "charge"),
)
ANSWERS = ("", "OK", "refused", "SESSION")
_WITHOUT = {
    "start": "{who} starts {message}",
    "return": "its handler returns",
    "raise": "its handler raises",
    "bury": "{who} dead-letters {message}",
    "host": "host {who} is lost",
    "reload": "{who} reloads",
    "drain": "{who} drains",
    "expire": "the lease expires",
    "foreign": "another client reads 0",
    "claim": "the housekeeper claims 0",
}
_WORDS = {*_WITHOUT, "call", "lost", "late", "die", "promote", "arrives"}


_OF_SCHEDULE = {
    "fire": "{who} asks for tick {last}",
    "sent": "tick {last} is sent",
    "die": "{who} dies",
    "late": "{who}'s call times out, still in transit",
    "arrives": "the late call executes",
    "reads": "an edit reads the clock, {last}",
    "declare": "the edit writes, next due at {last}",
    "pause": "it is paused",
    "resume": "it is resumed",
    "clock": "it is {last}",
    "back": "the clock is set back to {last}",
}


def schedule_steps(replayed: str) -> list[str]:
    """Return the steps of the model of schedules."""
    sentences = []
    for line in replayed.splitlines():
        word, *numbers = line.split() or [""]
        if word in _OF_SCHEDULE and all(number.isdigit() for number in numbers):
            who, last = ("AB"[int(numbers[0]) % 2], numbers[-1]) if numbers else ("", "")
            sentences.append(_OF_SCHEDULE[word].format(who=who, last=last))
    return sentences


_OF_ROUNDS = {
    "takes": "a new owner takes partition {0}",
    "marks": "the mark of partition {0} names {bits}",
    "starts": "{0} starts",
    "returns": "{0} returns",
    "crashes": "{0} crashes its process",
    "kills": "{0} takes down its host",
    "struck": "the process of partition {0} is killed",
    "loses": "the host is lost",
    "charges": "{0} is charged",
    "buries": "{0} is dead-lettered",
}


def round_steps(replayed: str) -> list[str]:
    """Return the steps of the model of rounds."""
    sentences = []
    for line in replayed.splitlines():
        word, *numbers = line.split() or [""]
        if word in _OF_ROUNDS and all(number.isdigit() for number in numbers):
            bits = _bits(int(numbers[-1])) if numbers else ""
            sentences.append(_OF_ROUNDS[word].format(*numbers, bits=bits))
    return sentences


_OF_OUTBOX = {
    "commit": "row {0} is committed",
    "take": "{who} holds the outbox with epoch {last}",
    "reads": "{who} reads {bits}",
    "fence": "{who} fences partition {last}",
    "publish": "{who} publishes {bits} to partition {1}",
    "lost": "{who} publishes {bits} to partition {1}, reply lost",
    "late": "{who} publishes {bits} to partition {1}, still in transit",
    "deletes": "{who} deletes {bits}",
    "unknown": "{who} deletes {bits}, reply lost",
    "latedelete": "{who} deletes {bits}, still in transit",
    "refused": "{who} is refused",
    "dies": "{who} dies",
    "sent": "row {0} is written",
    "arrives": "the late call executes",
    "arrivesdelete": "the late delete executes",
    "expires": "the lease expires",
    "grows": "the topic grows",
}


def outbox_steps(replayed: str) -> list[str]:
    """Return the steps of the model of an outbox."""
    sentences = []
    for line in replayed.splitlines():
        word, *numbers = line.split() or [""]
        if word in _OF_OUTBOX and all(number.isdigit() for number in numbers):
            who, last = ("AB"[int(numbers[0]) % 2], numbers[-1]) if numbers else ("", "0")
            sentences.append(
                _OF_OUTBOX[word].format(*numbers, who=who, last=last, bits=_bits(int(last)))
            )
    return sentences


def partition_steps(replayed: str) -> list[str]:
    """Return the steps, one sentence each. Other lines of the replay are skipped."""
    sentences = []
    for line in replayed.splitlines():
        word, *numbers = line.split() or [""]
        if word in _WORDS and all(number.isdigit() for number in numbers):
            sentences.append(_sentence(word, [int(number) for number in numbers]))
    return sentences


def _sentence(word: str, numbers: list[int]) -> str:
    if word == "promote":
        return f"{numbers[0]} is promoted"
    if word == "arrives":
        return f"the late {CALLS[numbers[0]]}({numbers[1]}) executes"
    who = "AB"[numbers[0]] if numbers else ""
    if word in _WITHOUT:
        return _WITHOUT[word].format(who=who, message=numbers[-1] if numbers else "")
    if word == "die":
        return f"{who}'s worker dies" + (f" in {numbers[1]}" if numbers[1] != 9 else "")
    name = f"{who}: {CALLS[numbers[1]]}({numbers[2]})"
    if word == "late":
        return f"{name} times out, still in transit"
    answer = ANSWERS[numbers[3]]
    read = _bits(numbers[5])
    text = f"{name} {answer}" + (f", {read}" if read else "")
    return text if word == "call" else f"{text}, reply lost"


def _bits(mask: int) -> str:
    return " and ".join(str(m) for m in range(8) if mask >> m & 1)


STEPS = {
    "partition": partition_steps,
    "rounds": round_steps,
    "schedule": schedule_steps,
    "outbox": outbox_steps,
}
