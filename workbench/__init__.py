"""Tools that measure, prove or explore flashdsa and ptxemu; no wheel carries them."""
