"""What every floor stands on: files, devices, the KV cache, trees, sampling and acceptance rules. It knows no target and no head."""
