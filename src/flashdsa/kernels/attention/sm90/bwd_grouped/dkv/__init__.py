"""dKV += P^T dO and dS^T Q of groups of rows that share a list of keys."""
