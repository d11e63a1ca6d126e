"""KV blocks: the pool, and the names under which their contents are found again."""
