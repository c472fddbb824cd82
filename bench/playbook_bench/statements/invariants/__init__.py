"""Rules that the harness or the trainer keeps, each shown where it would break: one module for each, with a function of the same name."""
