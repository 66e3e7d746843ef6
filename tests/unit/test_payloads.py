"""A handler's annotations define its parameters, and payloads become typed values."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict

import msgspec
import pydantic
import pytest

from streamqd import extras
from streamqd.config import Consumer
from streamqd.errors import HandlerLoadError
from streamqd.handlers import (
    Dead,
    Failures,
    Release,
    Result,
    Retry,
    Signature,
    Undecodable,
    find_mismatches,
    run_error,
    to_outcome,
)
from streamqd.handlers.payloads import decoder
from streamqd.handlers.signatures import read_signature
from streamqd.message import Delivery, Message
from streamqd.model import Assignment, DeadAsked, ReleaseAsked
from streamqd.worker.batches import batch_errors

DELIVERY = Delivery(Assignment("access", 3, "hits"), "west-1", 7)


def message(number: int = 1) -> Message:
    return Message(DELIVERY, b"%d-0" % number, [b"payload", b"x"], retried=False)


# --- signatures -----------------------------------------------------------------------------------


@dataclass
class Order:
    id: int
    lines: list[str]


class Model(pydantic.BaseModel):
    id: int


class Struct(msgspec.Struct):
    id: int


class Dict(TypedDict):
    id: int


class Duck(Protocol):
    @property
    def uid(self) -> str: ...


class Plain:
    def __init__(self, number: int) -> None: ...


@dataclass
class Holder:
    of: Plain


@dataclass
class Tree:
    value: object
    branches: list[Tree]
    cache: Plain = field(default_factory=lambda: Plain(1))


class Callee:
    async def __call__(self, msg: Message) -> None: ...


def plain(msg: Message) -> None: ...
def bare(msg): ...  # type: ignore[no-untyped-def]
def anything(msg: Any) -> None: ...
def duck(msg: Duck) -> None: ...
def rest(*args: Any) -> None: ...
def batch(batch: list[Message]) -> None: ...
async def async_batch(batch: list[Message]) -> None: ...
async def coroutine(msg: Message) -> None: ...
def typed(order: Order) -> None: ...
async def typed_both(order: Order, msg: Message) -> None: ...
def typed_bare(order: Order, msg) -> None: ...  # type: ignore[no-untyped-def]
def optional(order: Order, limit: int = 3) -> None: ...


def generator(msg: Message) -> Iterator[int]:
    yield 1


async def async_generator(msg: Message) -> AsyncIterator[int]:
    yield 1


class Generator:
    def __call__(self, _msg: Message) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (plain, Signature()),
        (bare, Signature()),
        (anything, Signature()),
        (duck, Signature()),
        (rest, Signature()),
        (print, Signature()),
        (batch, Signature(batch=True)),
        (async_batch, Signature(batch=True, asynchronous=True)),
        (coroutine, Signature(asynchronous=True)),
        (Callee(), Signature(asynchronous=True)),
        (functools.partial(Callee()), Signature(asynchronous=True)),
        (typed, Signature(payload=Order)),
        (typed_both, Signature(asynchronous=True, payload=Order, with_message=True)),
        (typed_bare, Signature(payload=Order, with_message=True)),
        (optional, Signature(payload=Order)),
    ],
)
def test_form_of_parses_the_handler_signature(function: Callable[..., object], form: Signature):
    assert read_signature(function, "h:go") == form


def test_form_of_accepts_a_quoted_message_annotation():
    def quoted(batch): ...  # type: ignore[no-untyped-def]

    quoted.__annotations__["batch"] = list["Message"]
    assert read_signature(quoted, "h:go") == Signature(batch=True)


def test_second_handler_parameter_must_be_the_message():
    def wrong(order: Order, other: Order) -> None: ...

    with pytest.raises(HandlerLoadError, match="second parameter must be the message"):
        read_signature(wrong, "h:go")


@pytest.mark.parametrize(
    "annotation",
    [
        Message | None,
        Sequence[Message],
        tuple[Message, ...],
        dict[str, list[Message]],
        list[Message] | None,
        Callable[[Message], None],
        tuple["Message", int],
    ],
)
def test_message_inside_another_annotation_is_refused(annotation: Any):
    def wrong(given): ...  # type: ignore[no-untyped-def]

    wrong.__annotations__["given"] = annotation
    with pytest.raises(HandlerLoadError, match=r"^h:go: given is .* write Message for one .*list"):
        read_signature(wrong, "h:go")


@pytest.mark.parametrize(
    "function",
    [
        generator,
        async_generator,
        Generator(),
        Generator().__call__,
        functools.partial(generator),
        functools.partial(functools.partial(Generator())),
    ],
)
def test_generator_handler_is_refused(function: Callable[..., object]):
    with pytest.raises(HandlerLoadError, match=r"h:go contains yield.*; remove the yield"):
        read_signature(function, "h:go")


def test_misfits_names_settings_unfit_for_a_handler():
    base = {"topic": "t", "group": "g", "handler": "h:go"}
    several = Consumer(**base, batch=5, concurrency=4)
    (problem,) = find_mismatches([several], {"h:go": ["batch"]})
    assert problem.startswith(
        "@handler(t/g).concurrency: h:go is a batch handler, and batches run one"
    )
    assert find_mismatches([replace(several, order="partition")], {"h:go": ["batch"]}) == []
    for on_error in ("block", "hold-key"):
        (problem,) = find_mismatches([Consumer(**base, on_error=on_error)], {"h:go": ["batch"]})
        assert problem.startswith("@handler(t/g).on_error: h:go takes batches, whose messages fail")
    assert find_mismatches([Consumer(**base, on_error="hold-key")], {"h:go": []}) == []
    assert len(find_mismatches([Consumer(**base, batch=5)], {"h:go": []})) == 1
    assert find_mismatches([Consumer(**base, batch=5)], {}) == [], "it could not be loaded"
    assert find_mismatches([Consumer(**base, codec="msgpack")], {"h:go": ["typed"]}) == []


def test_more_than_128_threads_are_refused():
    """More than 128 threads are refused, although 4,096 coroutines are allowed."""
    many = Consumer(topic="t", group="g", handler="h:go", concurrency=129)
    (problem,) = find_mismatches([many], {"h:go": []})
    assert problem == (
        "@handler(t/g).concurrency: h:go is not a coroutine, and a worker runs 128 threads at most;"
        " set concurrency to 128 or less, or write the handler with async def"
    )
    assert find_mismatches([replace(many, concurrency=128)], {"h:go": ["typed"]}) == []
    assert find_mismatches([replace(many, concurrency=4_096)], {"h:go": ["async"]}) == []
    assert find_mismatches([replace(many, order="partition")], {"h:go": []}) == []


# --- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Order, Order(1, ["a"])),
        (Struct, Struct(1)),
        (Model, Model(id=1)),
        (Dict, {"id": 1}),
        (dict[str, Any], {"id": 1}),
        (list[int], [1, 2]),
        (int | None, None),
    ],
)
@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_payload_is_decoded_to_the_annotated_type(kind: Any, value: object, codec: str):
    form = msgspec.msgpack if codec == "msgpack" else msgspec.json
    raw = value.model_dump() if isinstance(value, Model) else value
    assert decoder(kind, codec, "h:go")(form.encode(raw)) == value


@pytest.mark.parametrize(
    "kind", [Plain, Plain | None, list[Plain], dict[str, Plain], Holder, list[Model], Message, Duck]
)
def test_unsupported_payload_class_is_refused_at_load(kind: Any):
    with pytest.raises(HandlerLoadError, match=r"^h:go declares .* is not a data type\); annotate"):
        decoder(kind, "json", "h:go")


def test_optional_payload_fields_may_have_any_type():
    tree = decoder(Tree, "json", "h:go")(b'{"value": {"a": 1}, "branches": []}')
    assert (tree.value, tree.branches) == ({"a": 1}, [])
    assert decoder(dict[str, Hashable], "json", "h:go")(b'{"a": 1}') == {"a": 1}


def test_bytes_and_str_receive_the_raw_payload():
    assert decoder(bytes, "json", "h:go")(b"\xff") == b"\xff"
    assert decoder(str, "json", "h:go")("ä".encode()) == "ä"
    with pytest.raises(Undecodable, match="not UTF-8 text"):
        decoder(str, "json", "h:go")(b"\xff")


@pytest.mark.parametrize(
    ("kind", "payload", "sentence"),
    [
        (Order, b'{"id": 1}', "not a valid Order: Object missing required field `lines`"),
        (Order, b"", "payload is not a valid Order: Input data was truncated"),
        (Struct, b'{"id": "secret"}', r"valid Struct: Expected `int`, got `str` - at `\$.id`"),
        (Model, b'{"id": "secret"}', "valid Model: id: Input should be a valid integer"),
        (Model, b"{", "valid Model: payload: Invalid JSON"),
    ],
)
def test_decoding_error_does_not_contain_the_value(kind: Any, payload: bytes, sentence: str):
    with pytest.raises(Undecodable, match=sentence) as caught:
        decoder(kind, "json", "h:go")(payload)
    assert "secret" not in str(caught.value)
    found = to_outcome(caught.value, "traceback")
    assert isinstance(found, DeadAsked)
    assert (found.reason, found.failure.traceback) == ("undecodable", "")
    assert found.failure.error_class == "streamqd.handlers.Undecodable"


def test_error_without_msgspec_names_the_package():
    code = (
        "import sys; sys.modules['msgspec'] = None\n"
        "from streamqd.handlers.payloads import decoder\n"
        "try: decoder(dict, 'json', 'h:go')\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"h:go needs msgspec for a payload of type dict: {extras.hint('msgspec')}\n"
    )


# --- verdicts -------------------------------------------------------------------------------------


def test_handler_may_return_a_verdict():
    assert run_error(Result.ACK) is None
    assert run_error(0) is None
    assert isinstance(run_error(Result.RETRY), Retry)
    assert isinstance(run_error(Result.DEAD), Dead)
    assert isinstance(run_error(Result.RELEASE), Release)
    returned = Retry(3)
    assert run_error(returned) is returned
    assert to_outcome(Release(), "class") == ReleaseAsked()


def test_unawaited_coroutine_is_a_failure():
    async def forgotten() -> None: ...

    assert isinstance(run_error(forgotten()), TypeError)


def test_returned_generator_is_a_failure():
    for each in (generator(message()), async_generator(message()), (n for n in range(3))):
        assert isinstance(run_error(each), TypeError)


def test_batch_result_has_an_outcome_per_message():
    one, two, three = batch = [message(1), message(2), message(3)]
    error = ValueError()
    assert batch_errors(None, batch) == [None] * 3
    assert batch_errors(error, batch) == [error] * 3
    assert batch_errors(Failures({}), batch) == [None] * 3
    assert batch_errors(Failures({two: error}), batch) == [None, error, None]
    stranger = batch_errors(Failures({one: error, message(1): error}), batch)
    assert [type(each) for each in stranger] == [ValueError] * 3
    assert error not in stranger

    class Mine(Failures):
        def __init__(self) -> None: ...

    mine = Mine()
    assert batch_errors(mine, batch) == [mine] * 3
    assert three in batch


def test_failures_accepts_only_messages_and_exceptions():
    with pytest.raises(TypeError):
        Failures({"1-0": ValueError()})  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        Failures({message(): "because"})  # type: ignore[dict-item]


# --- a user's project -----------------------------------------------------------------------------

MODULE = """
from __future__ import annotations
from dataclasses import dataclass
from streamqd import Context, Dead, Failures, Message, Release, Result, Retry, handler

@dataclass
class Order:
    id: int

async def on_start(context: Context) -> None:
    print(context.assignment.topic)

@handler(topic="a", group="plain", max_attempts=5, timeout="30s")
def plain(msg: Message) -> None:
    if msg.attempt > 3:
        raise Dead("given up")
    msg.progress()
    raise Retry(after=3)

@handler(topic="a", group="async", concurrency=8, order="key")
async def asynchronous(msg: Message) -> Result:
    if not msg.key:
        raise Release
    return Result.ACK

@handler(topic="a", group="batch", batch=10)
def batch(batch: list[Message]) -> None:
    raise Failures({batch[0]: ValueError(batch[0].uid)})

@handler(topic="a", group="typed", codec="json")
def typed(order: Order, msg: Message) -> None:
    reveal_type(typed)
    print(order.id + 1, msg.json())
"""


@pytest.mark.slow
def test_strict_type_checker_accepts_typed_handlers(tmp_path: Path):
    (tmp_path / "work.py").write_text(MODULE)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "c"), "work.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    shown = 'Revealed type is "def (order: work.Order, msg: streamqd.message.Message)"'
    assert shown in done.stdout
