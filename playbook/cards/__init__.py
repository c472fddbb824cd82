"""Cards: the model, loading with checks, scopes, and search."""
