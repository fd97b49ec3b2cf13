"""The decode of items of 64 heads, keys being rows, whose tiles are dealt out among all SMs."""
