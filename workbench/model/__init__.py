"""Predicts a kernel's time from what it moves and computes, and says how wrong it was before."""
