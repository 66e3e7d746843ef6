"""Handlers are loaded and run. Handlers that cannot be used are reported in one sentence."""

from __future__ import annotations

import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from streamqd import config, handlers
from streamqd.errors import HandlerLoadError
from streamqd.handlers import (
    Dead,
    Probe,
    Release,
    Retry,
    SoftTimeout,
    Undecodable,
    handler,
)
from streamqd.handlers.outcomes import class_lineage
from streamqd.model import Backoff, DeadAsked, Failed, RetryAsked, RetryPolicy
from streamqd.policy.fingerprint import LENGTH

Write = Callable[[str, str], None]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A directory for modules, whose imports are forgotten after the test."""
    before, path = set(sys.modules), sys.path[:]
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def write(folder: Path) -> Write:
    def write(name: str, text: str) -> None:
        (folder / f"{name}.py").write_text(textwrap.dedent(text))

    return write


# --- loading --------------------------------------------------------------------------------------


def test_load_finds_a_function_and_its_module_hooks(write: Write, folder: Path):
    write("h1", "def go(m): return 7\ndef on_start(c): return 1\ndef on_stop(): return 2\n")
    loaded = handlers.load("h1:go", folder)
    assert loaded.function(None) == 7  # type: ignore[arg-type]
    assert loaded.on_start is not None
    assert loaded.on_stop is not None
    assert (loaded.on_start(None), loaded.on_stop()) == (1, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "kept"),
    [
        ("return text.replace('ann@x.org', '***')", "no mail to ***"),
        ("raise RuntimeError(text)", "<redact_error failed: RuntimeError>"),
        ("raise SystemExit(text)", "<redact_error failed: SystemExit>"),
        ("return None", "<redact_error failed: it returned NoneType>"),
        ("return ''", ""),
    ],
)
def test_redact_error_replaces_the_error_text(write: Write, folder: Path, code: str, kept: str):
    """Whatever the hook returns, the failure is recorded, without any other text of the error."""
    name = f"r{len(code)}"
    write(name, f"def go(m): return 7\ndef redact_error(text):\n    {code}\n")
    loaded = handlers.load(f"{name}:go", folder)
    failure = handlers.describe_failure(ValueError("no mail to ann@x.org"), "traceback")
    found = handlers.redact_failure(failure, loaded.redact)
    assert found.message == kept
    assert "ann@x.org" not in found.traceback
    assert (found.error_class, found.lineage) == (failure.error_class, failure.lineage)
    assert handlers.redact_failure(failure, None) is failure
    silent = handlers.describe_failure(ValueError("x"), "class")
    assert handlers.redact_failure(silent, loaded.redact) == silent, "nothing to look at"


def test_load_refuses_an_invalid_redact_error(write: Write, folder: Path):
    for number, code in enumerate(
        ("async def redact_error(text): return text", "redact_error = 1")
    ):
        write(f"rn{number}", f"def go(m): return 7\n{code}\n")
        with pytest.raises(HandlerLoadError, match=f"redact_error of rn{number} must be"):
            handlers.load(f"rn{number}:go", folder)


def test_load_accepts_a_static_method_with_defaults(write: Write, folder: Path):
    write("h2", "class H:\n    @staticmethod\n    def go(m, *, limit=3): return limit\n")
    loaded = handlers.load("h2:H.go", folder)
    assert loaded.function(None) == 3  # type: ignore[arg-type]
    assert (loaded.on_start, loaded.on_stop) == (None, None)


@pytest.mark.parametrize(
    ("text", "reference", "sentence"),
    [
        ("", "h3:go", "module h3 has no function go"),
        ("go = 3", "h3:go", "h3:go is not a function"),
        ("class H: pass", "h3:H.go", "module h3 has no function H.go"),
        ("async def go(a, b): pass", "h3:go", "exactly one argument"),
        ("def go(): pass", "h3:go", "exactly one argument"),
        ("def go(a, b): pass", "h3:go", "exactly one argument"),
        ("def go(*, m): pass", "h3:go", "exactly one argument"),
        ("1/0", "h3:go", r"cannot import h3: ZeroDivisionError: division by zero \(.*h3\.py:1\)"),
        ("import json\njson.loads('{')", "h3:go", r"JSONDecodeError: .*\(.*h3\.py:2\)"),
        ("import nowhere_at_all", "h3:go", "cannot import h3: ModuleNotFoundError: .*nowhere"),
        ("def go(m:", "h3:go", r"cannot import h3: SyntaxError: .*h3\.py, line 1\)$"),
        ("raise SystemExit(3)", "h3:go", "cannot import h3: SystemExit"),
        ("raise KeyboardInterrupt", "h3:go", "cannot import h3: KeyboardInterrupt"),
    ],
)
def test_unusable_handler_error_is_one_sentence(
    write: Write, folder: Path, text: str, reference: str, sentence: str
):
    write("h3", text)
    with pytest.raises(HandlerLoadError, match=sentence) as caught:
        handlers.load(reference, folder)
    assert "\n" not in str(caught.value)


def test_missing_module_error_names_the_searched_path(folder: Path):
    with pytest.raises(HandlerLoadError, match="no module named nowhere next to"):
        handlers.load("nowhere:go", folder)


# --- unusable values of options -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("retry_on=(lambda: 1,)", "retry_on: a value of type function is not a setting; pass"),
        ("timeout=object()", "timeout: a value of type object is not a setting; pass"),
        ("breaker={'on': [b'x']}", "breaker.on: a value of type bytes is not a setting; pass"),
        ("retry=5", "retry must be a RetryPolicy, not int"),
    ],
)
def test_unknown_handler_option_is_reported_with_its_line(
    write: Write, folder: Path, option: str, sentence: str
):
    write("h13", f"from streamqd import handler\n\nhandler(topic='t', group='g', {option})\n")
    found = handlers.probe(["h13"], [], folder, 20.0)
    [problem] = found.problems
    assert problem.startswith(f"cannot import h13: TypeError: {sentence}")
    assert problem.endswith(f"({folder}/h13.py:3)")


# --- probing in a child ---------------------------------------------------------------------------


def test_probe_finds_declarations_without_importing_here(write: Write, folder: Path):
    write(
        "h4",
        """
        import os
        from streamqd import handler
        os.environ["LEFT_BEHIND"] = "1"
        @handler(topic="access", group="hits", max_attempts=2, timeout="30s")
        def go(m): pass
        """,
    )
    found = handlers.probe(["h4"], [], folder, 20.0)
    assert found == Probe(
        [
            {
                "topic": "access",
                "group": "hits",
                "handler": "h4:go",
                "max_attempts": 2,
                "timeout": "30s",
            }
        ],
        [],
        traits={"h4:go": []},
        sources=[str(folder / "h4.py")],
    )
    assert "h4" not in sys.modules
    assert "LEFT_BEHIND" not in os.environ


def test_probe_reports_every_problem_once(write: Write, folder: Path):
    write("h5", "1/0")
    write("h6", "from streamqd import handler\n@handler(topic='t', group='g')\ndef go(): pass\n")
    found = handlers.probe(["h5", "h6", "gone"], ["h6:go", "h6:other", "h5:go"], folder, 20.0)
    assert [problem.partition(":")[0] for problem in found.problems] == [
        "cannot import h5",
        (
            "no module named gone next to the configuration file, in the working directory or on"
            " PYTHONPATH"
        ),
        "h6",
        "module h6 has no function other",
    ]


def test_probe_ignores_output_of_a_module(write: Write, folder: Path, capfd, monkeypatch):
    monkeypatch.setattr(sys, "stdout", os.fdopen(1, "w", closefd=False))  # as without pytest
    write("h7", "print('{\"declared\": 1}', flush=True)\ndef go(m): pass\n")
    found = handlers.probe(["h7"], ["h7:go"], folder, 20.0)
    assert found == Probe([], [], {"h7:go": []}, [str(folder / "h7.py")])
    assert capfd.readouterr().out == '{"declared": 1}\n'


def test_probe_reads_more_declarations_than_a_pipe_holds(write: Write, folder: Path):
    write(
        "h8",
        """
        from streamqd import handler
        for n in range(3000):
            handler(topic="t", group=f"g{n}")(lambda m: None)
        def go(m): pass
        """,
    )
    found = handlers.probe(["h8"], [], folder, 20.0)
    assert len(found.declared) == 3000
    assert found.problems == ["module h8 has no function <lambda>"]


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("import os; os._exit(9)", "exit code 9"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV"),
    ],
)
def test_probe_reports_a_module_that_kills_its_process(
    write: Write, folder: Path, capfd, text: str, how: str
):
    write("h9", text)
    assert handlers.probe(["h9"], [], folder, 20.0) == Probe(
        [],
        [f"importing the handler modules failed: its process terminated with {how}"],
        complete=False,
    )


def test_probe_kills_a_hung_module_after_its_timeout(write: Write, folder: Path):
    write("h10", "import threading; threading.Event().wait()")
    found = handlers.probe(["h10"], [], folder, 0.3)
    assert found.problems == ["importing the handler modules failed: it took longer than 0.3 s"]


def test_interrupted_probe_returns_immediately(write: Write, folder: Path):
    write("h11", "import threading; threading.Event().wait()")
    found = handlers.probe(["h11"], [], folder, 60.0, interrupted=lambda: True)
    assert found.declared == []
    assert len(found.problems) == 1


# --- outcomes -------------------------------------------------------------------------------------


class RefusalError(ValueError):
    pass


def raise_in_handler(error: BaseException) -> BaseException:
    """Return the error with its traceback in a worker: the caller's frame, then its own."""

    def handler_function() -> None:
        secret_local = "password"  # noqa: F841 - must not be in the traceback
        raise error

    try:
        handler_function()
    except BaseException as caught:  # noqa: BLE001
        return caught
    raise AssertionError


@pytest.mark.parametrize(
    ("detail", "known"),
    [
        ("none", (False, False, False)),
        ("class", (True, False, False)),
        ("message", (True, True, False)),
        ("traceback", (True, True, True)),
    ],
)
def test_failure_details_follow_the_error_setting(detail: str, known: tuple[bool, ...]):
    failed = handlers.to_outcome(raise_in_handler(RefusalError("no, because")), detail)
    assert isinstance(failed, Failed)
    assert (bool(failed.error_class), bool(failed.message), bool(failed.traceback)) == known
    assert {"RefusalError", "ValueError", "builtins.ValueError", "Exception"} <= set(failed.lineage)
    if detail == "traceback":
        assert failed.error_class == f"{__name__}.RefusalError"
        assert "handler_function" in failed.traceback
        assert "in raised" not in failed.traceback, "our own frame is of no use to the reader"
        assert "password" not in failed.traceback.replace('secret_local = "password"', "")


def raise_with_context(*, hidden: bool = False) -> BaseException:
    """Return an error that was raised while another one was being handled."""

    def handler_function() -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RefusalError("second") from (None if hidden else error)

    try:
        handler_function()
    except BaseException as caught:  # noqa: BLE001
        return caught
    raise AssertionError


def raise_with_note() -> BaseException:
    error = raise_in_handler(RefusalError("no"))
    error.add_note("and a note")
    return error


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class HomelessError(Exception):
    __module__ = "__main__"


def raise_name_error() -> BaseException:
    """Return an error for which Python may suggest the right name."""

    def handler_function() -> None:
        "".upperr()  # type: ignore[attr-defined]

    with pytest.raises(AttributeError) as caught:
        handler_function()
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        raise_in_handler(RefusalError("no")),
        raise_in_handler(RefusalError("no, once more")),
        raise_in_handler(SyntaxError("odd", ("file", 1, 1, "text"))),
        raise_in_handler(ExceptionGroup("all", [ValueError("a"), KeyError("b")])),
        raise_with_context(),
        raise_with_context(hidden=True),
        raise_with_note(),
        RefusalError("never raised"),
        raise_in_handler(RefusalError()),
        raise_in_handler(RefusalError("two\nlines")),
        raise_in_handler(UnspeakableError()),
        raise_in_handler(HomelessError("no")),
        raise_in_handler(KeyError("no")),
        raise_in_handler(SystemExit(3)),
        raise_in_handler(ImportError("no", name="streamqd")),
        raise_name_error(),
    ],
    ids=[
        *("plain", "same place", "syntax", "group", "cause", "no cause", "note", "no stack"),
        *("no text", "lines", "unspeakable", "of main", "key", "exit", "import", "misspelt"),
    ],
)
def test_traceback_equals_the_one_of_python(error: BaseException):
    trace = error.__traceback__.tb_next if error.__traceback__ else None  # leaves out our own call
    for _ in range(2):  # on the second call, the stack is in the cache
        written = handlers.describe_failure(error, "traceback").traceback
        assert written == "".join(traceback.format_exception(type(error), error, trace))


def test_traceback_names_the_right_file_for_identical_code():
    source = "def work():\n    raise RefusalError\n"
    for name in ("/srv/one/client.py", "/srv/two/client.py"):
        scope: dict[str, Any] = {"RefusalError": RefusalError}
        exec(compile(source, name, "exec"), scope)
        with pytest.raises(RefusalError) as caught:
            scope["work"]()
        assert name in handlers.describe_failure(caught.value, "traceback").traceback


def test_long_error_texts_are_truncated():
    failed = handlers.describe_failure(raise_in_handler(RefusalError("x" * 100_000)), "traceback")
    assert len(failed.message) == handlers.MESSAGE_CHARS_MAX
    assert len(failed.traceback) <= handlers.TRACEBACK_BYTES_MAX
    assert "… cut …" in failed.traceback


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_every_exception_is_recorded_as_a_failure(error: BaseException):
    assert isinstance(handlers.to_outcome(raise_in_handler(error), "traceback"), Failed)


@pytest.mark.parametrize("detail", ["none", "class", "message", "traceback"])
@pytest.mark.parametrize(
    "error",
    [
        *(RefusalError("no"), SoftTimeout("over"), SystemExit(1), UnspeakableError()),
        *(Retry(after=2.5), Dead("cut off"), Undecodable("no number"), Release()),
    ],
    ids=lambda error: type(error).__name__,
)
def test_brief_outcome_equals_the_full_one_without_texts(error: BaseException, detail: str):
    whole, brief = (
        of(raise_in_handler(error), detail)
        for of in (handlers.to_outcome, handlers.to_brief_outcome)
    )
    without = {"message": "", "traceback": ""}
    if isinstance(whole, Failed):
        assert brief == replace(whole, **without)
    elif isinstance(whole, RetryAsked | DeadAsked):
        assert brief == replace(whole, failure=replace(whole.failure, **without))
    else:
        assert brief == whole


def test_error_class_without_a_module_is_named():
    class Meta(type):
        @property
        def __module__(cls) -> str:  # type: ignore[override]
            raise RuntimeError("no")

    class Odd(Exception, metaclass=Meta):  # noqa: N818
        pass

    brief = handlers.to_brief_outcome(raise_in_handler(Odd("no")), "class")
    assert isinstance(brief, Failed)
    assert brief.error_class == "Odd"
    assert len(handlers.Description(raise_in_handler(Odd("no"))).fingerprint("h:go")) == LENGTH


def test_retry_and_dead_exceptions_become_requests():
    asked = handlers.to_outcome(raise_in_handler(Retry(after=2.5)), "class")
    assert isinstance(asked, RetryAsked)
    assert asked.after == 2.5
    plain = handlers.to_outcome(raise_in_handler(Retry()), "class")
    assert isinstance(plain, RetryAsked)
    assert plain.after is None
    dead = handlers.to_outcome(raise_in_handler(Dead("cut off")), "message")
    assert isinstance(dead, DeadAsked)
    assert (dead.reason, dead.failure.message) == ("dead", "cut off")


@pytest.mark.parametrize("after", [-1, float("nan"), float("inf"), 1e12])
def test_retry_refuses_an_out_of_range_wait(after: float):
    with pytest.raises(ValueError, match="one year"):
        Retry(after=after)


def test_retry_refuses_a_wait_that_is_not_a_number():
    """The error of `Retry(after="soon")` names `after`, instead of a comparison that failed."""
    with pytest.raises(TypeError, match="after must be a number of seconds, not 'soon'"):
        Retry(after="soon")  # type: ignore[arg-type]


def test_decorator_without_parentheses_error_shows_usage():
    """The error shows how the decorator has to be written."""
    with pytest.raises(TypeError, match=r"write @handler\(topic=\.\.\., group=\.\.\.\)"):
        handler(print)  # type: ignore[call-arg, misc]


def test_soft_timeout_is_a_failure_marked_timed_out():
    failed = handlers.to_outcome(raise_in_handler(SoftTimeout("over")), "class")
    assert isinstance(failed, Failed)
    assert failed.timed_out


def test_equal_failures_have_equal_fingerprints():
    one = handlers.Description(raise_in_handler(RefusalError("a"))).fingerprint("h:go")
    assert one == handlers.Description(raise_in_handler(RefusalError("b"))).fingerprint("h:go"), (
        "the text differs, no more"
    )
    assert one != handlers.Description(raise_in_handler(KeyError("a"))).fingerprint("h:go")
    assert one != handlers.Description(raise_in_handler(RefusalError("a"))).fingerprint("h:other")
    assert handlers.Description(RefusalError("never raised")).fingerprint("h:go") != one


def test_explicit_settings_override_a_retry_policy(write: Write, folder: Path):
    write(
        "h12",
        """
        from datetime import timedelta
        from streamqd import Backoff, RetryPolicy, handler

        class Down(Exception):
            pass

        @handler(
            topic="t",
            group="g",
            retry=RetryPolicy(
                max_attempts=9,
                backoff=Backoff("linear", 2.0),
                max_age=60.0,
                retry_on=(Down, OSError),
                dead_on=("KeyError",),
                on_error="hold-key",
            ),
            max_attempts=3,
            timeout=timedelta(seconds=5),
            breaker={"failures": 3, "on": [Down]},
        )
        def go(message): pass
        """,
    )
    found = handlers.probe(["h12"], [], folder, 20.0)
    assert found.problems == []
    assert found.declared == [
        {
            "topic": "t",
            "group": "g",
            "handler": "h12:go",
            "max_attempts": 3,
            "backoff": {"kind": "linear", "base": 2.0, "max": 300.0, "jitter": "full"},
            "retry_max_age": 60.0,
            "retry_on": ["h12.Down", "OSError"],
            "dead_on": ["KeyError"],
            "on_error": "hold-key",
            "timeout": 5.0,
            "breaker": {"failures": 3, "on": ["h12.Down"]},
        }
    ]
    (consumer,) = config.declare_consumers(config.Settings(), found.declared).consumers
    assert consumer.policy == RetryPolicy(
        max_attempts=3,
        backoff=Backoff("linear", 2.0),
        max_age=60.0,
        retry_on=("h12.Down", "OSError"),
        dead_on=("KeyError",),
        on_error="hold-key",
    )
    assert consumer.breaker.on == ("h12.Down",)


def test_error_class_uses_its_public_module_name():
    names = class_lineage(redis.ConnectionError)
    assert names[:3] == (
        "redis.exceptions.ConnectionError",
        "ConnectionError",
        "redis.ConnectionError",
    )
    assert names.index("redis.RedisError") < names.index("Exception")
    assert "redis.OSError" not in class_lineage(OSError)
