"""What a connection of the Redis protocol may ask beside rows: what clients say as they begin, and about the tables.

Commands: https://redis.io/docs/latest/commands/. Replies are of RESP 2, or of RESP 3 after HELLO 3. Errors that Redis
has, too, are in its words, since clients look for them; what follows a semicolon is ours.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from kvtools import __version__
from kvtools.errors import BadInputError, KvtoolsError, one_line
from kvtools.server.answer import TableCount
from kvtools.server.observer import Observer
from kvtools.server.request import RequestError
from kvtools.server.resp_tables import RespTable, Tables, answer_command, shown_bytes

_log = logging.getLogger("kvtools.server")
OK = b"+OK\r\n"
_SPOKEN_VERSION = "7.0.0"  # of Redis: clients look what they may ask for
_FIRST = frozenset((b"AUTH", b"CLIENT", b"COMMAND", b"ECHO", b"HELLO", b"PING", b"QUIT", b"RESET"))  # need no key
_KEY = re.compile(rb"-?\d{1,20}")
_CLIENT_NAME = re.compile(rb"[!-~]*")
# Subcommands, with the least and most arguments of each.
_CLIENT = {
    "GETNAME": (0, 0),
    "ID": (0, 0),
    "INFO": (0, 0),
    "LIST": (0, 99),
    "NO-EVICT": (1, 1),
    "NO-TOUCH": (1, 1),
    "SETINFO": (2, 2),
    "SETNAME": (1, 1),
}
_LOOKUPS = frozenset({b"EXISTS", b"HEXISTS", b"MGET"})
_COMMAND = {"COUNT": (0, 0), "DOCS": (0, 9999), "INFO": (0, 9999)}


def error(message: str, kind: str = "ERR") -> bytes:
    r"""Return an error reply.

    >>> error("no such\ntable")
    b'-ERR no such table\r\n'
    """
    return f"-{kind} {one_line(message)}\r\n".encode()


def refusal(problem: KvtoolsError | RequestError) -> bytes:
    """Return the reply that says what is wrong; access that is not given has a kind of its own, as in Redis."""
    if isinstance(problem, RequestError):
        if problem.status == 401:  # its message speaks of headers
            return error("Authentication required.", "NOAUTH")
        return error(problem.message, "NOPERM" if problem.status == 403 else "ERR")
    return error(str(problem))


class RespCommands:
    """Answers the commands of one connection, and keeps what it was told: the table, the protocol, its name.

    Args:
        tables: what there is.
        clients: tells how many connections there are.
        number: of this connection.
        max_keys: how many keys one command may have.
        observer: asked whether the tables may be looked up.

    `headers` are what the client said of itself, as HTTP would have it. `refused` tells why the last command was not
    let in, `looks_up` whether it asks for rows, `counts` what it looked up.
    """

    def __init__(
        self, tables: Tables, clients: Callable[[], int], number: int, max_keys: int, observer: Observer
    ) -> None:
        self.selected: bytes | None = None
        self.resp3 = False
        self.quit = False
        self.headers: dict[str, str] = {}
        self.refused: RequestError | None = None
        self.counts: list[TableCount] = []
        self.looks_up = False
        self._observer = observer
        self._tables = tables
        self._clients = clients
        self._number = number
        self._max_keys = max_keys
        self._name = b""
        self._by_name: dict[bytes, tuple[Callable[[list[bytes]], bytes], int, int]] = {
            b"AUTH": (self._auth, 1, 99),
            b"CLIENT": (self._client, 1, 99),
            b"COMMAND": (self._command, 0, 9999),
            b"CONFIG": (self._config, 1, 99),
            b"DBSIZE": (self._database_size, 0, 0),
            b"ECHO": (lambda words: self.bulk(words[0]), 1, 1),
            b"EXISTS": (self._exists, 1, max_keys),
            b"HELLO": (self._hello, 0, 9),
            b"HEXISTS": (lambda words: self._exists([words[0] + b":" + words[1]]), 2, 2),
            b"HLEN": (self._length, 1, 1),
            b"INFO": (self._info, 0, 9),
            b"MGET": (self._several_tables, 1, max_keys),
            b"PING": (lambda words: self.bulk(words[0]) if words else b"+PONG\r\n", 0, 1),
            b"QUIT": (self._quit, 0, 0),
            b"RESET": (self._reset, 0, 0),
            b"SELECT": (self._select, 1, 1),
        }

    def answer(self, words: list[bytes]) -> bytes:
        """Return the reply to a command."""
        self.refused, self.counts = None, []
        name = words[0].upper()
        self.looks_up = name in _LOOKUPS
        known = self._by_name.get(name)
        if known is None:
            return error(
                f"unknown command '{shown_bytes(words[0])}'; rows are read by GET, MGET, HGET and HMGET, and nothing is"
                " written"
            )
        does, least, most = known
        if not least <= len(words) - 1 <= most:
            return error(f"wrong number of arguments for '{shown_bytes(words[0].lower())}' command")
        try:
            if name not in _FIRST:
                self._observer.authorize(self.headers, ())
            return does(words[1:])
        except (KvtoolsError, RequestError) as problem:
            if isinstance(problem, RequestError):
                self.refused = problem
            return refusal(problem)

    def null(self) -> bytes:
        """Return the reply that means that there is nothing."""
        return b"_\r\n" if self.resp3 else b"$-1\r\n"

    def bulk(self, text: bytes) -> bytes:
        """Return a string as a reply."""
        return b"$%d\r\n%b\r\n" % (len(text), text)

    def mapping(self, items: dict[str, Any]) -> bytes:
        """Return names and values (str, int, or a list of none) as a reply."""
        head = b"%%%d\r\n" % len(items) if self.resp3 else b"*%d\r\n" % (2 * len(items))
        return head + b"".join(self.bulk(name.encode()) + self._value(value) for name, value in items.items())

    def _value(self, value: Any) -> bytes:
        if isinstance(value, int):
            return b":%d\r\n" % value
        return b"*0\r\n" if isinstance(value, list) else self.bulk(str(value).encode())

    def _auth(self, words: list[bytes]) -> bytes:
        """Keep the key that a client gives, `AUTH key` or `AUTH user key`; whether it opens a table, lookups tell."""
        if len(words) > 2:
            return error("syntax error")
        headers = {**self.headers, "authorization": f"Bearer {words[-1].decode('utf-8', 'replace')}"}
        try:
            self._observer.authorize(headers, ())
        except RequestError as problem:
            self.refused = problem
            return error("invalid username-password pair or user is disabled.", "WRONGPASS")
        if len(words) == 1 and self._is_open():
            return error(
                "AUTH <password> called without any password configured for the default user."
                " Are you sure your configuration is correct?"
            )
        self.headers = headers
        return OK

    def _is_open(self) -> bool:
        """Whether who gives no key may ask."""
        try:
            self._observer.authorize({}, ())
        except RequestError:
            return False
        return True

    def _subcommand(self, command: str, words: list[bytes], known: dict[str, tuple[int, int]]) -> tuple[str, bytes]:
        """Return which of the `known` subcommands it is (with the least and most arguments of each), or an error."""
        name = words[0].upper().decode("ascii", "replace")
        if name == "HELP":
            lines = [f"{command.upper()} <subcommand> [<arg> ...]. Subcommands are:", *sorted(known)]
            return "", b"*%d\r\n" % len(lines) + b"".join(b"+%b\r\n" % line.encode() for line in lines)
        if name not in known:
            return "", error(f"unknown subcommand '{shown_bytes(words[0])}'. Try {command.upper()} HELP.")
        least, most = known[name]
        if not least <= len(words) - 1 <= most:
            return "", error(f"wrong number of arguments for '{command}|{name.lower()}' command")
        return name, b""

    def _named(self, name: bytes) -> bytes:
        """Give the connection a name."""
        if not _CLIENT_NAME.fullmatch(name):
            return error("Client names cannot contain spaces, newlines or special characters.")
        self._name = name
        return OK

    def _client(self, words: list[bytes]) -> bytes:
        what, refused = self._subcommand("client", words, _CLIENT)
        if what == "SETNAME":
            return self._named(words[1])
        if what == "GETNAME":
            return self.bulk(self._name) if self._name else self.null()
        if what == "ID":
            return b":%d\r\n" % self._number
        if what in ("INFO", "LIST"):
            return self.bulk(b"id=%d name=%b resp=%d\n" % (self._number, self._name, 3 if self.resp3 else 2))
        return refused or OK  # what clients tell of themselves

    def _command(self, words: list[bytes]) -> bytes:
        if not words:
            return b"*0\r\n"
        what, refused = self._subcommand("command", words, _COMMAND)
        if what == "COUNT":
            return b":%d\r\n" % (len(self._by_name) + 3)
        if what == "DOCS":
            return self.mapping({})
        return refused or b"*%d\r\n" % (len(words) - 1) + self.null() * (len(words) - 1)

    def _config(self, words: list[bytes]) -> bytes:
        if words[0].upper() == b"SET":
            return error("nothing can be set here; see the options of `kvtools serve`")
        what, refused = self._subcommand("config", words, {"GET": (1, 99)})
        if not what:
            return refused
        # What redis-benchmark wants to know.
        known = {"save": "", "appendonly": "no"}
        return self.mapping({name: value for name, value in known.items() if name.encode() in words[1:]})

    def _database_size(self, words: list[bytes]) -> bytes:
        if self.selected is None:
            return b":%d\r\n" % sum(table.stored.schema.rows for table in self._tables.now().values())
        return self._length([self.selected])

    def _exists(self, words: list[bytes]) -> bytes:
        return b":%d\r\n" % sum(reply is not None for reply in self._rows(words))

    def _hello(self, words: list[bytes]) -> bytes:
        if words:
            if not re.fullmatch(rb"-?\d{1,18}", words[0]):
                return error("Protocol version is not an integer or out of range")
            if words[0] not in (b"2", b"3"):
                return error("unsupported protocol version", "NOPROTO")
            options = [word.upper() for word in words[1:]]
            while options:
                if options[0] == b"AUTH" and len(options) >= 3:
                    if (refused := self._auth([words[len(words) - len(options) + 2]])) != OK:
                        return refused
                    options = options[3:]
                elif options[0] == b"SETNAME" and len(options) >= 2:
                    if (refused := self._named(words[len(words) - len(options) + 1])) != OK:
                        return refused
                    options = options[2:]
                else:
                    return error(f"Syntax error in HELLO option '{shown_bytes(options[0])}'")
            self.resp3 = words[0] == b"3"
        said = {"server": "kvtools", "version": _SPOKEN_VERSION, "proto": 3 if self.resp3 else 2}
        return self.mapping({**said, "id": self._number, "mode": "standalone", "role": "master", "modules": []})

    def _info(self, words: list[bytes]) -> bytes:
        sections = {
            "Server": [
                f"redis_version:{_SPOKEN_VERSION}",
                f"kvtools_version:{__version__}",
                "redis_mode:standalone",
            ],
            "Clients": [f"connected_clients:{self._clients()}"],
            "Replication": ["role:master"],
            "Cluster": ["cluster_enabled:0"],
            "Keyspace": [
                f"db{number}:keys={table.stored.schema.rows},expires=0,avg_ttl=0,table={shown_bytes(name)}"
                for number, (name, table) in enumerate(self._tables.now().items())
            ],
        }
        wanted = {word.decode("ascii", "replace").lower() for word in words}
        every = not words or bool(wanted & {"all", "default", "everything"})
        texts = [
            "".join(f"{line}\r\n" for line in (f"# {name}", *lines))
            for name, lines in sections.items()
            if every or name.lower() in wanted
        ]
        return self.bulk("\r\n".join(texts).encode())

    def _length(self, words: list[bytes]) -> bytes:
        return b":%d\r\n" % self._tables.get(words[0], self.selected).stored.schema.rows

    def _several_tables(self, words: list[bytes]) -> bytes:
        """MGET of keys of several tables; that of one never comes here."""
        return b"*%d\r\n" % len(words) + b"".join(self.null() if row is None else row for row in self._rows(words))

    def _quit(self, words: list[bytes]) -> bytes:
        self.quit = True
        return OK

    def _reset(self, words: list[bytes]) -> bytes:
        self.selected, self.resp3, self._name, self.headers = None, False, b"", {}
        return b"+RESET\r\n"

    def _select(self, words: list[bytes]) -> bytes:
        self.selected = self._tables.name_at(words[0])
        return OK

    def _rows(self, words: list[bytes]) -> list[bytes | None]:
        """Return the rows of keys such as `table:17`, each as a reply; None where there is none."""
        by_table: dict[bytes, tuple[list[int], list[int]]] = {}
        for place, word in enumerate(words):
            name, _, key = word.rpartition(b":")
            if not _KEY.fullmatch(key):
                _refuse_key(key)
            places, keys = by_table.setdefault(name, ([], []))
            places.append(place)
            keys.append(int(key))
        rows: list[bytes | None] = [None] * len(words)
        tables = self._tables.get_all(by_table, self.selected)
        for table, (places, keys) in zip(tables, by_table.values(), strict=True):
            wrong = next((key for key in keys if not table.low <= key <= table.high), None)
            if wrong is not None:
                raise BadInputError(
                    f"got key {wrong}, expected {table.stored.schema.key_dtype}: {table.low} to {table.high}"
                )
            self._observer.authorize_model(self.headers, table.model)
            self._observer.authorize(self.headers, (table.name,))
            asked = np.array(keys, np.uint64 if table.low == 0 else np.int64).view(np.int64)
            for place, key in zip(places, asked, strict=True):
                reply, missing = _row_of(table, key, self.resp3)
                rows[place] = None if missing else reply
            absent = sum(rows[place] is None for place in places)
            self.counts.append(TableCount(table.name, len(keys), absent, table.served))
        return rows


def _row_of(table: RespTable, key: np.int64, resp3: bool) -> tuple[bytes, int]:
    """Return the reply for one key, and how many of it have no row; raises `RequestError`."""
    try:
        return answer_command(table.stored, np.array([key]), True, resp3)
    except RequestError:
        raise
    except Exception as problem:  # its message may have a path, which is not for who asks
        _log.error("a lookup of the Redis protocol failed: %s", problem)
        said = f"internal: {type(problem).__name__}; the server's log says more"
        raise RequestError(500, "internal", said) from problem


def _refuse_key(key: bytes) -> NoReturn:
    raise BadInputError(f"got key '{shown_bytes(key)}', expected an integer, as in table:17")
