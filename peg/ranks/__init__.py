"""All that lives on a rank's thread: communicators, cache, step inputs, sampling, the rank and its group."""
