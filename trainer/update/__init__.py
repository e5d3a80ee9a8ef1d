"""Room 5: what is minimised, and the models it moves."""
