"""A server that speaks TLS only, with the certificates for it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.support.servers import NoServerError, ProcessServer, find_binary, free_port


def certificates(folder: Path) -> Path:
    """Make an authority (ca.pem), a certificate for 127.0.0.1 that it has signed (server.pem,
    server.key), and one of a stranger (other.pem). Raises NoServerError without openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        raise NoServerError("no openssl on PATH")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    signed_by_ca = "-CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names"
    for command in (
        f"req -x509 {key} -keyout ca.key -out ca.pem -days 2 -subj /CN=authority",
        f"req -x509 {key} -keyout other.key -out other.pem -days 2 -subj /CN=stranger",
        f"req {key} -keyout server.key -out server.csr -subj /CN=server",
        f"x509 -req -in server.csr {signed_by_ca} -out server.pem",
    ):
        subprocess.run([openssl, *command.split()], cwd=folder, check=True, capture_output=True)
    return folder


def start(folder: Path, **more: str) -> ProcessServer:
    """Start a server with those certificates; it asks clients for one too. `port` is that of TLS.

    The bundled Valkey cannot speak TLS, the system's Redis can. Raises NoServerError.
    """
    port = free_port()
    made = ProcessServer(
        "redis7",
        find_binary("redis7"),
        tls_port=str(port),
        tls_cert_file=str(folder / "server.pem"),
        tls_key_file=str(folder / "server.key"),
        tls_ca_cert_file=str(folder / "ca.pem"),
        **more,
    )
    made.port = port
    return made
