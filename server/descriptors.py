"""Room for connections among the file descriptors that a process may have."""

from __future__ import annotations

import resource

# What a server has open beside its clients' connections: files of tables, logs, sockets of its own.
_OTHERS = 512


def make_room(connections: int, ports: int = 1) -> int:
    """Raise the soft limit of descriptors, as far as the hard one lets it, for `connections` to each of `ports`.

    Returns how many to each there is room for: `connections`, or fewer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return connections
    wanted = connections * ports + _OTHERS
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(connections, (soft - min(_OTHERS, soft // 2)) // ports))
