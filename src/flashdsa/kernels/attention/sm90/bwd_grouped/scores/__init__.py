"""The first kernel of Hopper's backward: P and dS of every tile, into the workspace."""
