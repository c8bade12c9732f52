"""How Valkey's own eviction is best steered: traces replayed against a real, small server."""
