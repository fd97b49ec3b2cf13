"""Common parts of both decodes: the CTAs of a cluster, their slots, and the sum of their O."""
