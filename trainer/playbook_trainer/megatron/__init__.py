"""The second backend: the same configuration, run by megatron-core."""
