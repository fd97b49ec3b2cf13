"""The fp8 indexer: scores of every key and the exact best of them, in one launch."""
