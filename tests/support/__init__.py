"""Test doubles and servers that several tests share."""
