"""The training unroll of a drafter over a text, and replay, which gives the acceptance length without decoding."""
