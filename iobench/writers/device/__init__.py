"""Device memory: copies between host and GPU, and cuFile."""
