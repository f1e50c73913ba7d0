"""Replicas of snapshots in the memory of other nodes (Gemini, SOSP 2023)."""
