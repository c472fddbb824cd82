"""Claims about rounding that arithmetic settles: one module for each, with a function of the same name."""
