"""A configuration in the words of other trainers, so that a result can be carried there. Torch-free."""
