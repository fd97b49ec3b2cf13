"""The keys of listed blocks, as bits."""
