"""When the certificates of a connection end: the server's, our own, and that of the authority."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from streamqd.store.client import Connection

WARN_SECONDS = (
    21 * 86_400.0
)  # before the end: an authority that renews by itself has done so by then
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_VERSION, _UTC_TIME = 0xA0, 0x17  # tags of ASN.1
_VALIDITY = 3  # its place: behind serial number, algorithm and issuer


def ends_of(link: Connection) -> dict[str, float]:
    """When each certificate of a connection to one node ends, in unix seconds; none without TLS.

    Named by the file, or by the address of the server. A file with several authorities is left
    out: one of them may be meant. Opens the connection. Raises RedisUnavailable.
    """
    node = link.node
    encrypted = node.socket()
    if not isinstance(encrypted, ssl.SSLSocket):
        return {}
    found: dict[str, float] = {}
    peer = encrypted.getpeercert(binary_form=True)
    if peer is not None:
        found[f"the server {node.address}"] = end_of(peer)
    assert node.endpoint is not None
    own, authority = node.endpoint.cert_file, node.endpoint.ca_file
    for path in filter(None, (own, authority)):
        text = path.read_text(encoding="ascii", errors="replace")
        bodies = [each.partition(_END)[0] for each in text.split(_BEGIN)[1:]]
        # Behind our own certificate come those that lead to the authority.
        if len(bodies) == 1 or (bodies and path == own):
            found[str(path)] = end_of(base64.b64decode(bodies[0]))
    return found


def warnings(ends: Mapping[str, float], now_unix: float) -> list[str]:
    """A sentence for each certificate that ends soon or has ended."""
    return [
        f"the certificate of {name} {'ended' if end < now_unix else 'ends'} on"
        f" {datetime.fromtimestamp(end, UTC):%Y-%m-%d}, and no connection can be made after that;"
        " renew it, then send SIGHUP"
        for name, end in ends.items()
        if end - now_unix < WARN_SECONDS
    ]


def end_of(der: bytes) -> float:
    """The end of the validity of a certificate in DER, in unix seconds. ValueError: it is none."""
    try:
        (_, whole), *_ = _items(der)
        (_, signed), *_ = _items(whole)
        parts = list(_items(signed))
        validity = parts[_VALIDITY + (parts[0][0] == _VERSION)][1]
        tag, text = list(_items(validity))[1]
        form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
        return datetime.strptime(text.decode("ascii"), form).replace(tzinfo=UTC).timestamp()
    except (IndexError, ValueError) as error:
        raise ValueError("this is not a certificate") from error


def _items(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The elements of an ASN.1 structure in DER: tag and content."""
    at = 0
    while at < len(data):
        tag, length, at = data[at], data[at + 1], at + 2
        if length & 0x80:
            count = length & 0x7F
            length, at = int.from_bytes(data[at : at + count]), at + count
        yield tag, data[at : at + length]
        at += length
