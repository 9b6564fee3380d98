"""Pages about runs: one HTML file each, with its data, its charts and its script inside, which opens without a network."""
