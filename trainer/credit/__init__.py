"""Room 4: from scores to advantages: correction, masks, normalisation, KL, estimators, weights."""
