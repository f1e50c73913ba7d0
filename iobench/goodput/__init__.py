"""How often to save: intervals, goodput and lost work from measured times (`iobench plan`)."""
