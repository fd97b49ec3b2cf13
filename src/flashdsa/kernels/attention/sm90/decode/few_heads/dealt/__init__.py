"""The decode of items of 16 or 32 heads whose tiles are dealt out among all SMs."""
