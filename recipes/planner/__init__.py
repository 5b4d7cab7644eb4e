"""What ``plan`` computes with: a model's shape, and its memory, traffic and time on a cluster."""
