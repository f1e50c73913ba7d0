"""Writers: a file image to storage and back, by one I/O path each. The ground floor."""
