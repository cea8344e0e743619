"""Where the Redis server of a table is, and how the table lies there: the JSON file that `RedisTableConfig` names."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from kvtools.dialects.tfra_redis_layout import HASH_SLOTS

_log = logging.getLogger("tfplugin")

#: The environment variable with the path of the configuration.
CONFIG_VARIABLE = "TFRA_REDIS_CONFIG_PATH"
CLUSTER, SENTINEL, ONE_SERVER = 0, 1, 2
_MODES = {CLUSTER: "a cluster", SENTINEL: "sentinels", ONE_SERVER: "one server"}
#: What a configuration may say, and what is so where it does not. Times are in milliseconds.
DEFAULTS: dict[str, Any] = {
    # A server that is no sentinel is taken for the one to use, as in ONE_SERVER.
    "redis_connection_mode": SENTINEL,
    "redis_master_name": "master",
    "redis_host_ip": ["127.0.0.1"],
    "redis_host_port": [6379],
    "redis_user": "default",
    "redis_password": "",
    "redis_db": 0,
    "redis_connect_keep_alive": False,
    "redis_connect_timeout": 1000,
    "redis_socket_timeout": 1000,
    "redis_conn_pool_size": 20,
    "redis_wait_timeout": 100000000,
    "redis_sentinel_user": "default",
    "redis_sentinel_password": "",
    "redis_sentinel_connect_timeout": 1000,
    "redis_sentinel_socket_timeout": 1000,
    "storage_slice": 1,
    "using_hash_storage_slice": False,
    "keys_sending_size": 1024,
    "using_md5_prefix_name": False,
    "model_tag_runtime": "test",
    "redis_hash_tags_runtime": [],
    # Of a file that says nothing of it: rows stay for good.
    "expire_model_tag_in_seconds": -1,
}
#: What is accepted and does nothing.
NOT_USED: dict[str, Any] = {
    "redis_connection_lifetime": 100,
    "redis_hash_tags_hypodispersion": False,
    "model_lib_abs_dir": "/tmp/",
    "redis_read_access_slave": False,
    "table_store_mode": 2,
    "model_tag_import": "",
    "storage_slice_import": -1,
    "redis_hash_tags_import": [],
}
#: What there is instead of some of it.
_INSTEAD = {
    "redis_read_access_slave": "rows are read from the primary, which has the latest",
    "table_store_mode": "rows stay in the server and are in no checkpoint: save_to_file_system writes them to files",
    "model_tag_import": "rows of another model tag are not copied: export them there and upsert them here",
    "storage_slice_import": "rows are not moved to another number of slices: export them there and upsert them here",
    "redis_hash_tags_import": "rows are not moved to other hash tags: export them there and upsert them here",
}
_KINDS = {int: "a whole number", str: "a string", bool: "true or false"}
_LISTS = ("redis_host_ip", "redis_host_port", "redis_hash_tags_runtime", "redis_hash_tags_import")


class RedisTableConfig:
    """Where a Redis server is, by a JSON file.

    Args:
      redis_config_abs_dir: path of the file.
      redis_config_abs_dir_env: name of the environment variable that has the path. Default: the variable
        ``TFRA_REDIS_CONFIG_PATH`` if it is set, before `redis_config_abs_dir`.
    """

    def __init__(self, redis_config_abs_dir: str | None = None, redis_config_abs_dir_env: str | None = None) -> None:
        self.redis_config_abs_dir = redis_config_abs_dir
        self.redis_config_abs_dir_env = redis_config_abs_dir_env

    def parameters(self) -> dict[str, Any]:
        """What the file says, with `DEFAULTS`. Without a file: a server at 127.0.0.1:6379.

        Raises:
          ValueError: there is no such file or environment variable, or it is no JSON object, or one of its parameters
            makes no sense.
        """
        variable = self.redis_config_abs_dir_env
        if variable and variable not in os.environ:
            raise ValueError(f"RedisTableConfig: the environment variable {variable} is not set: set it to a path.")
        path = os.environ.get(variable or CONFIG_VARIABLE) or self.redis_config_abs_dir
        if path is None:
            return dict(DEFAULTS)
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"RedisTableConfig: cannot read '{path}': {error}.") from error
        if not isinstance(given, dict):
            raise ValueError(f"RedisTableConfig: '{path}' must be a JSON object, got a {type(given).__name__}.")
        return _checked(given, path)


def _checked(given: dict[str, Any], path: str) -> dict[str, Any]:
    found = dict(DEFAULTS)
    for name, value in given.items():
        expected = {**DEFAULTS, **NOT_USED}.get(name)
        if expected is None:
            _log.warning("RedisTableConfig: '%s' has %s, which is no parameter: it is not used.", path, name)
            continue
        kind: type = str if name.endswith(("_ip", "runtime", "import")) and name in _LISTS else type(expected)
        kind = int if name == "redis_host_port" else kind
        values = value if name in _LISTS and isinstance(value, list) else [value]
        if any(type(one) is not kind for one in values) or (name in _LISTS and not values and "tags" not in name):
            shown = "another value" if "password" in name else repr(value)
            several = " or a list of such" if name in _LISTS else ""
            raise ValueError(f"RedisTableConfig: '{path}': {name} must be {_KINDS[kind]}{several}, got {shown}.")
        if name in NOT_USED:
            if name in _INSTEAD and value != expected:
                _log.warning("RedisTableConfig: '%s': %s is not used: %s.", path, name, _INSTEAD[name])
            continue
        found[name] = values if name in _LISTS else value
    hosts, ports = found["redis_host_ip"], found["redis_host_port"]
    if len(ports) == 1:
        found["redis_host_port"] = ports = ports * len(hosts)
    tags, slices = found["redis_hash_tags_runtime"], found["storage_slice"]
    for wrong, message in (
        (found["redis_connection_mode"] not in _MODES, f"redis_connection_mode must be one of {_MODES}"),
        (len(hosts) != len(ports), f"{len(hosts)} redis_host_ip and {len(ports)} redis_host_port: give as many"),
        (any(not 0 < port < 1 << 16 for port in ports), "redis_host_port must be from 1 to 65535"),
        (not 0 < slices <= HASH_SLOTS, f"storage_slice must be from 1 to {HASH_SLOTS}"),
        (found["keys_sending_size"] < 1, "keys_sending_size must be 1 or more"),
        (len(tags) not in (0, slices), f"{len(tags)} redis_hash_tags_runtime for {slices} slices: give as many"),
        (len(set(tags)) != len(tags), "two of redis_hash_tags_runtime are the same"),
    ):
        if wrong:
            raise ValueError(f"RedisTableConfig: '{path}': {message}.")
    return found
