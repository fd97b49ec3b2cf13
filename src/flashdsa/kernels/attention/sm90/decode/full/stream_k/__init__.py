"""The decode of items of 64 heads whose tiles are divided among all SMs (stream-K)."""
