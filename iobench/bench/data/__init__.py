"""The data of a run: random memory, the files of a workload, digests to verify restores."""
