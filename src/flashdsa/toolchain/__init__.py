"""NVIDIA's own tools as programs: the assembler ptxas and the disassembler nvdisasm."""
