"""The command line: one file per verb. Parses, calls, prints."""
