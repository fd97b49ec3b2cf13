"""The decode of items of 64 heads, which are the rows of its products."""
