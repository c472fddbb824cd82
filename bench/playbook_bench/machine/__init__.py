"""What machine this is, and what it does while runs last."""
