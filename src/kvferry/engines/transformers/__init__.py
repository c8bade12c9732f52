"""A persistent prefix cache for users of ``generate()``."""

from kvferry.engines.transformers.prefix import PrefixCache, PrefixStatistics

__all__ = ["PrefixCache", "PrefixStatistics"]
