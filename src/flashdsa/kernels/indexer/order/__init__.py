"""Sort of each query's list of best rows by score, within the list's own memory."""
