"""A judge model behind an OpenAI-compatible chat endpoint: what is asked, how, and what its reply means."""
