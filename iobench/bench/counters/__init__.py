"""Counters of CPU, memory and I/O, sampled around and during timed operations."""
