"""The commands of `python -m workbench`, one file each."""
