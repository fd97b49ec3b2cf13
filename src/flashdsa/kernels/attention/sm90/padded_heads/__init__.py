"""Operands of the backward with more heads than they have, in one launch."""
