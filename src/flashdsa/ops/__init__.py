"""The operations as torch custom ops, each registered from one table."""
