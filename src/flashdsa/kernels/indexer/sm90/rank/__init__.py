"""The exact best of each row of scores."""
