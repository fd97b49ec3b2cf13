"""PTX text to abstract syntax: no semantics."""
