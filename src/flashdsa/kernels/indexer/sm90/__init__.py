"""The indexer on Hopper."""
