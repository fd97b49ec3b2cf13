"""The ids of the winners into the output."""
