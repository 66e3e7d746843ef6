"""A server that accepts only TLS, and its certificates."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from streamqd import config
from tests.support.servers import NoServerError, ProcessServer, find_binary, free_port


def certificates(folder: Path) -> Path:
    """Make an authority (ca.pem), its certificate for 127.0.0.1 (server.pem), and other.pem.

    server.key is the key of server.pem. other.pem is another authority. Raises NoServerError if
    openssl is missing.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        raise NoServerError("no openssl on PATH")
    (folder / "names").write_text(
        "subjectAltName=IP:127.0.0.1\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
    )
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    # Python 3.13 rejects an authority that has no key usage.
    authority = f"{key} -addext basicConstraints=critical,CA:TRUE"
    authority += " -addext keyUsage=critical,keyCertSign,cRLSign"
    signed_by_ca = "-CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names"
    for command in (
        f"req -x509 {authority} -keyout ca.key -out ca.pem -days 2 -subj /CN=authority",
        f"req -x509 {authority} -keyout other.key -out other.pem -days 2 -subj /CN=stranger",
        f"req {key} -keyout server.key -out server.csr -subj /CN=server",
        f"x509 -req -in server.csr {signed_by_ca} -out server.pem",
    ):
        subprocess.run([openssl, *command.split()], cwd=folder, check=True, capture_output=True)
    return folder


def make_expired(folder: Path) -> Path:
    """Make an expired certificate for the server's key, and return its path."""
    openssl = shutil.which("openssl")
    assert openssl is not None
    # Since 3.4, `x509` accepts dates and no number of days below 1. Older versions accept no dates.
    known = subprocess.run([openssl, "x509", "-help"], check=True, capture_output=True, text=True)
    dates = "-not_before 20200101000000Z -not_after 20200102000000Z"
    ended = dates if "-not_after" in known.stdout + known.stderr else "-days -1"
    signed_by_ca = f"-CA ca.pem -CAkey ca.key -CAcreateserial {ended} -extfile names"
    command = f"x509 -req -in server.csr {signed_by_ca} -out expired.pem"
    subprocess.run([openssl, *command.split()], cwd=folder, check=True, capture_output=True)
    return folder / "expired.pem"


def settings(url: str, folder: Path) -> config.Redis:
    """Return settings for a client that uses these certificates."""
    return config.Redis(
        url=url,
        ca_file=folder / "ca.pem",
        cert_file=folder / "server.pem",
        key_file=folder / "server.key",
    )


def options(folder: Path, port: int) -> dict[str, str]:
    """Return the options with which a server accepts TLS on a port and uses these certificates."""
    return {
        "tls_port": str(port),
        "tls_cert_file": str(folder / "server.pem"),
        "tls_key_file": str(folder / "server.key"),
        "tls_ca_cert_file": str(folder / "ca.pem"),
    }


def start(folder: Path, **more: str) -> ProcessServer:
    """Start a TLS server with these certificates on a port. It also requires a client certificate.

    The bundled Valkey does not support TLS, but the system's Redis does. Raises NoServerError.
    """
    port = free_port()
    made = ProcessServer(
        "redis7",
        find_binary("redis7"),
        **options(folder, port),
        **more,
    )
    made.port = port
    return made
