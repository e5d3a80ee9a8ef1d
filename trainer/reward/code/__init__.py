"""Programs of a model, run where they can harm nobody, and judged where they cannot interfere."""
