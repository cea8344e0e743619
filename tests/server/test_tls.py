"""TLS on every port, and certificates that are none."""

from __future__ import annotations

import http.client
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("grpc")
import grpc
from certificate import make_certificate, make_expired_certificate
from ports import free_ports

from kvtools.errors import BadInputError
from kvtools.server.settings import Settings
from kvtools.server.tls import not_of_today, tls_context

SAMPLE = Path(__file__).parent.parent / "data" / "sample"


def ask(port: int, certificate: Path) -> tuple[int, bytes]:
    context = ssl.create_default_context(cafile=certificate)
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)
    try:
        connection.request("GET", "/v1/tables/ads/emb/rows/42")
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_every_port_speaks_tls_and_a_new_certificate_is_taken_at_sighup(
    tmp_path: Path, serve: Callable[..., Any]
) -> None:
    certificate, key = make_certificate(tmp_path)
    grpc_port, resp_port = free_ports(2)
    server = serve(
        SAMPLE, "--tls-cert", certificate, "--tls-key", key, "--grpc-port", grpc_port, "--resp-port", resp_port
    )
    assert "https://" in server.line
    assert ask(server.port, certificate) == (200, b'{"key":42,"embedding":[9.0,9.125,9.25,9.375]}')

    def grpc_live() -> None:
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{grpc_port}", credentials) as channel:
            live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=30)
        assert live == b"\x08\x01"

    grpc_live()
    context = ssl.create_default_context(cafile=certificate)
    with (
        socket.create_connection(("127.0.0.1", resp_port)) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as encrypted,
    ):
        for _ in range(4):  # from the second one on, the reader answers by itself: that, too, has to be encrypted
            encrypted.sendall(b"GET ads/emb:42\r\n")
            assert encrypted.recv(100).startswith(b"$")

    other, other_key = make_certificate(tmp_path, "other")
    other_content = other.read_bytes()
    other.replace(certificate)
    other_key.replace(key)
    server.process.send_signal(signal.SIGHUP)
    last = time.monotonic() + 60
    while True:
        try:
            assert ask(server.port, certificate)[0] == 200
            break
        except ssl.SSLCertVerificationError:
            assert time.monotonic() < last
            time.sleep(0.02)
    grpc_live()
    grpc_live()
    assert "the certificate was read anew" in server.stderr()

    certificate.write_text("none")
    server.process.send_signal(signal.SIGHUP)
    while "the certificate stays as it is" not in server.stderr():
        assert time.monotonic() < last
        time.sleep(0.02)
    certificate.write_bytes(other_content)
    assert ask(server.port, certificate)[0] == 200
    grpc_live()

    for new, place in zip(make_expired_certificate(tmp_path), (certificate, key), strict=True):
        new.replace(place)
    server.process.send_signal(signal.SIGHUP)
    expired = f"WARNING: clients refuse the certificate in '{certificate}': certificate has expired"
    while expired not in server.stderr():
        assert time.monotonic() < last
        time.sleep(0.02)

    idle = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=30, context=ssl._create_unverified_context())
    idle.request("GET", "/livez")
    assert idle.getresponse().read()
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert time.monotonic() - began < 15, "a client that does not close its idle connection is not waited for"
    idle.close()


def test_files_are_looked_at_before_listening(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    _, other_key = make_certificate(tmp_path, "other")
    no_key = tmp_path / "none.key"
    no_key.write_text("nothing\n")
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked],
        check=True,
        capture_output=True,
    )
    for tls_cert, tls_key, message in (
        (certificate, None, "belong together"),
        (None, key, "belong together"),
        (certificate, tmp_path / "absent", "absent': No such file"),
        (certificate, no_key, "no certificate"),
        (certificate, other_key, "no certificate"),
        (certificate, locked, "passphrase"),
    ):
        with pytest.raises(BadInputError, match=message):
            tls_context(Settings(tls_cert=tls_cert, tls_key=tls_key))
    assert tls_context(Settings()) is None
    assert not_of_today(certificate, key) == ""
    assert "certificate has expired" in not_of_today(*make_expired_certificate(tmp_path))

    command = [sys.executable, "-m", "kvtools.cli.main", "serve", str(SAMPLE), "--tls-cert", str(certificate)]
    ended = subprocess.run(
        [*command, "--tls-key", str(no_key), "--port", "0"], capture_output=True, text=True, cwd=no_key.parent
    )
    assert ended.returncode and "setting up TLS" in ended.stderr and not ended.stdout
