"""What TFRA calls tables of slots and of status where it has other names for them than this package.

Regular expressions for whole names that have "/" as "_", as files and hashes in Redis do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvtools.status_names import status_of


def slot_names(variable: str, lookups: Iterable[str], slot: str) -> str:
    """Names of a slot under optimizers of Keras: TFRA calls it by the lookup that trains; "" if there are no lookups.

    >>> slot_names("tower/user", ["look", "users-shadow"], "m")
    'tower_user_(?:DynamicEmbedding_)?(?:look|users\\\\-shadow)_m'
    """
    # Those of a Keras layer are in a name scope of its class.
    names = "|".join(re.escape(lookup.replace("/", "_")) for lookup in lookups)
    return f"{_base(variable)}_(?:DynamicEmbedding_)?(?:{names})_{re.escape(slot)}" if names else ""


def status_names(name: str) -> str:
    """Names of the status that is called `name` here: without ``status`` in eager mode, and in scopes with theirs.

    "" where it is the name of no status.

    >>> status_names("status/tower/user/frequency")
    '(?:(?:.+_)?status(?:_\\\\d+)?_)?tower_user_frequency'
    """
    status = status_of(name)
    return "" if status is None else rf"(?:(?:.+_)?status(?:_\d+)?_)?{_base(status[0])}_{status[1]}"


def _base(variable: str) -> str:
    return re.escape(variable.replace("/", "_"))
