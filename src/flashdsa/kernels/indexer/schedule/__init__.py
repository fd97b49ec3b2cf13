"""Assignment of rows' pages to CTAs; the same on every architecture."""
