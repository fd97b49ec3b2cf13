"""The backward over unions of queries: scores through device memory, then two grouped products."""
