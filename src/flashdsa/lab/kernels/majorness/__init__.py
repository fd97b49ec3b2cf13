"""dV = S^T dO in two parts, with the operands in every form: the study of seed 001."""
