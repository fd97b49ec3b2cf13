"""Other libraries' calls, served by flashdsa: a module each, with their names, order and defaults.

An argument that cannot be honoured raises `UnsupportedError`, which names it. No library is
imported.
"""
