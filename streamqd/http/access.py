"""Access to the HTTP pages: open to every client, or only with the token.

On the loopback a request must name an address, localhost or a configured host. Otherwise a page of
the web could have its own name resolved to 127.0.0.1 and read the answers in an operator's browser
(DNS rebinding). An address that other hosts reach is protected by the token instead.

Health needs no token, because a service manager has none. On an address that other hosts reach,
it is only one word, because the reasons contain topics and groups.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from http import HTTPStatus
from pathlib import Path

from streamqd import config
from streamqd.http import HttpRequest, HttpResponse, Route

JSON_TYPE = "application/json"
_SCHEME = "bearer "


class Access:
    """Guards routes by the settings of `[http]`."""

    def __init__(self, http: config.Http) -> None:
        self._token = config.token_path(http)
        self._discreet = config.is_public(http)
        # No browser reaches a unix socket.
        anyone = self._discreet or isinstance(http.address, Path)
        self._hosts = None if anyone else {"localhost", *map(str.lower, http.hosts)}

    def require_host(self, route: Route) -> Route:
        """Return a route that answers 421 Misdirected Request unless a request names this host."""

        def answer(request: HttpRequest) -> HttpResponse:
            if self.names_us(request.headers.get("host", "")):
                return route(request)
            status = HTTPStatus.MISDIRECTED_REQUEST
            hint = "use an address or localhost, or add this name to http.hosts"
            return HttpResponse(status, f"{status.value} {status.phrase}: {hint}\n".encode())

        return answer

    def names_us(self, host: str) -> bool:
        """Return True if the Host of a request ('' for none) can only mean this address."""
        if self._hosts is None or not host:
            return True
        if host.startswith("["):
            name = host.removeprefix("[").partition("]")[0]
        else:
            name = host.rpartition(":")[0] if ":" in host else host
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower().removesuffix(".") in self._hosts
        return True

    def require_token(self, route: Route) -> Route:
        """Return the route, for clients with the token if one is configured."""

        def answer(request: HttpRequest) -> HttpResponse:
            if not self.allows(request):
                status = HTTPStatus.UNAUTHORIZED
                return HttpResponse(status, f"{status.value} {status.phrase}\n".encode())
            return route(request)

        return answer

    def health(self, request: HttpRequest, reasons: list[str]) -> HttpResponse:
        """Answer a health request, with the reasons for clients that may read the other pages."""
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        document: dict[str, object] = {"ok": not reasons}
        if not self._discreet or (self._token is not None and self.allows(request)):
            document["reasons"] = reasons
        return HttpResponse(status, (json.dumps(document) + "\n").encode(), JSON_TYPE)

    def allows(self, request: HttpRequest) -> bool:
        """Return True if a request has the token, or no token is required.

        The file is read each time, so that a new token needs no restart. If it is empty or missing,
        all requests are refused.
        """
        if self._token is None:
            return True
        try:
            wanted = self._token.read_bytes().strip()
        except OSError:
            return False
        given = request.headers.get("authorization", "")
        if not wanted or given[: len(_SCHEME)].lower() != _SCHEME:
            return False
        return hmac.compare_digest(given[len(_SCHEME) :].strip().encode("latin-1"), wanted)
