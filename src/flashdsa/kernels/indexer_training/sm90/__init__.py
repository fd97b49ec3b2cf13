"""Training of the indexer on Hopper GPUs."""
