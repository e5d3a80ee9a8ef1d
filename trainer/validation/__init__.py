"""Accuracy over time, and whether the reward says anything."""
