"""A Redis server or cluster: its URL, the connection, commands sent many at once, and its errors as ours.

Commands: https://redis.io/docs/latest/commands/.
"""

from __future__ import annotations

import contextlib
import hashlib
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvtools.errors import BadInputError, KvtoolsError, MissingDependencyError, UsageError
from kvtools.url_password import without_password

DEFAULT_PREFIX = "kvtools"
_FORMS = (
    "redis://host:port/database (rediss:// for TLS, redis+cluster:// for a cluster), unix:///path/to/socket or"
    " redis+sentinel://host:port/database?service=NAME"
)
SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel")
PIPELINE = 512  # commands sent at once where they are small
_SOCKET_SECONDS = 60

# Fields and values of a hash are as long as each other, so a bucket travels as one string, not as thousands.
_READ_SCRIPT = "local r = redis.call(ARGV[1], KEYS[1]) return {#r, table.concat(r)}"
_WRITE_SCRIPT = """
local rows, field, value, args, added = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), {}, 0
for i = 1, #rows, field + value do
  args[#args + 1] = string.sub(rows, i, i + field - 1)
  args[#args + 1] = string.sub(rows, i + field, i + field + value - 1)
  if #args >= 4000 then
    added = added + redis.call('HSET', KEYS[1], unpack(args))
    args = {}
  end
end
return added + (#args > 0 and redis.call('HSET', KEYS[1], unpack(args)) or 0)
"""
_scripts: dict[str, str] = {}  # by what EVALSHA calls them


def script(text: str) -> str:
    """Return what EVALSHA calls a script, which `connect` loads, and `run` where a server has begun again since."""
    name = hashlib.sha1(text.encode()).hexdigest()
    _scripts[name] = text
    return name


READ, WRITE = script(_READ_SCRIPT), script(_WRITE_SCRIPT)
LOAD_WRITE = ("SCRIPT LOAD", _WRITE_SCRIPT)


@dataclass(frozen=True)
class Place:
    """A database and a prefix of its keys; `shown` is the URL without a password, for messages.

    With a `service`, the URL is that of a sentinel, which knows the server that is the primary now; `sentinels` are
    others of them, each a host and a port.
    """

    url: str
    prefix: str
    cluster: bool
    shown: str
    service: str = ""
    sentinels: tuple[tuple[str, int], ...] = ()

    def key(self, name: str) -> str:
        """Return one of the keys that there is one of."""
        return f"{self.prefix}:{name}"


def place_of(text: str) -> Place:
    """Return what a URL means.

    Args:
        text: `redis://[user:password@]host[:port][/database]`, `rediss://` for TLS, `unix:///path/to/socket`, and with
            `+cluster` for a cluster, which is found out anyway. `?prefix=NAME` names the keys; the other options are
            those of redis-py. `redis+sentinel://host:26379/0?service=NAME` asks a sentinel for the primary;
            `&sentinels=host:port,host:port` names others of them, `&sentinel_password=` is theirs.

    Raises:
        UsageError: it is no such URL.

    Example:
        >>> place_of("redis://:secret@cache:6379/2?prefix=ads").shown
        'redis://cache:6379/2?prefix=ads'
    """
    doing = "reading a Redis URL"
    try:
        parts = urllib.parse.urlsplit(text)
    except ValueError as error:
        raise UsageError(f"{doing} '{without_password(text)}': {error}; expected redis://host:port/database") from error
    if parts.scheme not in SCHEMES:
        raise UsageError(f"{doing}: got '{without_password(text)}', expected {_FORMS}")
    scheme, _, kind = parts.scheme.partition("+")
    options = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
    prefix = options.pop("prefix", DEFAULT_PREFIX)
    try:
        port = parts.port
    except ValueError as error:
        # What is taken for the port may be part of a password.
        raise UsageError(
            f"{doing}: its port is no number up to 65535; expected redis://host:port/database; in a password"
            " before the host, write / ? # @ as %2F %3F %23 %40"
        ) from error
    where = (
        parts.path if scheme == "unix" else f"{parts.hostname or 'localhost'}{f':{port}' if port else ''}{parts.path}"
    )
    shown = f"{parts.scheme}://{where}" + (f"?prefix={prefix}" if prefix != DEFAULT_PREFIX else "")
    database = options.get("db", parts.path.strip("/") if scheme != "unix" else "")
    if database and not database.isdecimal():
        raise UsageError(f"{doing} '{shown}': got database '{database}', expected a number, as in redis://localhost/0")
    if not prefix or set("{}") & set(prefix):
        raise UsageError(f"{doing} '{shown}': got prefix '{prefix}', expected a name without braces")
    service = ""
    others: tuple[tuple[str, int], ...] = ()
    if kind == "sentinel":
        service = options.pop("service", "")
        if not service:
            raise UsageError(f"{doing} '{shown}': expected the name of the service, as in ?service=mymaster")
        others = tuple(_sentinel(one, f"{doing} '{shown}'") for one in options.pop("sentinels", "").split(",") if one)
    query = f"?{urllib.parse.urlencode(options)}" if options else ""
    return Place(f"{scheme}://{parts.netloc}{parts.path}{query}", prefix, kind == "cluster", shown, service, others)


def connect(place: Place, *, seconds: float | None = None) -> Any:
    """Return a client of the server, or of the cluster that it is part of. `seconds`: how long it may take to connect
    and to answer, if the URL does not say it.

    Raises:
        MissingDependencyError: redis-py is not installed.
        UsageError: the URL has an option that redis-py does not know.
        BadInputError: the server cannot be reached, or refuses the user.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.exceptions import NoPermissionError
        from redis.retry import Retry
    except ImportError as error:
        raise MissingDependencyError(
            f"connecting to '{place.shown}': redis-py is not installed; run pip install 'kvtools[formats]'"
        ) from error
    # Nothing is sent twice: what a command returns says whether a row was there before.
    settings: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "socket_connect_timeout": seconds or 10}
    if "socket_timeout" not in place.url:
        settings["socket_timeout"] = seconds or _SOCKET_SECONDS
    with redis_errors(f"connecting to '{place.shown}'"):
        try:
            client: Any = _primary(place, settings) if place.service else redis.Redis.from_url(place.url, **settings)
            client.ping()
        except TypeError as error:
            raise UsageError(f"connecting to '{place.shown}': {error}; leave the option out of the URL") from error
        cluster = place.cluster
        if not cluster:
            with contextlib.suppress(NoPermissionError):
                cluster = bool(client.info("cluster").get("cluster_enabled"))
        if cluster:
            client.close()
            client = redis.RedisCluster.from_url(place.url, **settings)
        _load_scripts(client)
        return client


def _load_scripts(client: Any) -> None:
    for text in list(_scripts.values()):
        client.script_load(text)


def _primary(place: Place, settings: dict[str, Any]) -> Any:
    """Return a client of the primary of a service; each new connection asks the sentinels which one that is."""
    from redis.connection import parse_url
    from redis.sentinel import Sentinel

    options = {**parse_url(place.url), **settings}
    first = (options.pop("host", "localhost"), options.pop("port", 26379))
    password = options.pop("sentinel_password", None)
    sentinels = Sentinel([first, *place.sentinels], sentinel_kwargs={"password": password, **settings})
    return sentinels.master_for(place.service, **options)


def _sentinel(text: str, doing: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"{doing}: got sentinel '{text}', expected host:port")
    return host, int(port)


@contextlib.contextmanager
def redis_errors(doing: str, kind: type[KvtoolsError] = BadInputError) -> Iterator[None]:
    """Turn what redis-py raises into errors of ours."""
    import redis.exceptions

    try:
        yield
    except redis.exceptions.AuthenticationError as error:
        raise kind(f"{doing}: {error}; put user:password@ before the host in the URL") from error
    except redis.exceptions.NoPermissionError as error:
        raise kind(f"{doing}: {error}; name a user who may run the command") from error
    except redis.exceptions.OutOfMemoryError as error:
        raise kind(f"{doing}: the server is out of memory ({error}); raise its maxmemory, or write less") from error
    except redis.exceptions.ReadOnlyError as error:
        raise kind(f"{doing}: {error}; name the primary, not a replica") from error
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
        raise kind(f"{doing}: {error}; check that the server runs, and the URL") from error
    except redis.exceptions.ResponseError as error:
        advice = "something else has this key: name another prefix" if "WRONGTYPE" in str(error) else "see its log"
        raise kind(f"{doing}: the server answered: {error}; {advice}") from error
    except (redis.exceptions.RedisError, redis.exceptions.RedisClusterException) as error:
        raise kind(f"{doing}: {error}; check that all nodes of the cluster run") from error


def is_refusal(error: KvtoolsError) -> bool:
    """Return whether Redis is there and said no, such as to a user or for a key of another type."""
    from redis.exceptions import (
        AuthenticationError,
        ClusterDownError,
        MasterDownError,
        ResponseError,
        TryAgainError,
    )

    said = isinstance(error.__cause__, (AuthenticationError, ResponseError))
    return said and not isinstance(error.__cause__, (ClusterDownError, MasterDownError, TryAgainError))


def run(
    client: Any,
    commands: Iterable[Sequence[Any]],
    doing: str,
    kind: type[KvtoolsError] = BadInputError,
    *,
    transaction: bool = False,
    wait_once: bool = False,
) -> list[Any]:
    """Send commands at once and return their replies, in order; in a `transaction` they are of one moment.

    redis-py waits for a node of a cluster that does not answer once for each command; with `wait_once` once for all.

    A server that has begun again, and one that has become the primary, has no scripts: they are loaded, and the
    commands that wanted them, which have done nothing, are sent once more (but in a transaction).
    """
    from redis.exceptions import NoScriptError

    commands = list(commands)
    with redis_errors(doing, kind):
        to_nodes = wait_once and type(client).__name__ == "RedisCluster"
        replies = _send_to_nodes(client, commands) if to_nodes else _send(client, commands, transaction)
        if not transaction and (left := [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]):
            _load_scripts(client)
            for i, reply in zip(left, _send(client, [commands[i] for i in left], transaction), strict=True):
                replies[i] = reply
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
    return replies


def _send(client: Any, commands: Sequence[Sequence[Any]], transaction: bool) -> list[Any]:
    pipeline = client.pipeline(transaction=transaction)
    for command in commands:
        pipeline.execute_command(*command)
    replies: list[Any] = pipeline.execute(raise_on_error=False)
    return replies


def _send_to_nodes(client: Any, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Send commands to all nodes of a cluster at once, and those whose slot has moved once more.

    A pipeline would send what a node has not answered once more, too, one command after the other.
    """
    from redis.cluster import PipelineCommand
    from redis.exceptions import AskError, ConnectionError, TimeoutError, TryAgainError

    stack = [PipelineCommand(tuple(command), {}, at) for at, command in enumerate(commands)]
    replies: list[Any] = client.pipeline().send_cluster_commands(stack, raise_on_error=False, allow_redirections=False)
    if any(isinstance(reply, ConnectionError | TimeoutError) for reply in replies):
        client.nodes_manager.initialize()  # another node may have taken over
        return replies
    for at, reply in enumerate(replies):
        if isinstance(reply, AskError | TryAgainError):  # a MovedError is an AskError
            replies[at] = client.execute_command(*commands[at])
    return replies


def batches(count: int) -> Iterator[range]:
    """Yield the numbers below `count` in runs of commands that are sent at once."""
    for start in range(0, count, PIPELINE):
        yield range(start, min(start + PIPELINE, count))


def database_size(client: Any) -> int:
    """Return how many keys there are in a database, on all nodes of a cluster."""
    size = client.dbsize()
    return sum(size.values()) if isinstance(size, dict) else int(size)
