"""Frameworks that save and restore through our writers. Each needs its framework only."""
