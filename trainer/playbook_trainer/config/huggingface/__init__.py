"""A model's `config.json` as this trainer's configuration."""
