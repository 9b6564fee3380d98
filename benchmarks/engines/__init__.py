"""Real engines: a client for each, with the program that runs in the engine's own process, and what installs them."""
