"""The models on megatron-core's layers."""
