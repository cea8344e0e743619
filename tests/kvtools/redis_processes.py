"""Real Redis servers for tests: one, a cluster, and a primary with a replica and a sentinel."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports

redis = pytest.importorskip("redis", reason="redis-py is not installed")
BINARY = shutil.which("redis-server")
_folders = itertools.count()


def wait_until(happens: Callable[[], Any], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(redis.RedisError, OSError):
            if happens():
                return
        assert time.monotonic() < end, f"waited for: {what}"
        time.sleep(0.02)


class Server:
    """A redis-server on a free port, in a folder of its own."""

    def __init__(self, folder: Path, *arguments: str, password: str | None = None) -> None:
        if BINARY is None:
            pytest.skip("redis-server is not installed")
        [self.port] = free_ports(1)
        self.folder = folder / f"redis{next(_folders)}"
        self.folder.mkdir()
        self.password = password
        self.arguments = [*arguments, *(["--requirepass", password] if password else [])]
        self.start()

    def start(self) -> None:
        command = [str(BINARY), *self.arguments, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.folder), "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        atexit.register(self.process.kill)  # A test may fail before anybody stops it.
        wait_until(self.client().ping, f"redis-server at port {self.port} answers")

    def client(self) -> Any:
        return redis.Redis(port=self.port, password=self.password)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Cluster:
    """Three primaries that share the hash slots evenly. One that says nothing for `node_timeout_ms` is given up."""

    def __init__(self, folder: Path, node_timeout_ms: int = 500) -> None:
        arguments = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(node_timeout_ms)]
        arguments += ["--cluster-config-file", "nodes.conf"]
        self.nodes = [Server(folder, *arguments) for _ in range(3)]
        self.ports = [node.port for node in self.nodes]
        ends = [0, 5461, 10923, 16384]
        for number, (node, first, end) in enumerate(zip(self.nodes, ends, ends[1:], strict=False)):
            node.client().execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.client().execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for node in self.nodes[1:]:
            self.nodes[0].client().execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
        self.wait()

    def wait(self) -> None:
        """Until all nodes know that all slots are served."""
        for node in self.nodes:
            info = lambda node=node: node.client().execute_command("CLUSTER", "INFO")  # noqa: E731
            wait_until(lambda info=info: b"cluster_state:ok" in info(), "the cluster is whole")

    def clear(self) -> None:
        for node in self.nodes:
            node.client().flushall()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


class Guarded:
    """A primary and its replica, and a sentinel that knows them as "master"."""

    def __init__(self, folder: Path, password: str | None = None) -> None:
        auth = ["--masterauth", password] if password else []
        auth += ["--repl-diskless-sync-delay", "0"]
        self.servers = [Server(folder, *auth, password=password)]
        primary = self.servers[0].port
        self.servers.append(Server(folder, *auth, "--replicaof", f"127.0.0.1 {primary}", password=password))
        synced = lambda: self.servers[1].client().info("replication")["master_link_status"] == "up"  # noqa: E731
        wait_until(synced, "the replica has what the primary has")
        # Only now: a sentinel asks for replicas when it starts, and ten seconds later.
        config = folder / "sentinel.conf"
        lines = [f"sentinel monitor master 127.0.0.1 {primary} 1", "sentinel down-after-milliseconds master 60000"]
        lines += ["sentinel failover-timeout master 2000"]
        lines += [f"sentinel auth-pass master {password}"] if password else []
        config.write_text("\n".join(lines) + "\n")
        self.sentinel = Server(folder, str(config), "--sentinel")
        wait_until(lambda: len(self.sentinel.client().sentinel_slaves("master")) == 1, "the sentinel sees the replica")

    def fail_over(self) -> None:
        """Has the replica take over, as soon as the sentinel knows enough of it."""

        ask = self.sentinel.client().execute_command
        wait_until(lambda: ask("SENTINEL", "FAILOVER", "master"), "the sentinel has the replica take over")

    def primary(self) -> int:
        """The port of the primary, as the sentinel knows it."""
        return int(self.sentinel.client().sentinel_get_master_addr_by_name("master")[1])

    def stop(self) -> None:
        for server in (self.sentinel, *self.servers):
            server.stop()
