"""Numbers as the hardware rounds and encodes them, vectorised over lanes; knows nothing of PTX."""
