"""Weights and configuration in the files of Hugging Face transformers."""
