"""Parts of the decodes that have keys as rows of their products, of few heads and of many."""
