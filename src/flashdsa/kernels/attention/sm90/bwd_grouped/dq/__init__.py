"""dQ = dS K of groups of rows that share a list of keys."""
