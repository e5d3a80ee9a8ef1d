"""Rows on disk -> validated rows -> prompts of token ids, read through an exactly resumable cursor."""
