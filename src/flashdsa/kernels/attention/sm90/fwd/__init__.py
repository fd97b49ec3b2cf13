"""The forward: O and lse of sparse MLA."""
