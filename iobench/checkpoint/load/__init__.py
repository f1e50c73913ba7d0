"""Loads of a checkpoint by pieces, at any world size and with any shardings."""
