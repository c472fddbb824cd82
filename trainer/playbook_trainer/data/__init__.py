"""What the model reads: real text and real images, decoded in worker processes, in an order that no layout changes."""
