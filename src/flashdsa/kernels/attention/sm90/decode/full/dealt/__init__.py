"""The decode of items of 64 heads whose tiles are dealt out among all SMs."""
