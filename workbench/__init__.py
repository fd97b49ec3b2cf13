"""What measures, proves or explores flashdsa and ptxemu; no wheel carries it."""
