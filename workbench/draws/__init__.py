"""Shapes drawn from a written distribution, timed beside every peer, and their report."""
