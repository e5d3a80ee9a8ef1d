"""Room 2: prompts go out to the replicas, samples come back, in turn with the updates or ahead of them."""
