"""Control the access to the HTTP pages, which are open to all clients or protected by a token.

On the loopback interface, the Host of a request must be an IP address, localhost or a configured
host. Otherwise, a website could make its own name resolve to 127.0.0.1, and then read the pages in
an operator's browser (DNS rebinding). An address that other hosts can reach is protected by the
token instead.

The health page needs no token, because a service manager has none. On an address that other hosts
can reach, it does not show the reasons to clients without the token, because these contain topics
and groups.
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
    """Protects routes according to the settings in `[http]`."""

    def __init__(self, http: config.Http) -> None:
        self._token = config.token_path(http)
        self._discreet = config.is_public(http)
        # Browsers cannot reach a Unix socket, so the Host of a request does not matter there.
        anyone = self._discreet or isinstance(http.address, Path)
        self._hosts = None if anyone else {"localhost", *map(str.lower, http.hosts)}

    def require_host(self, route: Route) -> Route:
        """Return a route that accepts only requests whose Host is allowed.

        To all other requests, it responds with 421 Misdirected Request.
        """

        def answer(request: HttpRequest) -> HttpResponse:
            if self.names_us(request.headers.get("host", "")):
                return route(request)
            status = HTTPStatus.MISDIRECTED_REQUEST
            hint = "use an address or localhost, or add this name to http.hosts"
            return HttpResponse(status, f"{status.value} {status.phrase}: {hint}\n".encode())

        return answer

    def names_us(self, host: str) -> bool:
        """Return True if the Host of a request is an IP address, localhost or a configured host.

        Pass '' for a request without a Host, which is accepted too.
        """
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
        """Return a route that accepts only clients with the token, if a token is configured.

        To all other clients, it responds with 401 Unauthorized.
        """

        def answer(request: HttpRequest) -> HttpResponse:
            if not self.allows(request):
                status = HTTPStatus.UNAUTHORIZED
                return HttpResponse(status, f"{status.value} {status.phrase}\n".encode())
            return route(request)

        return answer

    def health(self, request: HttpRequest, reasons: list[str]) -> HttpResponse:
        """Return the response to a health request.

        The status is 200 if there are no reasons for poor health, and 503 otherwise. Only clients
        that may read the other pages get the reasons themselves.
        """
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        document: dict[str, object] = {"ok": not reasons}
        if not self._discreet or (self._token is not None and self.allows(request)):
            document["reasons"] = reasons
        return HttpResponse(status, (json.dumps(document) + "\n").encode(), JSON_TYPE)

    def allows(self, request: HttpRequest) -> bool:
        """Return True if a request contains the token, or if no token is configured.

        The file with the token is read each time, so that a new token takes effect without a
        restart. If the file is empty or missing, all requests are refused.
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
