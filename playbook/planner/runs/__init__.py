"""Tables of training runs: read, predicted row by row, and compared with what was measured."""
