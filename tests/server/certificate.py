"""A certificate for 127.0.0.1, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str = "server") -> tuple[Path, Path]:
    """Return a certificate and its key, which is skipped where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def make_expired_certificate(folder: Path) -> tuple[Path, Path]:
    """Return a certificate of January 2020 and its key."""
    certificate, key = make_certificate(folder, "expired")
    (folder / "index.txt").touch()
    (folder / "ca.cnf").write_text(
        f"[ca]\ndefault_ca=of\n[of]\ndatabase={folder}/index.txt\nnew_certs_dir={folder}\ndefault_md=sha256\n"
        "policy=any\nrand_serial=yes\n[any]\ncommonName=supplied\n"
    )
    request, dates = folder / "request.csr", ("-startdate", "20200101000000Z", "-enddate", "20200201000000Z")
    for command in (
        ("req", "-new", "-key", key, "-subj", "/CN=localhost", "-out", request),
        ("ca", "-batch", "-config", folder / "ca.cnf", "-selfsign", "-keyfile", key, "-in", request, *dates),
    ):
        out = () if command[0] == "req" else ("-out", certificate)
        subprocess.run(["openssl", *map(str, command), *map(str, out)], check=True, capture_output=True)
    return certificate, key
