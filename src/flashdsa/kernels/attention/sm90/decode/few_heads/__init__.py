"""The decode of items of 16 or 32 heads, which are the columns of its products."""
