"""Device memory: copies between host and GPU memory, and cuFile."""
