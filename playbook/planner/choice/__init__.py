"""Which layout to run: every layout of a model on a cluster, those that fit, and the fastest of them."""
