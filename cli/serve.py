"""`kvtools serve`: embedding lookups over HTTP."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from kvtools.cli.options import AsJson, Source
from kvtools.cli.shared_options import shared
from kvtools.dialects.detect import dialect_named
from kvtools.errors import UsageError
from kvtools.server.settings import Settings
from kvtools.server.sources import MODEL_NAME, ModelSource
from kvtools.server.version_policy import VersionPolicy

_NAMED = re.compile(r"([A-Za-z][A-Za-z0-9_.-]*)=(.+)")
_DEFAULTS = Settings()
_MODEL_NAME = "default"
_LONGEST = 1e6  # s: gRPC counts milliseconds, in 32 bits
_Missing = Literal["zeros", "default", "error"]


def run(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=]PATH...",
            help="A model: a checkpoint of any dialect, an exported SavedModel, a snapshot, or a folder of numbered"
            " versions of one. Several need names.",
            show_default=False,
        ),
    ] = None,
    *,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 for all.", envvar="KVTOOLS_SERVE_HOST")
    ] = _DEFAULTS.host,
    port: Annotated[
        int, typer.Option(help="The port to listen on; 0 picks a free one.", envvar="KVTOOLS_SERVE_PORT")
    ] = _DEFAULTS.port,
    grpc_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="A port for gRPC, too: TensorFlow Serving's and KServe's services; 8500 is the usual one.",
            envvar="KVTOOLS_SERVE_GRPC_PORT",
        ),
    ] = None,
    resp_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="A port for the Redis protocol, too: GET, MGET, HGET, HMGET.",
            envvar="KVTOOLS_SERVE_RESP_PORT",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A Redis to look keys up in that PATH has not; without PATH, all keys: redis://host:6379/0.",
            envvar="KVTOOLS_SERVE_BACKEND",
        ),
    ] = None,
    backend_down: Annotated[
        str,
        typer.Option(help="What keys give that only the backend could have, while it does not answer: error, missing."),
    ] = "error",
    rows_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[,URL...]",
            help="Of a model in two halves, take the rows from this kvtools serve, or these replicas. May be repeated,"
            " for each shard in order.",
        ),
    ] = None,
    rows_from_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Certificates in PEM to trust at --rows-from https://..., in place of the system's.",
            envvar="KVTOOLS_SERVE_ROWS_FROM_CA",
        ),
    ] = None,
    model_name: Annotated[str, typer.Option(metavar="NAME", help="The name of a single model.")] = _MODEL_NAME,
    follow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]CHAIN",
            help="A folder of checkpoints and increments, as tfplugin.CheckpointManager writes them: serve the newest,"
            " and each increment as soon as it is there. May be repeated.",
        ),
    ] = None,
    poll: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Look for new versions this often, and serve them; otherwise at SIGHUP only, and into chains every 0.1"
            " s.",
            envvar="KVTOOLS_SERVE_POLL",
        ),
    ] = None,
    versions: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME:]POLICY",
            help="Which versions to serve: 'latest', 'latest 3', 'all', or numbers such as 3,7. May be repeated for"
            " several models.",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME:]LABEL=VERSION",
            help="Another name of a version, such as stable=7, which is served as long as it has it. May be repeated.",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Begin without a version and wait for the first; otherwise it is an error.")
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where to keep the snapshots that are made of anything else; KVTOOLS_CACHE_DIR or the user's cache.",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Compare all checksums: nothing is answered before what it is made of was compared.")
    ] = True,
    admin: Annotated[
        bool, typer.Option("--admin", help="Let requests change labels and models; whoever reaches the port may.")
    ] = False,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Who may ask: names, keys and what each opens, in TOML. KVTOOLS_SERVE_API_KEY is one key for all.",
            envvar="KVTOOLS_SERVE_API_KEYS",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A certificate in PEM: every port speaks TLS.", envvar="KVTOOLS_SERVE_TLS_CERT"
        ),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The key to it.", envvar="KVTOOLS_SERVE_TLS_KEY")
    ] = None,
    access_log: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write a line of JSON for each request; - is standard output.",
            envvar="KVTOOLS_SERVE_ACCESS_LOG",
        ),
    ] = None,
    page: Annotated[bool, typer.Option(help="Answer / with a page for people, and nearest neighbours.")] = True,
    workers: Annotated[
        int, typer.Option(metavar="N", help="How many processes answer.", envvar="KVTOOLS_SERVE_WORKERS")
    ] = _DEFAULTS.workers,
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="What requests in hand get to end at SIGTERM.",
            envvar="KVTOOLS_SERVE_GRACE",
        ),
    ] = _DEFAULTS.grace,
    missing: Annotated[
        str, typer.Option(metavar="|".join(get_args(_Missing)), help="What a key without a row gets.")
    ] = _DEFAULTS.missing,
    max_keys: Annotated[int, typer.Option(help="The most keys that one request may ask for.")] = _DEFAULTS.max_keys,
    max_values: Annotated[
        int, typer.Option(help="The most numbers, keys times row width, that one answer may have.")
    ] = _DEFAULTS.max_values,
    max_body_bytes: Annotated[
        int | None, typer.Option(help="The longest body of a request; by default what --max-keys keys take.")
    ] = None,
    max_connections: Annotated[
        int, typer.Option(help="The most connections at once, of each worker.")
    ] = _DEFAULTS.max_connections,
    max_concurrent: Annotated[
        int, typer.Option(help="The most large lookups at once, of each worker; beyond: 429 and Retry-After.")
    ] = _DEFAULTS.max_concurrent,
    header_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a request's headers may take.")
    ] = _DEFAULTS.header_timeout,
    body_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a request's body may take.")
    ] = _DEFAULTS.body_timeout,
    keep_alive: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long an idle connection is kept.")
    ] = _DEFAULTS.keep_alive,
    spin_us: Annotated[
        float | None,
        typer.Option(
            metavar="MICROSECONDS",
            help="How long to look for the next lookup before sleeping, for the lowest latency; takes a CPU meanwhile."
            " Not given: 100, while lookups do come so soon and nobody else wants the CPU. 0: sleep at once.",
            envvar="KVTOOLS_SERVE_SPIN_US",
        ),
    ] = None,
    as_json: AsJson = False,
    source: Source,
) -> None:
    """Answer embedding lookups over HTTP, from a checkpoint of any dialect or an exported SavedModel.

    The rows stay in the files, memory-mapped. SIGTERM ends the server when the requests in hand are answered; SIGHUP
    has it look for new versions.

    \b
    Examples:
      kvtools serve exported
      kvtools serve models/ctr --poll 10 --label stable=20260101
      kvtools serve ctr=models/ctr cvr=models/cvr --poll 10 --versions "ctr:latest 2"
      kvtools serve saved_models/ranker --grpc-port 8500
      kvtools serve --follow training/run7
      kvtools serve split_models/ranker --rows-from http://rows.example:8501
      kvtools serve --backend redis://cache:6379/0
      kvtools serve model.ckpt-100 --host 0.0.0.0 --port 8080 --workers 4 --grace 20
      curl -d '{"keys": [17, -3]}' http://127.0.0.1:8501/v1/tables/user_emb:lookup
    """
    if backend is not None:
        from kvtools.dialects.redis_server import place_of

        place_of(backend)  # what is no URL of a Redis is told at once
    if not MODEL_NAME.fullmatch(model_name):
        raise UsageError(f"serving: got --model-name '{model_name}', expected letters, digits and any of _ . -")
    chains = _chains(follow or [], model_name)
    if not paths and not chains:
        if backend is None:
            raise UsageError("serving: got no PATH, no --backend and no --follow, expected one of them")
        paths = [backend]
    paths = paths or []
    doing = f"serving '{paths[0] if paths else chains[0][1]}'"
    shards = tuple(tuple(url.strip() for url in shard.split(",")) for shard in rows_from or ())
    if shards:
        from kvtools.client import Client

        Client(shards=shards).close()  # what is no URL is told at once
    if rows_from_ca is not None:
        if not any(url.lower().startswith("https://") for shard in shards for url in shard):
            raise UsageError(f"{doing}: got --rows-from-ca and no --rows-from https://..., expected both or none")
        from kvtools.client.construction import context_of

        context_of(rows_from_ca, doing, "--rows-from-ca ")
    if backend is not None and len(paths) > 1:
        raise UsageError(
            f"{doing}: got {len(paths)} models and a --backend, expected one model: each table is there once"
        )
    if chains and (backend is not None or shards):
        raise UsageError(
            f"{doing}: got --follow and {'--backend' if backend is not None else '--rows-from'}, expected one of them:"
            " a chain has all rows of its model, and no dense part that another process could run"
        )
    if backend_down not in ("error", "missing"):
        raise UsageError(f"{doing}: got --backend-down {backend_down}, expected error or missing")
    _check_range(doing, "--port", port, 0, 65535)
    _check_range(doing, "--grpc-port", grpc_port, 0, 65535)
    _check_range(doing, "--resp-port", resp_port, 0, 65535)
    _check_apart(doing, {"--port": port, "--grpc-port": grpc_port, "--resp-port": resp_port})
    for option, value in {
        "--max-keys": max_keys,
        "--max-values": max_values,
        "--max-body-bytes": max_body_bytes,
        "--max-connections": max_connections,
        "--max-concurrent": max_concurrent,
        "--workers": workers,
    }.items():
        _check_range(doing, option, value, 1, None)
    _check_range(doing, "--grace", grace, 0, _LONGEST)
    if spin_us is not None:
        _check_range(doing, "--spin-us", spin_us, 0, 1e6)
    for option, seconds in {
        "--poll": poll,
        "--header-timeout": header_timeout,
        "--body-timeout": body_timeout,
        "--keep-alive": keep_alive,
    }.items():
        _check_range(doing, option, seconds, 0.05, _LONGEST)
    if missing not in get_args(_Missing):
        raise UsageError(f"{doing}: got --missing {missing}, expected {', '.join(get_args(_Missing))}")
    settings = Settings(
        host=host,
        port=port,
        grpc_port=grpc_port,
        resp_port=resp_port,
        max_keys=max_keys,
        max_values=max_values,
        max_body_bytes=max_body_bytes,
        max_connections=max_connections,
        max_concurrent=max_concurrent,
        header_timeout=header_timeout,
        body_timeout=body_timeout,
        keep_alive=keep_alive,
        spin=None if spin_us is None else spin_us / 1e6,
        grace=grace,
        missing=missing,  # type: ignore[arg-type]
        backend=backend,
        rows_from=shards,
        rows_from_ca=rows_from_ca,
        backend_down=backend_down,  # type: ignore[arg-type]
        workers=workers,
        poll=poll,
        follow=chains,
        wait=wait,
        cache=cache,
        verify=verify,
        admin=admin,
        api_keys=api_keys,
        tls_cert=tls_cert,
        tls_key=tls_key,
        access_log=access_log,
        page=page,
    )
    if source.dialect is not None:
        dialect_named(source.dialect)  # a misspelt one is bad usage, not a model that cannot be loaded
    unnamed = any(name == model_name for name, _ in chains)
    sources = _sources(paths, model_name, versions or [], label or [], unnamed) if paths else []
    if not paths and (versions or label):
        raise UsageError(
            f"{doing}: got --{'versions' if versions else 'label'}, and a chain has one version: the newest"
        )
    for name, path in chains:
        if any(source.name == name for source in sources):
            raise UsageError(f"{doing}: got two models called '{name}'; write --follow NAME={path}")
    from kvtools.server.run import serve

    if status := serve(sources, settings, source.options(), as_json=as_json, quiet=shared().quiet):
        raise typer.Exit(status)


def _chains(texts: Sequence[str], model_name: str) -> tuple[tuple[str, str], ...]:
    """Return names and folders of the chains to follow; raises `UsageError` for what is none, or named twice."""
    from kvtools.follow import expect_folder

    chains: dict[str, str] = {}
    for text in texts:
        named = None if Path(text).exists() else _NAMED.fullmatch(text)
        name, path = (named[1], named[2]) if named else (model_name, text)
        if "://" not in path:
            expect_folder(Path(path))
        if "://" in path or Path(path).is_file():
            raise UsageError(f"following '{path}': expected a folder of checkpoints and increments; see docs/chain.md")
        if name in chains:
            raise UsageError(f"following '{path}': got two models called '{name}'; write --follow NAME={path}")
        chains[name] = path
    return tuple(chains.items())


def _check_apart(doing: str, ports: dict[str, int | None]) -> None:
    """Every protocol has a port of its own: two on one would take each other's connections."""
    options: dict[int, str] = {}
    for option, port in ports.items():
        if not port:  # 0: any free one
            continue
        if port in options:
            raise UsageError(f"{doing}: got {options[port]} {port} and {option} {port}, expected a port for each")
        options[port] = option


def _sources(
    paths: Sequence[str], model_name: str, versions: Sequence[str], labels: Sequence[str], unnamed: bool
) -> list[ModelSource]:
    named: dict[str, str] = {}
    for path in paths:
        found = None if Path(path).exists() else _NAMED.fullmatch(path)
        if not found:
            _check_path(path, versions)
        unnamed = unnamed or not found
        name, where = (found[1], found[2]) if found else (model_name, path)
        if name in named:
            raise UsageError(
                f"serving '{path}': there are two models of the name '{name}'; write NAME=PATH, each with its own name"
            )
        named[name] = where
    if model_name != _MODEL_NAME and not unnamed:
        raise UsageError(f"got --model-name {model_name} and {paths[0]}, which has a name; expected one of both")
    policies: dict[str, VersionPolicy] = {}
    for text in versions:
        name, policy = _of_model(text, named, "--versions", "latest 2")
        if name in policies:
            raise UsageError(f"got --versions twice for model '{name}', expected it once; several numbers as in 3,7")
        policies[name] = VersionPolicy.parse(policy)
    numbers: dict[str, dict[str, int]] = {name: {} for name in named}
    for text in labels:
        name, assigned = _of_model(text, named, "--label", "stable=7")
        label, _, number = assigned.partition("=")
        if not label or not number.isdecimal():
            raise UsageError(f"got --label {text!r}, expected a label and a number, such as stable=7")
        if numbers[name].setdefault(label, int(number)) != int(number):
            raise UsageError(
                f"got --label {label} of version {numbers[name][label]} and of {number}, expected one version for it"
            )
    return [ModelSource(name, path, policies.get(name, VersionPolicy()), numbers[name]) for name, path in named.items()]


def _check_path(path: str, versions: Sequence[str]) -> None:
    """Raise `UsageError` for what was meant to be something else than a path."""
    if Path(path).exists():
        return
    name, equals, where = path.partition("=")
    if equals and "://" not in name and Path(where).exists():
        raise UsageError(
            f"serving '{path}': got the name '{name}', expected a letter, then letters, digits and any of _ . -"
        )
    if path.isdecimal() and any(text.endswith("latest") for text in versions):
        raise UsageError(f"got --versions latest and a path '{path}'; write --versions 'latest {path}', in quotes")


def _of_model(text: str, models: Sequence[str] | dict[str, str], option: str, example: str) -> tuple[str, str]:
    name, colon, rest = text.partition(":")
    if colon and name in models:
        return name, rest
    if len(models) == 1 and not colon:
        return next(iter(models)), text
    raise UsageError(
        f"got {option} {text!r}, expected the name of a model before it, such as {next(iter(models))}:{example}"
    )


def _check_range(doing: str, option: str, value: float | None, lowest: float, highest: float | None) -> None:
    if value is not None and not (lowest <= value and (highest is None or value <= highest)):
        expected = f"{lowest:g} or more" if highest is None else f"{lowest:g} to {highest:g}"
        raise UsageError(f"{doing}: got {option} {value:g}, expected {expected}")
