"""Where samples come from: one module for each layout of a data set."""
