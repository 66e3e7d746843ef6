"""A counterexample in sentences, from what the model prints when Spin replays it."""

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
    "bury": "{who} buries {message}",
    "host": "host {who} is lost",
    "reload": "{who} reloads",
    "drain": "{who} drains",
    "expire": "the lease expires",
    "foreign": "a foreign client reads 0",
    "claim": "the housekeeper claims 0",
}
_WORDS = {*_WITHOUT, "call", "lost", "late", "die", "promote", "arrives"}


_OF_SCHEDULE = {
    "fire": "{who} asks for tick {last}",
    "sent": "tick {last} is sent",
    "die": "{who} dies",
    "late": "{who}'s call times out, still under way",
    "arrives": "the late call executes",
    "reads": "an edit reads the clock, {last}",
    "declare": "the edit writes, next due at {last}",
    "pause": "it is paused",
    "resume": "it is resumed",
    "clock": "it is {last}",
    "back": "the clock is set back to {last}",
}


def told_of_schedule(replayed: str) -> list[str]:
    """Return the steps of the model of schedules."""
    sentences = []
    for line in replayed.splitlines():
        word, *numbers = line.split() or [""]
        if word in _OF_SCHEDULE and all(number.isdigit() for number in numbers):
            who, last = ("AB"[int(numbers[0]) % 2], numbers[-1]) if numbers else ("", "")
            sentences.append(_OF_SCHEDULE[word].format(who=who, last=last))
    return sentences


def told(replayed: str) -> list[str]:
    """Return the steps, one sentence each; all other lines of the replay are passed over."""
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
        return f"{name} times out, still under way"
    answer = ANSWERS[numbers[3]]
    read = [str(m) for m in range(3) if numbers[5] >> m & 1]
    said = f"{name} {answer}" + (f", {' and '.join(read)}" if read else "")
    return said if word == "call" else f"{said}, reply lost"


TOLD = {"partition": told, "schedule": told_of_schedule}
