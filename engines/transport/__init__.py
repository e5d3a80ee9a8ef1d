"""How bytes travel from a training rank to rollout processes. One small module per medium."""
