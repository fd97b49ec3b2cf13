"""The indexer over shared keys: tiles of queries against all their keys, ranked by the same CTA."""
