"""The decode of items of 16 or 32 heads whose tiles are divided among all SMs (stream-K)."""
