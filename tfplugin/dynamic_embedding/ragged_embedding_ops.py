"""``tfra.dynamic_embedding.ragged_embedding_ops``: the pooled lookups, which take RaggedTensors as they take others."""

from tfplugin.dynamic_embedding.embedding_lookup import embedding_lookup_sparse, safe_embedding_lookup_sparse

__all__ = ["embedding_lookup_sparse", "safe_embedding_lookup_sparse"]
