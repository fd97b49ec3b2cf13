"""The indexer's scores at the slots of each query."""
