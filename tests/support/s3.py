"""An S3 server for tests: moto in its own process, which misbehaves on demand.

    with BucketServer() as store:
        store.fail("PUT", "_delta_log/", StoreFault.LOST_REPLY)
        Archive("s3://bucket/archive", create=True, options=store.options)

It accepts only `KEY` as the access key, so that a test shows where the credentials came from. It
does not check any signature.
"""

from __future__ import annotations

import contextlib
import enum
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import Any, Self

KEY, SECRET = "AKIATESTSTESTSTESTS0", "the-secret-of-these-tests"
BUCKET = "bucket"
_CONTROL = "/_control"


class StoreFault(enum.Enum):
    """A fault that requests can have."""

    SLOW_DOWN = "it is throttled: 503, and nothing is done"
    LOST_REQUEST = "the connection is reset; nothing is done"
    LOST_REPLY = "it is done; the connection is reset instead of the reply"
    EXPIRED = "the credentials have expired: 403, and nothing is done"


class BucketServer:
    """A server with one empty bucket, to be closed after use."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.support.s3"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def place(self) -> dict[str, str]:
        """The options without the credentials."""
        return {
            "aws_endpoint_url": self.url,
            "aws_allow_http": "true",
            "aws_region": "us-east-1",
        }

    @property
    def options(self) -> dict[str, str]:
        """The options for deltalake's client."""
        return self.place | {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}

    @property
    def environment(self) -> dict[str, str]:
        """The options in the form of environment variables."""
        return {name.upper(): value for name, value in self.options.items()}

    def fail(
        self, method: str, path: str, kind: StoreFault, *, times: int = 1, skip: int = 0
    ) -> None:
        """Arm a fault for requests with this method whose path matches a pattern.

        The first `skip` of these requests succeed, and the next `times` have the fault.
        """
        self._ask("fault", [method, path, kind.name, times, skip])

    def heal(self) -> None:
        """Disarm all faults."""
        self._ask("heal", None)

    def requests(self) -> list[str]:
        """Return the method and path of each request since the last call."""
        found: list[str] = self._ask("requests", None)
        return found

    def _ask(self, what: str, argument: Any) -> Any:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(link):
            link.request("POST", _CONTROL, json.dumps([what, argument]))
            return json.loads(link.getresponse().read())

    def close(self) -> None:
        """Stop the server."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- in the server's process ----------------------------------------------------------------------


class ResetError(Exception):
    """Raised to end a request without a reply."""


class _Faulty:
    """Moto's application, handling one request at a time because moto does not lock."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._faults: list[list[Any]] = []
        self._seen: list[str] = []

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == _CONTROL:
            return self._control(environ, start)
        with self._lock:
            self._seen.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
            kind = self._find_fault(environ)
            if kind is StoreFault.SLOW_DOWN:
                return _refuse(start, "503 Slow Down", "SlowDown")
            if kind is StoreFault.EXPIRED:
                return _refuse(start, "403 Forbidden", "ExpiredToken")
            if f"Credential={KEY}/" not in environ.get("HTTP_AUTHORIZATION", ""):
                return _refuse(start, "403 Forbidden", "InvalidAccessKeyId")
            if kind is StoreFault.LOST_REQUEST:
                _reset(environ)
            reply = list(self._app(environ, start))
            if kind is StoreFault.LOST_REPLY:
                _reset(environ)
            return reply

    def _find_fault(self, environ: dict[str, Any]) -> StoreFault | None:
        for fault in self._faults:
            method, path, kind, times, skip = fault
            if environ["REQUEST_METHOD"] != method or not re.search(path, environ["PATH_INFO"]):
                continue
            if skip:
                fault[4] -= 1
            elif times:
                fault[3] -= 1
                return StoreFault[kind]
        return None

    def _control(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        what, argument = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        answer: Any = None
        with self._lock:
            if what == "fault":
                self._faults.append(argument)
            elif what == "heal":
                self._faults.clear()
            else:
                answer, self._seen = self._seen, []
        start("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(answer).encode()]


def _refuse(start: Any, status: str, code: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "application/xml")])
    text = f"<Error><Code>{code}</Code><Message>{code} {KEY} {SECRET}</Message></Error>"
    return [text.encode()]


def _reset(environ: dict[str, Any]) -> None:
    environ["werkzeug.socket"].shutdown(2)
    raise ResetError


def main() -> None:
    """Serve until the parent process exits."""
    import ctypes
    import logging

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    logging.getLogger("werkzeug").disabled = True
    app = _Faulty(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    import boto3

    os.environ["MOTO_S3_CUSTOM_ENDPOINTS"] = f"http://127.0.0.1:{server.port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{server.port}",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    print(server.port, flush=True)
    signal.sigwait([signal.SIGTERM])


if __name__ == "__main__":
    main()
