"""Model architectures: what their weights are, and their forward pass over one flat hybrid batch."""
