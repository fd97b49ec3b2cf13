"""The last slot of each query's lists that names a row."""
