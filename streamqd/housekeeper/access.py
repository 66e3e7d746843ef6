"""Who may read the pages: everybody, or whoever has the token.

Health is told to everybody, for a service manager has no token; on an address that other hosts
reach only in one word, since the reasons name topics and groups.
"""

from __future__ import annotations

import hmac
import json
from http import HTTPStatus

from streamqd import config
from streamqd.http import Request, Response, Route

JSON_TYPE = "application/json"
_SCHEME = "bearer "


class Access:
    """Guards routes by the settings of `[http]`."""

    def __init__(self, http: config.Http) -> None:
        self._token = config.token_path(http)
        self._discreet = config.is_public(http)

    def guarded(self, route: Route) -> Route:
        """The route for those who have the token, when there is one."""

        def answer(request: Request) -> Response:
            if not self.allows(request):
                status = HTTPStatus.UNAUTHORIZED
                return Response(status, f"{status.value} {status.phrase}\n".encode())
            return route(request)

        return answer

    def health(self, request: Request, reasons: list[str]) -> Response:
        """Tell health, with the reasons for those who may read the other pages too."""
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        document: dict[str, object] = {"ok": not reasons}
        if not self._discreet or (self._token is not None and self.allows(request)):
            document["reasons"] = reasons
        return Response(status, (json.dumps(document) + "\n").encode(), JSON_TYPE)

    def allows(self, request: Request) -> bool:
        """Whether a request has the token, or none is asked for.

        The file is read each time, so that a new token needs no restart. Without a token in it
        nobody is let in.
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
