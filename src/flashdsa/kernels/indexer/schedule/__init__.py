"""Which CTA gets which pages of which rows; the same on every architecture."""
