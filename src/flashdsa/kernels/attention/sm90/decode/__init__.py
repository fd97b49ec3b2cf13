"""Sparse decode for Hopper: few queries, a query's slots shared out over the CTAs of a cluster."""
