"""What makes the tables of a layer, as plain data of its config, and made of it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfplugin.dynamic_embedding.creators import CuckooHashTableCreator
from tfplugin.dynamic_embedding.hkv_table import HkvEvictStrategy, HkvHashTableConfig, HkvHashTableCreator
from tfplugin.dynamic_embedding.rank_part import RankPartCreator
from tfplugin.dynamic_embedding.redis_config import RedisTableConfig
from tfplugin.dynamic_embedding.redis_table import RedisTableCreator

_KIND = "tables"
_BOUNDED = HkvHashTableCreator.__name__
_IN_REDIS = RedisTableCreator.__name__


def creator_config(creator: Any, keep_distribution: bool) -> Any:
    """What a config has of a creator: bounds always, as they are no matter of where rows lie, and where the file is
    that names a Redis server, as the rows stay there.

    The default one is None. Another one is as it is where the layer is to keep it.
    """
    creator = creator.of if isinstance(creator, RankPartCreator) else creator
    if type(creator) is HkvHashTableCreator:
        of = creator.config
        return {_KIND: _BOUNDED, **vars(of), "evict_strategy": of.evict_strategy.name}
    if type(creator) is RedisTableCreator:
        return {_KIND: _IN_REDIS, **vars(creator.config)}
    if not keep_distribution or type(creator) is CuckooHashTableCreator:
        return None
    return creator


def made_of_config(given: Any, deserialize: Any) -> Any:
    """The creator of what `creator_config` gave, after Keras has written and read it; anything else as it is."""
    if not isinstance(given, Mapping) or given.get(_KIND) not in (_BOUNDED, _IN_REDIS):
        return given
    told = {what: value for what, value in given.items() if what != _KIND}
    if given[_KIND] == _IN_REDIS:
        return RedisTableCreator(RedisTableConfig(**told))
    scores = told.get("gen_scores_fn")
    if isinstance(scores, Mapping):
        told["gen_scores_fn"] = deserialize(dict(scores))
    strategy = HkvEvictStrategy[told.pop("evict_strategy")]
    return HkvHashTableCreator(HkvHashTableConfig(evict_strategy=strategy, **told))
