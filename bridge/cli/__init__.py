"""`python3 -m bridge`: plan a layout without weights, convert checkpoints on disk."""
