"""A small server with OpenAI's interface, to try a drafter and to measure it."""
