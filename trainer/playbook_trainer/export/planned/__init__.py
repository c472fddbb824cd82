"""Plans in the words of trainers: what is started, not what was configured."""
