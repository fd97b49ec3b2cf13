"""The decode of items of 16 heads, which are the columns of its products."""
