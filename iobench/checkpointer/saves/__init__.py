"""The commit of a checkpoint by all ranks of a job."""
