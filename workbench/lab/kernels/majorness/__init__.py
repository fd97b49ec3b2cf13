"""dV = S^T dO in two parts, with the operands in every form."""
