"""The frozen target: loading, structure, layers, parallel forms, and the verification of drafts."""
