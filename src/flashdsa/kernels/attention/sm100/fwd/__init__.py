"""The Blackwell forward: a pair of CTAs takes 128 rows of Q."""
