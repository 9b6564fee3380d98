"""Training of drafters: conversations to batches, target outputs to losses, and the loop."""
