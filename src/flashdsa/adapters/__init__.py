"""Other libraries' calls, served by flashdsa: a module each, with their names, order and defaults.

What cannot be honoured raises `UnsupportedError`, which names the argument. No library is imported.
"""
