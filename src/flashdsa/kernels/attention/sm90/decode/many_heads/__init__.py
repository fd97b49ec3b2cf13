"""The Hopper decode of packed rows of 64 heads, a CTA each: keys, and dims, are the rows."""
