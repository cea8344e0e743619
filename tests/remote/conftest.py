"""An S3 server on loopback, one for all tests, and the buckets of single tests in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from s3_bucket import Bucket
from s3_proxy import Proxy

from kvtools.remote import store

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLEOFTEST",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+secretOfTest",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def _server() -> Iterator[tuple[Proxy, Any]]:
    boto3 = pytest.importorskip("boto3")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    proxy = Proxy((host, port))
    direct = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        aws_access_key_id="x",
        aws_secret_access_key="x",
        region_name="us-east-1",
    )
    yield proxy, direct
    proxy.stop()
    server.stop()


@pytest.fixture
def bucket(_server: tuple[Proxy, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    proxy, client = _server
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(store, "_sleep", lambda seconds: None)
    name = f"bucket-{next(_numbers)}"
    client.create_bucket(Bucket=name)
    proxy.reset()
    yield Bucket(name, proxy, client)
    proxy.reset()


@pytest.fixture
def memory() -> Iterator[Any]:
    """A place in memory that nobody else writes to: (file system, URL)."""
    fsspec = pytest.importorskip("fsspec")
    system, name = fsspec.filesystem("memory"), f"place-{next(_numbers)}"
    yield system, f"memory://{name}"
    if system.exists(f"/{name}"):
        system.rm(f"/{name}", recursive=True)
