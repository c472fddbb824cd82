"""Hardware as a question names it: a kind of GPU, a calibration or a hardware file, and the network between nodes."""
