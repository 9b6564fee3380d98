"""Real engines that serve exported drafters: a client for each, and the program that runs in the engine's own process."""

import helpers  # noqa: F401  # makes the clone's own packages importable
