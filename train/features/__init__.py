"""The outputs of the target that a drafter learns from: computed here, stored, or fetched from an engine."""
