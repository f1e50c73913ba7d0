"""What a trainer holds: saves and loads of one process, or of all ranks of a job."""
