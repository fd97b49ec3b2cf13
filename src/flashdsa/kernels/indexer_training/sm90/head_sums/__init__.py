"""The attention's target and the indexer's scores: sums over heads at the slots of each query."""
