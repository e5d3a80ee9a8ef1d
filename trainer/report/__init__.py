"""What a run shows: metrics, curves, console, dumps."""
