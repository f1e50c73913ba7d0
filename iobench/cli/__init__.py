"""The command line, with one file per verb. It parses options, calls the library and prints."""
