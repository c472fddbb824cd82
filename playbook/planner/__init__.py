"""Arithmetic of models and layouts: shapes, rules, memory, work and traffic. Torch-free."""
