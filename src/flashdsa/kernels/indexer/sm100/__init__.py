"""The indexer for Blackwell (sm_100a)."""
