"""Networks in shards, and processes that are lost."""
