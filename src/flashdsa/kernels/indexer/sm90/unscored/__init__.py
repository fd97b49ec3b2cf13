"""The ids of rows that need no scores."""
