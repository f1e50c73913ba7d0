"""What a run compares: our writers and other projects' save and restore."""
