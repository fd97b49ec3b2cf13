"""One list of ids from lists over two sources."""
