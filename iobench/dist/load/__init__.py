"""Loads of a checkpoint at any world size and with any shardings."""
