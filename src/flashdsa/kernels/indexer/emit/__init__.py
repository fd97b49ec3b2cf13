"""Output of the winners' ids."""
